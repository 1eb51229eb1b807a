"""Expanders in real runs: refills, branches, both, over ranks, and after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlstab.config import load_run
from rlstab.train import checkpoint, making
from rlstab.train.loop import RunResult
from tests.train.runs import go, trained_alike, weights_alike
from tests.train.test_distributed import command, file_of, ran
from tests.train.test_resume import assert_same


def run(out: Path, stages: list[Any], objective: Any = "clip_higher", **changes: Any) -> Any:
    data = {
        "objective": objective,
        "stages": stages,
        "rollout": {"prompts": 4, "group": 8, "max_new_tokens": 16},
        "optimisation": {"rollouts": 3, "lr": 1e-4},
        "evaluation": {"every": 0},
        "tracking": {"out": str(out), "checkpoint_every": 0},
    }
    return load_run(data, {key.replace("__", "."): value for key, value in changes.items()})


def column(result: RunResult, name: str) -> list[float]:
    return [one[name] for one in result.records]


def test_dynamic_sampling_leaves_no_dead_group_and_says_what_it_cost(tmp_path: Path) -> None:
    plain = go(run(tmp_path / "plain", []))
    refilled = go(run(tmp_path / "refilled", ["dynamic_sampling"]))
    assert min(column(plain, "reward/zero_std_groups")) > 0
    assert column(refilled, "reward/zero_std_groups") == [0.0] * 3
    dropped, cost = (column(refilled, f"dynamic_sampling/{name}") for name in ("dropped_groups", "sampled_per_learnt"))
    # every rollout was filled: as many groups were sampled beyond the four as were dropped
    assert cost == pytest.approx([(4 + one) / 4 for one in dropped])


def test_without_refills_it_drops_and_the_rest_is_learnt(tmp_path: Path) -> None:
    result = go(run(tmp_path / "run", [{"name": "dynamic_sampling", "max_refills": 0}]))
    shares = column(result, "dynamic_sampling/dropped")
    assert column(result, "dynamic_sampling/sampled_per_learnt") == pytest.approx([1 / (1 - one) for one in shares])
    assert column(result, "reward/zero_std_groups") == [0.0] * 3


def test_a_rollout_of_which_everything_is_dropped_changes_nothing(tmp_path: Path) -> None:
    """Groups of one have nothing to compare with."""
    stages = [{"name": "dynamic_sampling", "max_refills": 1}]
    result = go(run(tmp_path / "run", stages, rollout__group=1, optimisation__rollouts=2))
    assert column(result, "dynamic_sampling/dropped") == [1.0, 1.0]
    assert column(result, "dynamic_sampling/dropped_groups") == [8.0, 8.0]
    assert len(result.records) == 2


DEEP = {"name": "deep_grpo", "branches": 3, "warmup": 4, "window": 16}
TWO_STREAMS = ["clip_higher", "stream_weight"]


def test_branches_are_learnt_in_a_stream_of_their_own(tmp_path: Path) -> None:
    result = go(run(tmp_path / "run", [DEEP], TWO_STREAMS))
    with_branches, without = (column(result, f"deep_grpo/both_outcomes{one}") for one in ("", "_without"))
    assert all(one >= other for one, other in zip(with_branches, without, strict=True))
    assert sum(with_branches) > sum(without)
    assert column(result, "stream_weight/weight") == pytest.approx([2.0] * 3)
    assert all(0 < one < 1 for one in column(result, "deep_grpo/pivot"))
    assert column(result, "deep_grpo/fitted")[0] == 0
    # all responses of the rollout are learnt from: the branches are as many of the tokens as the sampler says
    shares = [one / (1 + one) for one in column(result, "deep_grpo/tokens")]
    assert column(result, "stream_weight/branches") == pytest.approx(shares)


def test_branches_alone_count_nothing_with_a_coefficient_of_0(tmp_path: Path) -> None:
    """The gradient is that of the answers from the prompt: weights as in a run without branches, up to rounding."""
    objective = ["clip_higher", {"name": "stream_weight", "coefficient": 0.0}]
    kept = {"tracking__checkpoint_every": 1, "optimisation__rollouts": 1}
    go(run(tmp_path / "branches", [DEEP], objective, **kept))
    go(run(tmp_path / "none", [], "clip_higher", **kept))
    weights_alike(tmp_path / "branches", tmp_path / "none")


def test_branch_points_before_dead_groups_are_dropped(tmp_path: Path) -> None:
    result = go(run(tmp_path / "run", [DEEP, "dynamic_sampling"], TWO_STREAMS))
    assert column(result, "reward/zero_std_groups") == [0.0] * 3
    assert all(one > 0 for one in column(result, "deep_grpo/branches"))
    assert any(one < 1 for one in column(result, "dynamic_sampling/dropped_branches"))


BOTH = [DEEP, "dynamic_sampling"]


def test_a_run_that_ended_inside_a_rollout_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window and the number of prompts drawn are in the checkpoint, and a rollout that was begun is made again."""
    settings = {"tracking__checkpoint_every": 1, "optimisation__rollouts": 4}
    go(run(tmp_path / "whole", BOTH, TWO_STREAMS, **settings))
    out, calls = tmp_path / "part", []
    rollout = run(out, BOTH, TWO_STREAMS, **settings)

    class Ended(Exception):
        pass

    def fails(*arguments: Any, **options: Any) -> Any:
        calls.append(options.get("given") is not None)
        if len(checkpoint.checkpoints(out / "checkpoints")) == 2 and calls[-1]:
            raise Ended
        return sample(*arguments, **options)

    sample = making.sample
    with monkeypatch.context() as patched:
        patched.setattr(making, "sample", fails)
        with pytest.raises(Ended):
            go(rollout)
    kept = checkpoint.verify(checkpoint.checkpoints(out / "checkpoints")[-1]).standing
    assert kept["states"]["deep_grpo"]["seen"] > 16
    assert kept["drawn"] > 8
    go(rollout, resume=True)
    assert_same(out, tmp_path / "whole")


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    settings = {"tracking__checkpoint_every": 1, "optimisation__rollouts": 2}
    one, two = (run(tmp_path / name, BOTH, TWO_STREAMS, **settings) for name in ("one", "two"))
    go(one)
    ran(command(file_of(two, tmp_path)))
    trained_alike(tmp_path / "two", tmp_path / "one")
