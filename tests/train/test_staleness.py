"""A sampler that is behind: by how much, what waits, and that a kill or several processes change nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rlstab
from rlstab.train import asking, checkpoint
from rlstab.train.making import Maker
from rlstab.train.step import Learner
from tests.train.runs import go, small, trained_alike
from tests.train.test_distributed import command, counted, file_of, ran
from tests.train.test_resume import assert_same

STALE: dict[str, Any] = {
    "rollout__staleness": 2,
    "optimisation__rollouts": 6,
    "tracking__checkpoint_every": 1,
    "tracking__keep_checkpoints": 10,
}


def test_each_rollout_is_learnt_so_many_updates_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, learnt, now = [], [], []
    make, learn = Maker.make, Learner.learn

    def making_one(self: Maker, *arguments: Any) -> Any:
        made.append(len(learnt))
        return make(self, *arguments)

    def learning(self: Learner, experience: Any, metrics: Any) -> Any:
        learnt.append(made[len(learnt)])
        now.append(int(experience.group_ids.min()) // 4)
        return learn(self, experience, metrics)

    monkeypatch.setattr(Maker, "make", making_one)
    monkeypatch.setattr(Learner, "learn", learning)
    go(small(tmp_path / "run", **STALE))
    assert now == [0, 1, 2, 3, 4, 5]  # each rollout once, in order
    assert [update - at for update, at in enumerate(learnt)] == [0, 1, 2, 2, 2, 2]


def test_the_ratio_is_to_the_stale_sampler(tmp_path: Path) -> None:
    run = small(tmp_path / "run", **STALE)
    assert run.optimisation.old_logprobs == "rollout"
    # a rollout whose optimizer step is skipped has no ratio
    values = {one["rollout"]: one["ratio/mean"] for one in go(run).records if "ratio/mean" in one}
    assert len(values) >= 3
    assert max(abs(one - 1) for one in values.values()) > 1e-3
    fresh = go(small(tmp_path / "fresh", **{**STALE, "rollout__staleness": 0, "optimisation__old_logprobs": "rollout"}))
    assert all(one["ratio/mean"] == pytest.approx(1.0, abs=1e-5) for one in fresh.records if "ratio/mean" in one)
    with pytest.raises(rlstab.errors.ConfigError, match="would stay 1 on stale responses"):
        small(tmp_path / "live", optimisation__old_logprobs="live", **STALE)


def test_a_run_that_ended_with_a_queue_continues_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    go(small(whole, **STALE))
    calls = []

    class Ended(Exception):
        pass

    def fails(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:  # three for the first rollout, one for the second
            raise Ended
        return sample(*arguments, **options)

    sample = asking.sample
    with monkeypatch.context() as patched:
        patched.setattr(asking, "sample", fails)
        with pytest.raises(Ended):
            go(small(out, **STALE))
    last = checkpoint.checkpoints(out / "checkpoints")[-1]
    standing = checkpoint.verify(last).standing
    assert standing is not None
    assert (checkpoint.number(last), standing["made"], sorted(standing["queue"])) == (2, 4, ["0", "1"])
    go(small(out, **STALE), resume=True)
    assert_same(out, whole)


def test_a_queue_of_two_processes_is_continued_by_one(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "several"
    settings = {**STALE, "rollout__prompts": 3, "optimisation__lr": 1e-4}
    go(small(whole, **settings))
    ran(command(file_of(small(out, **settings), tmp_path), 2))
    assert counted(out) == 2
    for one in checkpoint.checkpoints(out / "checkpoints")[2:]:
        checkpoint.discard(one)
    go(small(out, **settings), resume=True)
    assert counted(out) == 1
    trained_alike(whole, out)


def test_a_run_with_a_queue_is_not_lengthened(tmp_path: Path) -> None:
    go(small(tmp_path / "run", **{**STALE, "optimisation__rollouts": 1}))
    with pytest.raises(rlstab.errors.CheckpointError, match="a longer run is another one"):
        go(small(tmp_path / "run", **STALE), resume=True)


def test_where_a_stage_draws_from_is_no_part_of_torchs_generator(tmp_path: Path) -> None:
    go(small(tmp_path / "one", **STALE))
    torch.manual_seed(5)
    go(small(tmp_path / "other", **STALE))
    assert_same(tmp_path / "one", tmp_path / "other")
