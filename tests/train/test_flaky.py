"""A flaky grader loses scores in training: which ones, before and after, on one process or two, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.config import load_run
from rlstab.errors import ConfigError
from rlstab.tasks import Chain, Example
from rlstab.tasks.own_task import require_task
from rlstab.tasks.rewards import Reward, Rewards
from rlstab.tasks.scores import Scores, without_lost
from tests.train.runs import go, small, without_times

LITTERED = {"name": "chain", "terms": 5, "largest": 2, "modulus": 10, "junk_symbols": 1000, "fragile": 0.05}


def littered(out: Path, flaky: float, **changes: Any) -> Any:
    return small(
        out,
        model__name="littered-tiny",
        task={**LITTERED, "flaky": flaky},
        rollout__max_new_tokens=40,
        rollout__group=8,
        **{"optimisation__rollouts": 2, "tracking__samples": 32, **changes},
    )


def test_the_share_that_is_lost_is_the_one_asked_for_and_more_flaky_loses_more() -> None:
    ids, ones = torch.arange(20_000), Scores(torch.ones(20_000, dtype=torch.float64))
    left = {share: without_lost(ones, Rewards(), share, 3, ids).rewards for share in (0.0, 0.1, 0.5)}
    assert left[0.0].mean() == 1
    for share in (0.1, 0.5):  # five standard errors
        assert float(1 - left[share].mean()) == pytest.approx(share, abs=5 * (share * (1 - share) / 20_000) ** 0.5)
    assert bool((left[0.5] <= left[0.1]).all())
    other = without_lost(ones, Rewards(), 0.5, 4, ids).rewards
    assert 0.45 < float((other == left[0.5]).double().mean()) < 0.55


def test_what_is_lost_depends_on_seed_and_identity_alone() -> None:
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(0)) * 977
    scores = Scores(torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    whole = without_lost(scores, Rewards(), 0.5, 0, ids).rewards
    assert whole[whole > 0].equal(scores.rewards[whole > 0])
    for part in (slice(0, 100), slice(400, 500), torch.arange(499, -1, -1)):
        assert without_lost(Scores(scores.rewards[part]), Rewards(), 0.5, 0, ids[part]).rewards.equal(whole[part])


def test_only_the_score_of_the_task_is_lost() -> None:
    own = Reward("length", 0.25, workers=object())  # type: ignore[arg-type]  # nobody asks it here
    rewards, ids = Rewards((Reward("task", 2.0), own)), torch.arange(100)
    ones = torch.ones(100, dtype=torch.float64)
    found = without_lost(Scores(2.25 * ones, parts={"task": ones, "length": ones}), rewards, 0.5, 0, ids)
    assert found.parts["length"].equal(ones)
    assert set(found.parts["task"].tolist()) == {0.0, 1.0}
    assert found.rewards.equal(2 * found.parts["task"] + 0.25)


def test_training_loses_what_evaluation_keeps(tmp_path: Path) -> None:
    """The responses of the first rollout are the same with and without the grader, and so are evaluations of it."""
    evaluation = {"every": 2, "prompts": 8, "samples": 4, "pass_at": [4], "greedy": False}
    runs = {share: go(littered(tmp_path / str(share), share, evaluation=evaluation)) for share in (0.0, 0.5)}
    samples = {
        share: [json.loads(one) for one in (tmp_path / str(share) / "samples.jsonl").read_text().splitlines()][:32]
        for share in runs
    }
    assert [one["text"] for one in samples[0.0]] == [one["text"] for one in samples[0.5]]
    before, after = ([one["reward"] for one in samples[share]] for share in (0.0, 0.5))
    assert all(after[place] in (0.0, one) for place, one in enumerate(before))
    assert 0 < sum(after) < sum(before)
    first, flaky = (runs[share].records[1] for share in (0.0, 0.5))
    assert "reward/true" not in first
    assert flaky["reward/true"] == first["reward/mean"] == sum(before) / 32
    assert flaky["reward/mean"] == sum(after) / 32
    assert [one.get("reward/true") for one in samples[0.5]] == before
    start, flaky_start = (runs[share].records[0] for share in (0.0, 0.5))
    assert start["eval/mean"] == flaky_start["eval/mean"] > 0


def test_a_resumed_run_loses_the_same(tmp_path: Path) -> None:
    long = {"optimisation__mini_batches": 2, "tracking__checkpoint_every": 1}
    whole = go(littered(tmp_path / "whole", 0.5, **{**long, "optimisation__rollouts": 3})).records
    go(littered(tmp_path / "out", 0.5, **{**long, "optimisation__rollouts": 2}))
    go(littered(tmp_path / "out", 0.5, **{**long, "optimisation__rollouts": 3}), resume=True)
    assert without_times(tmp_path / "out") == without_times(tmp_path / "whole")
    assert len({one["reward/true"] - one["reward/mean"] for one in whole}) > 1


def test_a_reward_without_the_task_has_nothing_to_lose(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        littered(tmp_path, 0.5, reward="own.py:closeness")
    assert "task.flaky" in str(caught.value)
    assert str(caught.value).endswith(
        "the task's own scores are lost, and `reward` does not list `task`: nothing would be. Add it there, or set "
        "this to 0."
    )
    littered(tmp_path, 0.0, reward="own.py:closeness")


def test_rewards_of_blocks_are_not_lost_and_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        go(littered(tmp_path / "out", 0.5, stages=["blockwise"]))
    assert str(caught.value) == (
        "the stage 'blockwise' learns from rewards of blocks, and the task 'chain' is flaky, which loses scores of "
        "whole answers: nothing would be lost. Set task.flaky to 0, or take another advantage estimator."
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [("fragile", 1.01), ("flaky", 1.0), ("flaky", -0.1), ("modulus", 1), ("junk_symbols", 5000), ("largest", 10)],
)
def test_settings_in_yaml_are_checked(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"task\.chain\.{setting}|task\.{setting}"):
        load_run({"objective": "clip_higher", "task": {**LITTERED, setting: value}})


class Own:
    """A task of the user's own that is flaky."""

    name = "own"
    keeps_special_tokens = True
    workers = None

    def __init__(self, flaky: Any) -> None:
        self.flaky, self.size = flaky, {"train": None, "eval": None}

    def example(self, split: str, index: int) -> Example:
        return Chain().example("train", index)

    def score(self, example: Example, completion: str) -> float:
        return 1.0


@pytest.mark.parametrize("flaky", [1.0, -1, "half", True, None])
def test_a_task_of_the_users_own_is_checked(flaky: Any) -> None:
    require_task(Own(0.5))
    with pytest.raises(ConfigError) as caught:
        require_task(Own(flaky))
    assert str(caught.value) == (
        f"the task Own has flaky = {flaky!r}, expected the share of scores that training loses, a number of at least "
        f"0 and below 1. Change it, or remove the attribute."
    )


def test_a_task_of_the_users_own_loses_too(tmp_path: Path) -> None:
    run = small(tmp_path, model__name="chain-tiny", optimisation__rollouts=1, rollout__max_new_tokens=4)
    (record,) = go(run, task=Own(0.5)).records
    assert record["reward/true"] == 1
    assert 0 < record["reward/mean"] < 1
