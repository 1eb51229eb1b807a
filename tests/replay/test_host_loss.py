"""The loss of a dump again: sound ones agree, and every error is named or located, by token and by micro-batch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlstab.look.host_loss import _fitted, judge
from rlstab.record import Step
from tests.replay.dumps import ERRORS, SETTINGS, step, told, without_coefficients

LOSSES = ["trl/grpo", "trl/bnpo", "trl/dr_grpo", "trl/dapo", "trl/luspo", "trl/cispo", "verl/vanilla"]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_sound_dump_agrees(loss: str) -> None:
    steps = [step(1, loss=loss), step(2, loss=loss)]
    for given in (steps, list(map(without_coefficients, steps))):
        verdict = judge(given)
        assert (verdict.agrees, verdict.findings) == (True, ())
        assert verdict.error < 1e-6


@pytest.mark.parametrize(
    ("error", "bare"),
    [
        pytest.param(error, bare, marks=[pytest.mark.slow] * ((index + bare) % 2))
        for index, error in enumerate(ERRORS)
        for bare in (False, True)
    ],
)
def test_an_error_is_named(error: str, bare: bool) -> None:
    """With the coefficients of each token, and by the losses of micro-batches alone: one of them in the default run."""
    made = step(1, error=error)
    verdict = judge([without_coefficients(made) if bare else made])
    assert verdict.agrees is False
    (said,) = verdict.findings
    assert ERRORS[error][0] in said.lower()


def test_nothing_is_found_where_a_policy_rests_or_ratios_are_of_sequences() -> None:
    resting = silent(step(58))
    resting = resting.having({"old_logprobs": resting.tensors["logprobs"].clone()})
    by_sequence = told(step(56, error="sequence"), settings=SETTINGS | {"sequence": True})
    for verdict in (judge([resting]), judge([by_sequence])):
        assert verdict.findings == ()
        assert verdict.agrees is not False


def test_a_fit_without_one_of_the_terms_does_not_depend_on_what_memory_held() -> None:
    terms = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    terms[:, 2] = 0
    for _ in range(300):
        held = [torch.tensor([0, 0, 1], dtype=torch.int32) for _ in range(3)]  # where the fit may find it
        del held
        assert _fitted([(-terms.sum(1), terms, 0.0)])[0] == pytest.approx([-1, -1, -1])


def test_rounding_is_no_part_of_a_term_that_is_missing() -> None:
    steps = []
    for number in (1, 2, 3):
        whole, without = step(number).header.loss, step(number, error="no kl")
        assert whole is not None
        assert without.header.loss is not None
        pairs = zip(whole.values, without.header.loss.values, strict=True)
        values = [wrong + 6e-4 * (right - wrong) for right, wrong in pairs if right is not None and wrong is not None]
        steps.append(told(without_coefficients(without), values=values))
    (said,) = judge(steps).findings
    assert "KL term 0 times" in said


def test_an_error_that_nobody_knows_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step(1, error="one response")]
    (said,) = judge(steps).findings
    assert "4 of 100 tokens" in said
    assert "2 in response 5." in said
    (said,) = judge(list(map(without_coefficients, steps))).findings
    assert "micro-batch 2 differs most (on rank 0)" in said
    monkeypatch.setattr("rlstab.look.host_loss.FEW", 0)  # no factors of known errors, most of the time
    (said,) = judge([step(1, error="ratio bfloat16")]).findings
    assert "half precision" in said


def divided(given: Step) -> Step:
    return given.having({"coefficients": given.tensors["coefficients"] / 4})


def test_two_errors_at_once_are_both_named() -> None:
    (said,) = judge([divided(told(step(number, error="as bnpo"), values=[])) for number in (1, 2)]).findings
    assert "tokens of each micro-batch, and its policy term is 0.25 times" in said


def test_an_error_of_the_gradient_alone_or_of_some_steps_is_named() -> None:
    """The losses that are logged are right; so was it where gradients were divided twice."""
    (said,) = judge([step(1), divided(step(2)), step(3)]).findings
    assert "accumulation twice" in said
    assert "This holds only for its gradient. This is the case in 1 of 3 steps." in said
    (said,) = judge([step(number, error="trl/cispo live") for number in (1, 2)]).findings
    assert "weights have a gradient" in said


def silent(given: Step) -> Step:
    return without_coefficients(told(given, values=[]))


def test_a_policy_that_moved_before_any_step_is_told() -> None:
    sound = silent(step(1, first=True))
    assert judge([sound]).findings == ()
    assert "moved before any step" in judge([sound.having({"logprobs": sound.tensors["logprobs"] - 0.3})]).findings[0]
    sampled = sound.tensors["rollout_logprobs"]
    assert "sampler" in judge([sound.having({"old_logprobs": sampled, "logprobs": sampled - 0.3})]).findings[0]
    # nor is it at learning rate 0
    resting = silent(step(1))
    header = resting.header.model_copy(update={"learning_rate": 0.0})
    assert "moved before any step" in judge([replace(resting, header=header)]).findings[0]


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("", lambda r, m, s: (r - m) / (s + 1e-4)),
        ("response 2 is 1.521 in", lambda r, m, s: (r - m) / (s * 0.75**0.5 + 1e-4)),
        ("not those of its rewards", lambda r, m, s: (r - m) / s),
        ("not those of its rewards", lambda r, m, s: r - m),
    ],
)
def test_advantages_that_are_not_those_of_the_rewards_are_told(words: str, change: Any) -> None:
    given = silent(step(1, first=True))
    rewards = (torch.arange(16) * 7 % 5 / 4).view(4, 4)
    values = change(rewards, rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)).flatten()
    given = given.having({"rewards": rewards.flatten(), "advantages": values[given.row]})
    findings = judge([told(given, settings=SETTINGS | {"rewards": "group", "group": 4})]).findings
    assert len(findings) == bool(words)
    assert words in "".join(findings)


@pytest.mark.parametrize("value", [1.2, -1.2, 0.1, 1e-3, 7.3, 1e4, 1e21, 3e-9])
def test_rounding_of_equal_rewards_and_missing_rewards_are_not_errors(value: float) -> None:
    """TRL's mean in float32 leaves rests, which the standard deviation of equal rewards divides by itself."""
    given = silent(step(1, first=True))
    rewards = torch.full((2, 8), value)
    rewards[1] = torch.arange(8) % 3
    centred = rewards - rewards.sum(1, keepdim=True) * torch.tensor(1 / 8).nextafter(torch.tensor(1.0))
    values = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    for changed in (rewards, rewards.index_fill(1, torch.tensor(3), math.nan)):
        made = given.having({"rewards": changed.flatten(), "advantages": values[given.row]})
        made = made.having({"group_ids": torch.arange(16) // 8})
        assert judge([told(made, settings=SETTINGS | {"rewards": "group", "group": 8})]).findings == ()


def test_without_a_name_or_a_record_nothing_is_claimed() -> None:
    given = without_coefficients(step(1))
    nameless = replace(given, header=given.header.model_copy(update={"loss": None}))
    code = told(given, name="rlstab", settings={"objective": [{"name": "mine.py:Mine"}]})
    for unknown in (nameless, told(given, name="some/thing"), told(given, settings={"pi": 3}), silent(given), code):
        assert judge([unknown]).agrees is None
