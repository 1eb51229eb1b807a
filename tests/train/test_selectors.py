"""Prompts chosen by a stage, in a run: from the pool, by the state that a checkpoint keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.core.method import State
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.stage import Offer
from tests.train.runs import go, small, weights, without_times

POOL = 12
SELECTORS = {
    "uniform": {"name": "uniform", "pool": POOL},
    "goldilocks": {"name": "goldilocks", "pool": POOL},
    "goldilocks_teacher": {"name": "goldilocks_teacher", "pool": POOL, "candidates": 3, "window": 8},
    "paced": {"name": "paced", "pool": POOL},
}
LONG: dict[str, Any] = {"optimisation__rollouts": 4, "tracking__checkpoint_every": 2, "tracking__samples": 16}


def prompts_of(out: Path) -> list[set[str]]:
    """The prompts of each rollout."""
    lines = [json.loads(one) for one in (out / "samples.jsonl").read_text().splitlines()]
    rollouts = sorted({one["rollout"] for one in lines})
    return [{one["prompt"] for one in lines if one["rollout"] == number} for number in rollouts]


@pytest.mark.parametrize("name", SELECTORS)
def test_a_resumed_run_chooses_what_the_whole_one_does(name: str, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    go(small(whole, stages=[SELECTORS[name]], **LONG))
    shown = prompts_of(whole)
    assert [len(one) for one in shown] == [4] * 4
    assert len(set().union(*shown)) <= POOL
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "rollout-000004")
    go(small(resumed, stages=[SELECTORS[name]], **LONG), resume=True)
    assert (resumed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert without_times(resumed) == without_times(whole)
    left, right = weights(resumed), weights(whole)
    assert all(torch.equal(left[one], right[one]) for one in left)


def test_refills_are_of_prompts_that_the_rollout_did_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, list[int]] = {}
    select = Goldilocks.select

    def watched(self: Goldilocks, offer: Offer, state: State) -> torch.Tensor:
        found = select(self, offer, state)
        chosen.setdefault(offer.rollout, [])[offer.first :] = found.tolist()
        return found

    monkeypatch.setattr(Goldilocks, "select", watched)
    go(small(tmp_path, stages=[{"name": "goldilocks", "pool": 48}, "dynamic_sampling"]))
    assert len(chosen) == 3
    assert any(len(one) > 4 for one in chosen.values())
    assert all(len(set(one)) == len(one) for one in chosen.values())


def test_what_a_selector_knows_is_logged(tmp_path: Path) -> None:
    result = go(small(tmp_path, stages=[SELECTORS["paced"]], optimisation__rollouts=4))
    lines = [json.loads(one) for one in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    known = [one["paced/known"] for one in lines if "paced/known" in one]
    assert known[:2] == [0, 4 / POOL]
    assert known == sorted(known)
    assert result is not None


def test_a_pool_that_is_too_small_says_so(tmp_path: Path) -> None:
    run = small(tmp_path, stages=[{"name": "uniform", "pool": 3}])
    with pytest.raises(ValueError, match=r"asked for 4 different prompts, and its pool has 3\. Raise `pool`, or lower"):
        go(run)
