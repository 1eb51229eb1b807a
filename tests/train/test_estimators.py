"""Runs by each advantage estimator that reads more than rewards, or compares over the rollout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.errors import MissingSignal
from rlstab.stages.opob import OPOB
from rlstab.stages.opob_proxy import OPOBProxy, logit_squares
from rlstab.train.estimating import Estimating
from rlstab.train.metrics import Metrics
from rlstab.train.policy import load_policy
from rlstab.train.rollout import Rollout
from rlstab.train.sequence_gradients import squared_gradients
from rlstab.train.step import forward_signals
from tests.stages.estimating import batch
from tests.train.runs import go, small
from tests.train.test_sequence_gradients import some

#: What it reports in every rollout that has something to learn.
STAGES: dict[str, tuple[Any, set[str]]] = {
    "opo": ("opo", {"baseline_shift"}),
    "reinforce_pp": ("reinforce_pp", {"mean", "deviation"}),
    "reinforce_pp, baseline": ({"name": "reinforce_pp", "baseline": True}, {"mean", "deviation"}),
    "bnpo": ("bnpo", {"alpha", "beta"}),
    "opob": ("opob", {"baseline_shift", "effective_share"}),
    "opob_proxy": ("opob_proxy", {"baseline_shift", "effective_share"}),
    "blockwise": ("blockwise", {"alone", "blocks"}),
}


def chain(out: Path, *stages: Any, **changes: Any) -> Any:
    """Two rollouts of the model that solves chains."""
    return small(
        out,
        ["clip_higher", "importance_correction", "block_mean"],
        stages=list(stages),
        task__name="chain",
        model__name="chain-tiny",
        rollout__max_new_tokens=40,
        optimisation__rollouts=2,
        optimisation__lr=1e-5,
        **changes,
    )


@pytest.mark.parametrize("name", STAGES)
def test_a_run_learns(name: str, tmp_path: Path) -> None:
    stage, reported = STAGES[name]
    records = go(chain(tmp_path / "run", stage)).records
    own = stage if isinstance(stage, str) else stage["name"]
    found = {key.partition("/")[2] for record in records for key in record if key.startswith(f"{own}/")}
    assert found == reported
    assert all(math.isfinite(value) for record in records for key, value in record.items() if key.startswith(own))
    assert any(record.get("gradient/norm", 0.0) > 0 for record in records)


def test_blocks_go_with_the_responses_that_are_learnt(tmp_path: Path) -> None:
    # of groups of one everything is dropped: the evidence has to be as narrow as what is left
    drop = {"name": "dynamic_sampling", "max_refills": 0}
    records = go(chain(tmp_path / "run", "blockwise", drop, rollout__group=1)).records
    assert [record["dynamic_sampling/dropped"] for record in records] == [1.0, 1.0]
    assert all("gradient/norm" not in record for record in records)


def test_a_task_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingSignal, match="the stage 'blockwise' needs blocks, and the task 'countdown' says of"):
        go(small(tmp_path / "run", stages=["blockwise"]))


def test_gradients_are_measured_where_rewards_differ() -> None:
    policy = load_policy("countdown-tiny")
    sequences = some(policy)
    given = batch([1.0, 0.0, 1.0], [0, 0, 1], sequences.response_mask.sum(-1).tolist())
    sampled = {"rollout_logprobs": torch.full(sequences.response_ids.shape, -1.0)}
    rollout = Rollout(sequences, sampled, given, torch.zeros(3, dtype=torch.bool), None, 0)
    estimating = Estimating(OPOB(norm_by_std=False), policy, LocalComm(), 1.0, 8)
    found, _ = estimating.advantages(rollout, {}, Metrics())
    squares = squared_gradients(policy, sequences, 1.0)
    assert estimating._evidence("squared_gradient", rollout).tolist() == [*squares[:2].tolist(), 0.0]
    now = estimating._fresh(rollout, frozenset({"logprobs", "sum_p_sq"}))
    ratios = now["logprobs"].double() + sequences.response_mask.double()
    weights = ratios.sum(-1).mul(2).exp() * squares
    expected = float(weights[1] / weights[:2].sum())
    assert found.tolist() == pytest.approx([expected, expected - 1, 0.0], abs=1e-6)


def test_the_stand_in_is_of_the_policy_that_learns() -> None:
    policy = load_policy("countdown-tiny")
    sequences = some(policy)
    given = batch([1.0, 0.0, 1.0], [0, 0, 1], sequences.response_mask.sum(-1).tolist())
    shape = sequences.response_ids.shape
    sampled = {"rollout_logprobs": torch.full(shape, -1.0), "sum_p_sq": torch.full(shape, 0.5)}  # of older weights
    estimating = Estimating(OPOBProxy(norm_by_std=False), policy, LocalComm(), 1.0, 8)
    found, _ = estimating.advantages(
        Rollout(sequences, sampled, given, torch.zeros(3, dtype=torch.bool), None, 0), {}, Metrics()
    )
    now = forward_signals(policy, sequences, torch.arange(3), 1.0, {"logprobs", "sum_p_sq"}, {})
    mask = sequences.response_mask[:, : now["logprobs"].shape[1]]
    squares = torch.where(mask, logit_squares(now["logprobs"], now["sum_p_sq"]), 0.0).sum(-1)
    weights = torch.where(mask, now["logprobs"].double() + 1, 0.0).sum(-1).mul(2).exp() * squares
    expected = float(weights[1] / weights[:2].sum())
    assert found.tolist() == pytest.approx([expected, expected - 1, 0.0], abs=1e-6)
