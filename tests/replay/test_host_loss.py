"""The loss of a dump again: sound ones agree, and every error is named or located, by token and by micro-batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlstab.replay.host_loss import judge
from rlstab.replay.steps import Step
from tests.replay.dumps import step, without_coefficients

LOSSES = ["trl/grpo", "trl/bnpo", "trl/dr_grpo", "trl/dapo", "trl/luspo", "verl/vanilla"]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_sound_dump_agrees(loss: str) -> None:
    steps = [step(1, loss=loss), step(2, loss=loss)]
    for given in (steps, list(map(without_coefficients, steps))):
        verdict = judge(given)
        assert (verdict.agrees, verdict.findings) == (True, ())
        assert verdict.error < 1e-6


#: Words of what is said of an error of `trl/dapo`, or of the loss named.
ERRORS = {
    "twice": "accumulation twice",
    "not divided": "not divided by the gradient accumulation",
    "world": "multiplied by the number of processes",
    "by world": "divided by the number of processes once too often",
    "sign": "policy term is -1 times what it should be.",
    "odd": "policy term is 0.37 times",
    "as bnpo": "tokens of each micro-batch",
    "as grpo": "mean over each response",
    "as dr_grpo": "constant length",
    "trl/bnpo as dapo": "tokens of the optimizer step",
    "trl/dapo own micro-batch": "tokens of each micro-batch",
    "own rank": "tokens of each rank",
    "prompts in the denominator": "prompts count",
    "padding in the denominator": "padding counts",
    "sampler": "sampler's log-probs",
    "old shifted": "denominator are shifted ahead",
    "mask shifted": "mask is shifted back",
    "mask ignored": "outside the response mask count",
    "no end": "last token of each response",
    "no end, and its denominator": "last token of each response, its end, does not count.",
    "no first": "first token",
    "cut off": "cut off do not count",
    "float16": "float16",
    "sequence": "ratio is that of the sequence",
    "no clip": "nothing is clipped",
    "high none": "no upper bound",
    "low none": "no lower bound",
    "exchanged": "ranges are exchanged",
    "low for both": "upper clip range is the lower one",
    "no cap": "no cap",
    "no kl": "kl term 0 times",
    "beta a third": "kl term 0.3333 times",
    "kl exchanged": "two policies exchanged",
    "k1": "kl term is k1",
    "k2": "kl term is k2",
    "k3": "kl term is k3.",
    "normalised": "normalised again in each micro-batch",
    "advantage sign": "advantages are of the other sign",
    "verl/vanilla entropy sign": "entropy bonus -1 times",
    "verl/vanilla no entropy": "entropy bonus 0 times",
    "verl/vanilla twice": "accumulation twice",
}


@pytest.mark.parametrize("error", [*ERRORS])
def test_an_error_is_named(error: str) -> None:
    loss, _, kind = error.partition(" ") if "/" in error else ("trl/dapo", "", error)
    steps = [step(number, loss=loss, error=kind) for number in (1, 2, 3)]
    for given in (steps, list(map(without_coefficients, steps))):
        verdict = judge(given)
        assert verdict.agrees is False
        (said,) = verdict.findings
        assert ERRORS[error] in said.lower()


def test_an_error_that_nobody_knows_is_located() -> None:
    steps = [step(1, error="one response")]
    (said,) = judge(steps).findings
    assert "4 of 100 tokens" in said
    assert "2 in response 5." in said
    (said,) = judge(list(map(without_coefficients, steps))).findings
    assert "micro-batch 2 differs most (on rank 0)" in said
    (said,) = judge([step(1, error="ratio bfloat16")]).findings
    assert "half precision" in said


def test_two_errors_at_once_are_both_named() -> None:
    steps = [step(number, error="as bnpo") for number in (1, 2)]
    steps = [
        replace(given, tensors={**given.tensors, "coefficients": given.tensors["coefficients"] / 4})
        for given in map(without_values, steps)
    ]
    (said,) = judge(steps).findings
    assert "tokens of each micro-batch, and its policy term is 0.25 times" in said


def without_values(given: Step) -> Step:
    told = given.header.loss
    assert told is not None
    header = given.header.model_copy(update={"loss": told.model_copy(update={"values": []})})
    return replace(given, header=header)


def silent(given: Step) -> Step:
    return without_coefficients(without_values(given))


def test_an_error_of_the_gradient_alone_or_of_some_steps_is_named() -> None:
    """The losses that are logged are right; so was it where gradients were divided twice."""
    steps = [step(number) for number in (1, 2, 3)]
    spoiled = {**steps[1].tensors, "coefficients": steps[1].tensors["coefficients"] / 4}
    (said,) = judge([steps[0], replace(steps[1], tensors=spoiled), steps[2]]).findings
    assert "accumulation twice" in said
    assert "This is said of its gradient alone. So it is in 1 of 3 steps." in said


def test_a_policy_that_moved_before_any_step_is_told() -> None:
    sound = silent(step(1, first=True))
    assert judge([sound]).findings == ()
    tensors = {**sound.tensors, "logprobs": sound.tensors["logprobs"] - 0.3}
    assert "moved before any step" in judge([replace(sound, tensors=tensors)]).findings[0]
    sampled = tensors["rollout_logprobs"]
    tensors |= {"old_logprobs": sampled, "logprobs": sampled - 0.3}
    assert "sampler" in judge([replace(sound, tensors=tensors)]).findings[0]
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
    tensors = {**given.tensors, "rewards": rewards.flatten(), "advantages": values[given.row]}
    loss = given.header.loss
    assert loss is not None
    loss = loss.model_copy(update={"settings": {**loss.settings, "rewards": "group", "group": 4}})
    header = given.header.model_copy(update={"loss": loss})
    said = " ".join(judge([replace(given, tensors=tensors, header=header)]).findings)
    assert words in said
    assert ("not those of its rewards" in said) == bool(words)


def test_without_a_name_or_a_record_nothing_is_claimed() -> None:
    given = step(1)
    loss = given.header.loss
    assert loss is not None
    code = {"objective": [{"name": "mine.py:Mine"}]}
    for told in (
        None,
        loss.model_copy(update={"name": "some/thing"}),
        loss.model_copy(update={"values": []}),
        loss.model_copy(update={"name": "rlstab", "settings": code}),
    ):
        header = given.header.model_copy(update={"loss": told})
        assert judge([without_coefficients(replace(given, header=header))]).agrees is None
