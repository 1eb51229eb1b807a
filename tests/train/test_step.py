"""Optimizer steps of a rollout: every row is in one mini-batch, and the sampler is compared on every token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

import rlstab
from rlstab.core.batch import TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.objective import State, TokenObjective
from rlstab.core.stats import Settled
from rlstab.core.terms import Penalty, Terms
from rlstab.errors import ShapeError
from rlstab.train.engines import OneProcess
from rlstab.train.loop import train
from rlstab.train.metrics import Metrics
from rlstab.train.policy import load_policy
from rlstab.train.step import Experience, Learner, Learnt
from tests.train.runs import quiet, sampler_gap, small, without_times


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    run = small(tmp_path, optimisation__mini_batches=2, optimisation__epochs=2)
    policy = load_policy("countdown-tiny")
    return Learner(
        OneProcess(policy), run.composition, run.optimisation, 1.0, Accelerator(cpu=True), LocalComm(), run.seed
    )


def rows_of(learner: Learner, group_ids: list[int]) -> Iterator[list[int]]:
    return (rows.tolist() for _, rows in learner._mini_batches(torch.tensor(group_ids)))


@pytest.mark.parametrize(
    "group_ids",
    [[0, 0, 1, 1, 2, 2, 3, 3], [7, 1000, 7, -4, 1000, 2**52, -4, 2**52], [5, 5, 5, 6, 90, 90, 90, 91]],
    ids=["from 0", "anywhere and mixed", "of several sizes"],
)
def test_every_row_is_in_one_mini_batch_of_an_epoch_with_its_whole_group(
    learner: Learner, group_ids: list[int]
) -> None:
    steps = list(rows_of(learner, group_ids))
    assert len(steps) == 4
    for first, second in (steps[:2], steps[2:]):
        assert sorted(first + second) == list(range(8))
        assert {group_ids[row] for row in first} & {group_ids[row] for row in second} == set()
        assert len({group_ids[row] for row in first}) == 2


def test_group_ids_that_would_be_torn_are_an_error(learner: Learner) -> None:
    with pytest.raises(ShapeError, match=r"^group_ids reach 9007199254740992: ids of 2\*\*53 and more are not"):
        list(rows_of(learner, [2**53 + 1, 2**53, 0, 1]))


def gap_of(out: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """The record of one rollout, and what the gap over all its tokens is, with a sampler that is off by a known gap.

    Half of the responses have an advantage and are off by 0.5 per token, the others have none and are off by 0.1.
    """
    whole: dict[str, float] = {}
    learn = Learner.learn

    def off(self: Learner, experience: Experience, metrics: Metrics) -> Learnt:
        mask = experience.sequences.response_mask
        gap = torch.where(experience.advantages != 0, 0.5, 0.1).unsqueeze(-1).expand(mask.shape)
        signals = dict(experience.signals)
        signals["rollout_logprobs"] = signals["rollout_logprobs"] - gap
        changed = Experience(
            experience.sequences, signals, experience.advantages, experience.sequence_ids, experience.group_ids
        )
        whole.update(mean=float(gap[mask].mean()), largest=float(gap[mask].max()))
        return learn(self, changed, metrics)

    def half(responses: Any) -> Tensor:
        return ((responses.sequence_ids % 2).float() - 0.5).clamp(min=0)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "learn", off)
        run = small(out, optimisation__rollouts=1, optimisation__lr=1e-5, **changes)
        train(run, console=quiet(), advantages=half)
    assert 0.1 < whole["mean"] < 0.5
    return without_times(out)[0], whole


@pytest.mark.parametrize(
    "changes",
    [
        {"optimisation__old_logprobs": "recompute"},
        {"optimisation__old_logprobs": "recompute", "optimisation__mini_batches": 2, "optimisation__refresh": "step"},
        {"optimisation__refresh": "step"},
        {"optimisation__refresh": "step", "optimisation__old_logprobs": "rollout"},
    ],
    ids=["recompute", "recompute and refresh", "refresh, live", "refresh, rollout"],
)
def test_the_sampler_is_compared_on_every_token(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, whole = gap_of(tmp_path / "run", monkeypatch, **changes)
    assert record["sampler/gap"] == pytest.approx(whole["mean"], abs=sampler_gap(torch.float32))
    assert record["sampler/largest_gap"] == pytest.approx(whole["largest"], abs=sampler_gap(torch.float32))
    assert not {"sampler/gap_live", "sampler/largest_gap_live"} & record.keys()


@pytest.mark.parametrize("old", ["live", "rollout"])
def test_where_only_live_tokens_are_known_the_metric_says_so(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = gap_of(tmp_path / "run", monkeypatch, optimisation__old_logprobs=old)
    assert record["sampler/gap_live"] == pytest.approx(0.5, abs=sampler_gap(torch.float32))
    assert record["sampler/largest_gap_live"] == pytest.approx(0.5, abs=sampler_gap(torch.float32))
    assert not {"sampler/gap", "sampler/largest_gap"} & record.keys()


def test_with_several_mini_batches_the_refreshed_one_before_the_first_step_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "optimisation__refresh": "step",
        "optimisation__mini_batches": 2,
        "optimisation__old_logprobs": "rollout",
    }
    record, _ = gap_of(tmp_path / "run", monkeypatch, **changes)
    assert 0.1 < record["sampler/gap"] < 0.5
    assert record["sampler/largest_gap"] == pytest.approx(0.5, abs=sampler_gap(torch.float32))


class HeldEntropies(TokenObjective):
    """Weighs the log-probs of the first three tokens of each response by their live entropies, held constant."""

    name = "held_entropies"
    writes: ClassVar[frozenset[str]] = frozenset({"penalties"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        penalty = Penalty(
            1.0,
            lambda policy, anchor: anchor.signal("entropies") * policy.logprobs,
            batch.position < 3,
            reads=frozenset({"entropies"}),
        )
        return Terms(penalties={"": penalty})


def test_a_live_output_without_a_gradient_makes_no_row_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, float] = {}

    def learn(self: Learner, experience: Experience, metrics: Metrics) -> Learnt:
        self.objective = rlstab.compose(HeldEntropies())
        self.state = self.objective.init_state()
        mask = experience.sequences.response_mask
        seen["share"] = float(mask[:, :3].sum() / mask.sum())
        return whole(self, experience, metrics)

    whole = Learner.learn
    monkeypatch.setattr(Learner, "learn", learn)
    train(
        small(tmp_path / "run", optimisation__rollouts=1),
        console=quiet(),
        advantages=lambda one: torch.zeros(len(one.texts)),
    )
    assert 0 < seen["share"] < 0.9
    assert without_times(tmp_path / "run")[0]["head/live_fraction"] == pytest.approx(seen["share"])
