"""Stages in runs: selectors, expanders, estimators and what is behind, by what a run logs and learns."""

import math
from pathlib import Path
from typing import Any

import pytest

from rlstab.record import read_dump
from tests.train.runs import ALIKE, GRADED, apart, column, go, lines, metrics, of_user, small

DEEP = {"name": "deep_grpo", "branches": 3, "warmup": 4, "window": 16}
TWO_STREAMS = ["clip_higher", "stream_weight"]


def run(out: Path, stages: list[Any], objective: Any = "clip_higher", **changes: Any) -> list[dict[str, Any]]:
    """The records of rollouts of which some groups have nothing to compare."""
    settings = {"task": of_user("Seldom"), "rollout__prompts": 4, "optimisation__lr": 1e-4}
    return go(small(out, objective, stages=stages, **{**settings, **changes})).records


def test_dynamic_sampling_leaves_no_dead_group_and_says_what_it_cost(tmp_path: Path) -> None:
    refilled = run(tmp_path / "refilled", ["dynamic_sampling"])
    assert column(refilled, "reward/zero_std_groups") == [0.0] * 2
    dropped, cost = (column(refilled, f"dynamic_sampling/{name}") for name in ("dropped_groups", "sampled_per_learnt"))
    assert max(dropped) > 0
    # every rollout was filled: as many groups were sampled beyond the four as were dropped
    assert cost == pytest.approx([(4 + count) / 4 for count in dropped])
    dry = run(tmp_path / "dry", [{"name": "dynamic_sampling", "max_refills": 0}])
    learnt = [record for record in dry if record["dynamic_sampling/dropped"] < 1]
    assert learnt
    for record in learnt:
        share = 1 / (1 - record["dynamic_sampling/dropped"])
        assert record["dynamic_sampling/sampled_per_learnt"] == pytest.approx(share)


def test_a_rollout_of_which_everything_is_dropped_changes_nothing(tmp_path: Path) -> None:
    """Groups of one have nothing to compare with."""
    records = run(tmp_path / "run", [{"name": "dynamic_sampling", "max_refills": 1}], rollout__group=1)
    assert column(records, "dynamic_sampling/dropped") == [1.0, 1.0]
    assert column(records, "dynamic_sampling/dropped_groups") == [8.0, 8.0]
    assert all("gradient/norm" not in record for record in records)


def test_branches_are_learnt_in_a_stream_of_their_own(tmp_path: Path) -> None:
    records = run(tmp_path / "run", [DEEP], TWO_STREAMS)
    assert column(records, "stream_weight/weight") == pytest.approx([2.0] * 2)
    assert all(0 < place < 1 for place in column(records, "deep_grpo/pivot"))
    # all responses of the rollout are learnt from: the branches are as many of the tokens as the sampler says
    shares = [share / (1 + share) for share in column(records, "deep_grpo/tokens")]
    assert column(records, "stream_weight/branches") == pytest.approx(shares)
    assert max(column(records, "reward/zero_std_groups")) > 0
    one: dict[str, Any] = {"optimisation__rollouts": 1, "optimisation__eps": 1e-4}
    (dropped,) = run(tmp_path / "dropped", [DEEP, "dynamic_sampling"], TWO_STREAMS, **one)
    assert dropped["deep_grpo/branches"] > 0
    assert dropped["reward/zero_std_groups"] == 0
    # weighed by 0, they change nothing
    silent = ["clip_higher", {"name": "stream_weight", "coefficient": 0.0}]
    run(tmp_path / "branches", [DEEP], silent, **one)
    run(tmp_path / "none", [], **one)
    assert apart(tmp_path / "branches", tmp_path / "none") <= ALIKE


#: What each reports of a rollout that has something to learn.
ESTIMATORS = {
    "opo": {"baseline_shift"},
    "reinforce_pp": {"mean", "deviation"},
    "bnpo": {"alpha", "beta"},
    "opob": {"baseline_shift", "effective_share"},
    "opob_proxy": {"baseline_shift", "effective_share"},
    "optimal_token_baseline": {"baseline_shift", "alone"},
    "gdpo": {"deviation", "all_differ"},
    "blockwise": {"alone", "blocks"},
}

#: They read what the others do not: gradients of responses, each reward, blocks.
APART = {"opob", "gdpo", "blockwise"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in APART else [pytest.mark.slow]) for name in ESTIMATORS]
)
def test_every_estimator_learns_and_says_what_it_found(name: str, tmp_path: Path) -> None:
    objective = ["clip_higher", "importance_correction", "block_mean"]
    changes: dict[str, Any] = {"task": {"name": "chain"}, "model__name": "chain-tiny", "rollout__prompts": 2}
    changes |= {"reward": [{"function": name, "weight": 0.5} for name in ("task", GRADED)], "optimisation__rollouts": 1}
    (record,) = run(tmp_path, [name], objective, rollout__max_new_tokens=12, **changes)
    reports = {key.partition("/")[2]: value for key, value in record.items() if key.startswith(f"{name}/")}
    assert reports.keys() == ESTIMATORS[name]
    assert all(math.isfinite(value) for value in reports.values())
    assert record["gradient/norm"] > 0


def test_selectors_draw_from_their_pool_and_refills_are_of_other_prompts(tmp_path: Path) -> None:
    settings = {"tracking__samples": 99, "optimisation__rollouts": 3, "rollout__max_new_tokens": 3}
    for name in ("uniform", "paced"):
        out = tmp_path / name
        run(out, [{"name": name, "pool": 6}], rollout__group=2, **settings)
        samples = lines(out / "samples.jsonl")
        of_rollout = [{line["prompt"] for line in samples if line["rollout"] == number} for number in (1, 2, 3)]
        assert [len(prompts) for prompts in of_rollout] == [4, 4, 4], name
        assert len(set().union(*of_rollout)) <= 6, name
    known = [record["paced/known"] for record in metrics(tmp_path / "paced") if "paced/known" in record]
    assert known[:2] == [0, pytest.approx(4 / 6)]
    with pytest.raises(ValueError, match="pool"):
        run(tmp_path / "few", [{"name": "uniform", "pool": 3}])


def test_a_stale_sampler_is_behind_by_as_many_updates_as_it_is_told(tmp_path: Path) -> None:
    """With a learning rate that moves much, the policy of the first rollouts is recognised by what it samples."""
    settings: dict[str, Any] = {"optimisation__rollouts": 4, "optimisation__lr": 3e-3, "task": of_user("Graded")}
    settings |= {"tracking__dump_every": 1}
    sampled = {}
    # what a policy that never moves samples is what the first policy samples: the first three rollouts of the stale run
    still = {"optimisation__lr": 0.0}
    for name, changes in {"still": still, "live": {}, "stale": {"rollout__staleness": 2}}.items():
        run(tmp_path / name, [], **{**settings, **changes})
        steps = read_dump(tmp_path / name).steps
        assert [step.number for step in steps] == [1, 2, 3, 4]
        sampled[name] = [step.tensors["ids"].tolist() for step in steps]
    for name, of_first in {"stale": [True, True, True, False], "live": [True, False, False, False]}.items():
        assert [mine == theirs for mine, theirs in zip(sampled[name], sampled["still"], strict=True)] == of_first, name
