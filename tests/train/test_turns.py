"""Responses of several turns: the rule, the rollout, what learns from it, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.config.settings import RolloutSettings
from rlstab.core.turns import context_of, turns_of
from rlstab.errors import ConfigError, MissingSignal, OutOfRange
from rlstab.look.gradient import gradient_of, shares_of
from rlstab.models.decoding import Decoder
from rlstab.models.policy import load_policy
from rlstab.preflight import preflight
from rlstab.record import read_dump
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Countdown, Example
from rlstab.tasks.evidence import turn_evidence
from rlstab.tasks.lottery import Lottery
from rlstab.train.generate import sample
from rlstab.train.rollout import Rollout
from tests.train.own import Talking
from tests.train.runs import column, first_layers, go, of_user, small

TALK: dict[str, Any] = {"task": of_user("Talking"), "rollout__stop": "=", "rollout__max_new_tokens": 24}


@pytest.mark.parametrize(
    ("mask", "turns", "context"),
    [
        ([], [], []),
        ([0, 0], [None, None], [0, 0]),
        ([1, 1, 1], [0, 0, 0], [1, 1, 1]),
        ([1, 1, 0, 0], [0, 0, None, None], [1, 1, 0, 0]),
        ([1, 0, 1], [0, None, 1], [1, 1, 1]),
        ([0, 0, 1, 1, 0, 1, 0], [None, None, 0, 0, None, 1, None], [1, 1, 1, 1, 1, 1, 0]),
        ([1, 0, 1, 0, 0, 1, 1], [0, None, 1, None, None, 2, 2], [1] * 7),
    ],
)
def test_a_turn_begins_after_each_masked_block(mask: Any, turns: Any, context: Any) -> None:
    rows = torch.tensor([mask, mask[::-1], mask])
    for given in (rows.bool(), rows.long(), rows.float()):
        found = turns_of(given)[0].tolist()
        assert [turn if here else None for turn, here in zip(found, mask, strict=True)] == turns
    assert context_of(rows.bool())[2].int().tolist() == context


def sampled(policy: Any, reply: Any, batch_size: int, most: int = 24, greedy: bool = False) -> Rollout:
    settings = RolloutSettings.model_validate({"stop": "=", "max_new_tokens": most, "batch_size": batch_size})
    examples = [Countdown().example("train", index // 2) for index in range(6)]
    asked = ResponseBatch.of([0.0] * 6, torch.arange(6) // 2, limit=most)
    decoder = Decoder(policy, settings, 3, ["entropies", "logprobs"], greedy=greedy)
    parts = [*sample(decoder, examples, asked, reply=reply)]
    return Rollout.joined(parts, policy.pad_id)


def test_what_comes_after_a_reply_is_sampled_given_all_that_was_said() -> None:
    """Its log-probs are those of one forward over the whole conversation, in batches of any size."""
    policy = load_policy(str(first_layers(1)))
    said = policy.encode_text("12,")

    def reply(example: Example, answer: Sequence[int]) -> list[int] | None:
        return said if policy.decode([*answer]).count("12,") < 2 else None

    rollout = sampled(policy, reply, 6)
    turns, context = turns_of(rollout.response_mask), rollout.sequences.context
    assert int(torch.where(rollout.response_mask, turns, 0).max()) == 2
    replied = context & ~rollout.response_mask
    assert rollout.response_ids[replied].tolist() == said * (int(replied.sum()) // 3)
    for name, values in policy.evidence(rollout.sequences, {"logprobs", "entropies"}, 2, temperature=1.0).items():
        torch.testing.assert_close(values, rollout.signals[name], atol=2e-5, rtol=0)
    assert not rollout.signals["logprobs"][~rollout.response_mask].any()
    for row, answer in enumerate(rollout.answers()):
        count = int(turns[row][rollout.response_mask[row]].max()) + 1
        text = policy.decode(answer)
        assert text.count("12,") >= count - 1
        assert len(answer) <= 24
        assert bool(rollout.responses.ended[row]) == text.endswith(("=", "$"))
        assert float(rollout.responses.lengths[row]) == len(answer) - 3 * (count - 1)
    for size in (1, 4):
        alone = sampled(policy, reply, size)
        assert alone.answers() == rollout.answers()
        assert torch.equal(alone.responses.ended, rollout.responses.ended)
    some = replace(rollout, texts=[""] * 6).rows(torch.tensor([4, 1]))
    assert some.answers() == [rollout.answers()[row] for row in (4, 1)]
    packed = rollout.packed(rollout.signals["logprobs"])
    for row, length in enumerate(rollout.responses.lengths.long().tolist()):
        assert packed[row, :length].tolist() == rollout.signals["logprobs"][row][rollout.response_mask[row]].tolist()
    assert torch.equal(rollout.unpacked(packed), rollout.signals["logprobs"])


def test_a_reply_without_room_for_an_answer_cuts_the_response_off() -> None:
    policy = load_policy(str(first_layers(1)))
    plain = sampled(policy, None, 6)
    assert bool(plain.responses.ended.any())
    full = sampled(policy, lambda example, answer: [5] * (24 - len(answer)), 6)
    assert not full.responses.ended.any()
    assert full.answers() == plain.answers()


def test_a_turn_draws_other_numbers_than_the_one_before() -> None:
    """After the same tokens, a second turn with the draws of the first would write the same."""
    policy = load_policy(str(first_layers(1)))
    prompt = policy.tokens(Countdown().example("train", 0), RolloutSettings())
    rollout = sampled(policy, lambda example, answer: prompt if len(answer) < 9 else None, 6, most=40)
    turns = turns_of(rollout.response_mask)
    texts = [
        [row_ids[mask & (turn == number)].tolist() for number in (0, 1)]
        for row_ids, mask, turn in zip(rollout.response_ids, rollout.response_mask, turns, strict=True)
    ]
    pairs = [pair for pair in texts if pair[1]]
    assert pairs
    assert any(first != second[: len(first)] for first, second in pairs)


def test_evidence_of_turns() -> None:
    ids = torch.tensor([[1, 2, 9, 3, 0], [1, 9, 9, 4, 5], [6, 9, 7, 9, 8]])
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 1, 1], [1, 0, 1, 0, 1]]).bool()
    errors: list[str] = []
    given = [Example("", 0)] * 3, ["ab", "abc", "abcdef"], ids, mask, torch.tensor([1.0, 0.5, 0.25])
    found = turn_evidence(Talking(), *given, errors.append)
    assert found["turn_rewards"].tolist() == [[0, 2, 0], [1, 0, 0], [0, 0, 2]]
    states = found["turn_states"].tolist()
    assert [state > 0 for row in states for state in row] == [True, True, False] * 2 + [True] * 3
    assert len({row[0] for row in states}) == 1
    assert states[0][1] == states[2][1] == states[2][2] != states[1][1]
    last = turn_evidence(Countdown(), *given, errors.append)["turn_rewards"]
    assert last.tolist() == [[0, 1, 0], [0, 0.5, 0], [0, 0, 0.25]]
    assert errors == []
    few = type("Few", (Talking,), {"turn_rewards": lambda *_: [1.0, 1.0]})()
    assert turn_evidence(few, *given, errors.append)["turn_rewards"].tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert len(errors) == 1
    assert "for 3 turns" in errors[0]


def test_the_lottery_scores_both_turns_and_draws_nothing_where_it_evaluates() -> None:
    task, won = Lottery(terms=3, stake=4.0), 0
    for index in range(40):
        example, held = task.example("train", index), task.example("eval", index)
        problem, steps = example.prompt.split("=", 1)
        assert steps.count(";") == 2
        assert eval(problem[1:]) == int(steps.split(";")[1].split("=")[1])  # digits, plus and minus
        assert task.reply(example, "7$") == "A"
        assert task.reply(example, "7$A3$") is task.reply(example, "7") is None
        second = task.turn_rewards(example, "8$A3$")[1]
        assert second in (0.0, 4.0)
        won += second > 0
        for first, wins in (("8", 1), ("-12", 1), ("7", 0), ("", 0), ("128", 0), ("8;", 0)):
            assert task.turn_rewards(example, f"{first}$A")[:2] == [wins, 0]
            assert task.score(held, f"{first}$A3$") == wins
        assert task.score(example, "8$A3$") == 1 + second
    assert 10 < won < 30
    with pytest.raises(OutOfRange, match="`stake` 0 to"):
        Lottery(stake=-1.0)


def test_every_turn_is_learnt_recorded_and_looked_at(tmp_path: Path) -> None:
    stages = ["gigpo", {"name": "dynamic_sampling", "max_refills": 1}]
    run = small(tmp_path, ["clip_higher", "turn_credit"], stages=stages, tracking__dump_every=1, **TALK)
    records = go(run).records
    assert all(1 < turns <= 3 for turns in column(records, "response/turns"))
    assert column(records, "sampler/largest_gap_live") == pytest.approx([0, 0], abs=1e-4)
    assert min(column(records, "turn_credit/credit")) > 0
    assert all(0 <= alone < 1 for alone in column(records, "gigpo/alone"))
    assert sum(column(records, "turns/errors")) > 0
    steps = [replace(step) for step in read_dump(tmp_path / "dump").steps]
    for step in steps:
        texts = step.tensors["ids"].split(step.tensors["lengths"].tolist())
        assert any(not bool(step.mask[step.row == row].all()) for row in range(len(texts)))
        assert torch.equal(step.turns, step.batch.signal("turn").long())
        assert not step.tensors["coefficients"][~step.mask].any()
    gradient = gradient_of(steps, shares_of(steps))
    assert gradient is not None
    assert len(gradient.turns) == 1 + max(int(step.turns.max()) for step in steps)
    assert sum(share for share, _ in gradient.turns) == pytest.approx(1)
    assert sum(tokens for _, tokens in gradient.turns) == pytest.approx(1)


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (["clip_higher", "turn_credit"], {}, MissingSignal, "'turn_credit' reads 'turn', .* Give the task `reply`"),
    ("clip_higher", {"stages": ["gigpo"]}, MissingSignal, "'gigpo' reads 'turn', .* have one turn"),
    (["clip_higher", "turn_credit"], TALK | {"task": of_user("Silent")}, MissingSignal, "Give the task `turn_rewards`"),
    (["clip_higher", "turn_credit"], TALK | {"task": of_user("Lossy")}, ConfigError, "Set task.flaky to 0"),
    (["clip_higher", "block_mean"], TALK | {"task": of_user("Blocky")}, ConfigError, "blocks are read"),
    (
        ["clip_higher", "stream_weight"],
        TALK | {"stages": [{"name": "deep_grpo", "threshold": 0.5, "warmup": 0}]},
        ConfigError,
        "branches from inside a response",
    ),
]


@pytest.mark.parametrize(("objective", "changes", "error", "why"), REFUSED)
def test_what_turns_do_not_go_with_is_refused(
    objective: Any, changes: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    run = small(tmp_path, objective, **changes)
    with pytest.raises(error, match=why):
        go(run)
    if "branches" not in why:  # `rlstab check` says it too, but for what only a rollout shows
        with pytest.raises(error, match=why):
            preflight(run)
