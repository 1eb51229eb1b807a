"""The loss of a dump again: sound ones agree, and every known error is named, by token and by micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlstab.replay.host_loss import FORMULAS, Formula, judge
from rlstab.replay.steps import Step
from tests.replay.dumps import step, without_coefficients


@pytest.mark.parametrize("loss", [*FORMULAS])
def test_a_sound_dump_agrees(loss: str) -> None:
    steps = [step(1, loss=loss), step(2, loss=loss)]
    for given in (steps, [without_coefficients(one) for one in steps]):
        verdict = judge(given)
        assert (verdict.agrees, verdict.findings) == (True, ())
        assert verdict.error < 1e-6


#: By a word of the sentence that names it, what a trainer did in place of what it said, and which loss it said.
ERRORS = {
    "accumulation twice": ("trl/dapo", lambda formula, given: replace(formula, scale=1 / given.accumulation)),
    "not divided by the gradient accumulation": ("trl/grpo", lambda formula, given: replace(formula, scale=4.0)),
    "number of processes once too often": ("verl/vanilla", lambda formula, _: replace(formula, scale=0.5)),
    "maximised": ("trl/dapo", lambda formula, _: replace(formula, scale=-1.0)),
    "tokens of each micro-batch": ("trl/dapo", lambda formula, _: replace(formula, mean="part")),
    "mean over each response": ("trl/dapo", lambda formula, _: replace(formula, mean="response")),
    "tokens of the optimizer step": ("trl/bnpo", lambda formula, _: replace(formula, mean="step")),
    "constant length": ("trl/grpo", lambda formula, _: replace(formula, mean="length")),
    "sampler's log-probs": ("trl/dapo", lambda formula, _: replace(formula, old="rollout")),
    "outside the response mask": ("trl/dapo", lambda formula, _: replace(formula, counted="all")),
    "ratio is that of the sequence": ("trl/dapo", lambda formula, _: replace(formula, ratio="sequence")),
    "nothing is clipped": ("trl/dapo", lambda formula, _: replace(formula, low=None, cap=None)),
    "upper clip range": ("trl/dapo", lambda formula, _: replace(formula, high=0.2)),
    "no cap": ("trl/dapo", lambda formula, _: replace(formula, cap=None)),
    "no kl term": ("trl/dapo", lambda formula, _: replace(formula, beta=0.0)),
    "kl term is k1": ("trl/dapo", lambda formula, _: replace(formula, estimator="k1")),
    "kl term is k2": ("trl/dapo", lambda formula, _: replace(formula, estimator="k2")),
    "kl term is k3.": ("trl/dapo", lambda formula, _: replace(formula, estimator="k3")),
}


@pytest.mark.parametrize("word", [*ERRORS])
@pytest.mark.parametrize("by_token", [True, False])
def test_an_error_is_named(word: str, by_token: bool) -> None:
    loss, change = ERRORS[word]
    steps = [step(number, loss=loss, change=change) for number in (1, 2, 3)]
    verdict = judge(steps if by_token else [without_coefficients(one) for one in steps])
    assert verdict.agrees is False
    (said,) = verdict.findings
    assert word in said.lower()


def test_two_errors_at_once_are_both_named() -> None:
    def change(formula: Formula, _: Step) -> Formula:
        return replace(formula, mean="part", estimator="k1")

    (said,) = judge([step(1, change=change), step(2, change=change)]).findings
    assert "each micro-batch" in said
    assert "k1" in said


def test_what_nobody_knows_is_described_by_its_shape() -> None:
    def spoiled(factor: torch.Tensor, given: Step) -> Step:
        return replace(given, tokens={**given.tokens, "coefficients": given.tokens["coefficients"] * factor})

    given = step(1)
    per_rank = torch.tensor([1.0, 0.7])[torch.tensor(given.ranks)[given.part[given.row]]]
    (said,) = judge([spoiled(per_rank, given)]).findings
    assert "same within a rank" in said
    (said,) = judge([spoiled(torch.full_like(per_rank, 3.7), given)]).findings
    assert "3.7 times" in said
    (said,) = judge([spoiled((given.row != 3).float(), given)]).findings
    assert "have none" in said


def test_a_policy_that_moved_before_any_step_is_told() -> None:
    sound = step(1, first=True)
    assert judge([sound]).findings == ()
    tokens = {**sound.tokens, "logprobs": sound.tokens["logprobs"] - 0.3}
    moved = judge([replace(sound, tokens=tokens)])
    assert not moved.agrees
    assert "moved before any step" in moved.findings[0]
    tokens |= {"old_logprobs": tokens["rollout_logprobs"], "logprobs": tokens["rollout_logprobs"] - 0.3}
    assert "sampler" in judge([replace(sound, tokens=tokens)]).findings[0]


def test_without_a_name_or_a_record_nothing_is_claimed() -> None:
    given = step(1)
    assert given.loss is not None
    unknown = replace(given, loss=given.loss.model_copy(update={"name": "some/thing"}))
    silent = without_coefficients(replace(given, loss=given.loss.model_copy(update={"values": []})))
    for one in (replace(given, loss=None), unknown, silent):
        assert judge([one]).agrees is None
