"""DEEP-GRPO against plain loops over lists."""

import math
import random

import pytest
import torch

from rlstab.core.random import uniform
from rlstab.stages.deep_grpo import RIDGE, STREAM, DeepGRPO, logistic
from rlstab.stages.response_batch import ResponseBatch
from tests.stages.responses import batch as batch_of
from tests.stages.responses import settled, values_of

DEFAULTS = {"length": 8, "given": 0, "pivot": 0.0}


def batch(rows: list[dict]) -> ResponseBatch:
    """Responses from lists: group, raw, length; of branches given and pivot; optionally the reward and the prompt."""
    raw, groups = [row["raw"] for row in rows], [row["group"] for row in rows]
    rewards = [row.get("reward", row["raw"]) for row in rows]
    prompts = [row.get("prompt", row["group"]) for row in rows]
    ids = [row.get("id", place) for place, row in enumerate(rows)]
    lengths, given, pivot = ([row.get(name, default) for row in rows] for name, default in DEFAULTS.items())
    return batch_of(rewards, groups, lengths, {"raw_rewards": raw}, prompts=prompts, ids=ids, given=given, pivot=pivot)


def drawn(seed: int, groups: int = 6) -> list[dict]:
    """Main groups, and branch groups of some of their prompts."""
    dice, rows = random.Random(seed), []
    for group in range(groups):
        pivot = dice.randint(1, 9) / 10 if dice.random() < 0.4 else 0.0
        for _ in range(dice.randint(1, 5)):
            rows.append(
                {
                    "group": 100 + 3 * group,
                    "prompt": dice.randint(0, 3),
                    "raw": dice.choice([0.0, 0.0, 1.0]),
                    "length": dice.randint(1, 12),
                    "given": round(10 * pivot),
                    "pivot": pivot,
                    "id": 1000 * seed + len(rows),
                }
            )
    return rows


def parents_by_hand(rows, *, groups, max_parents, threshold, seed):
    chosen = []
    for group in dict.fromkeys(row["group"] for row in rows):
        inside = [place for place, row in enumerate(rows) if row["group"] == group]
        failed = [
            place
            for place in inside
            if rows[place]["raw"] <= threshold and rows[place]["given"] == 0 and rows[place]["length"] >= 2
        ]
        if groups == "failed" and any(rows[place]["raw"] > threshold for place in inside):
            continue
        draws = {
            place: float(uniform(seed + STREAM, torch.tensor(rows[place]["id"]), torch.tensor(1))) for place in failed
        }
        chosen += sorted(failed, key=draws.get)[:max_parents]
    return sorted(chosen)


def pivot_by_hand(length, draw, gamma, fitted):
    weights = []
    for kept in range(1, length):
        x = kept / length
        chance = 1.0 if fitted is None else 1 / (1 + math.exp(-(fitted[0] + fitted[1] * x)))
        weights.append(chance * x**gamma)
    below = 0.0
    for kept, weight in enumerate(weights, 1):
        below += weight
        if draw * math.fsum(weights) < below:
            return kept
    return length - 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("groups", "max_parents"), [("all", None), ("all", 1), ("failed", None), ("failed", 2)])
def test_parents_and_pivots(seed: int, groups, max_parents) -> None:
    stage, rows = DeepGRPO(branches=3, groups=groups, max_parents=max_parents, window=32, warmup=2), drawn(seed)
    state = stage.init_state()
    for before in range(3):  # the window of some rollouts before
        state = settled(stage, batch(drawn(50 + 10 * seed + before)), state=state)[1]
    fitted = stage.fitted(state)
    asked = stage.expand(batch(rows), settled(stage, batch(rows))[0], state, seed=7)
    expected = parents_by_hand(rows, groups=groups, max_parents=max_parents, threshold=0.0, seed=7)
    assert asked.parents.tolist() == expected
    draws = [float(uniform(7 + STREAM, torch.tensor(rows[place]["id"]), torch.tensor(0))) for place in expected]
    assert asked.pivots.tolist() == [
        pivot_by_hand(rows[place]["length"], draw, 2.0, fitted) for place, draw in zip(expected, draws, strict=True)
    ]
    assert (asked.branches, asked.fresh, asked.drop) == (3, 0, None)


def test_success_is_what_the_scorer_says() -> None:
    """A penalty does not make a right answer one that failed, nor does pay for the form make a wrong one right."""
    rows = [{"group": 0, "raw": 1.0, "reward": -0.5}, {"group": 0, "raw": 0.1, "reward": 0.9}]
    for threshold, expected in ((0.0, []), (0.1, [1]), (1.0, [0, 1])):
        stage = DeepGRPO(threshold=threshold)
        asked = stage.expand(batch(rows), settled(stage, batch(rows))[0], stage.init_state(), 0)
        assert asked.parents.tolist() == expected


def test_what_does_not_branch() -> None:
    rows = [
        {"group": 0, "raw": 1.0},
        {"group": 0, "raw": 0.0, "length": 1},  # no position inside
        {"group": 1, "raw": 0.0, "given": 3, "pivot": 0.5},  # a branch itself
    ]
    for part in (batch(rows), ResponseBatch.empty({"raw_rewards"})):
        for stage in (DeepGRPO(), DeepGRPO(max_parents=1, groups="failed")):
            asked = stage.expand(part, settled(stage, part)[0], stage.init_state(), 0)
            assert (asked.parents.tolist(), asked.pivots.tolist()) == ([], [])
            assert asked.parents.dtype == asked.pivots.dtype == torch.int64


def test_the_window_keeps_the_last_branch_points() -> None:
    stage, kept = DeepGRPO(window=5), []
    state = stage.init_state()
    for seed in range(8):
        rows = drawn(seed, groups=9)
        points = {}
        for row in rows:
            if row["given"]:
                _, success = points.get(row["group"], (0, 0))
                points[row["group"]] = (row["pivot"], max(success, float(row["raw"] > 0)))
        kept += [points[group] for group in sorted(points)]
        state = settled(stage, batch(rows), state=state)[1]
        assert state["seen"] == len(kept)
        window = sorted(zip(state["place"].tolist(), state["success"].tolist(), strict=True))
        assert window == sorted((kept + [(0.0, 0.0)] * 5)[:5] if len(kept) < 5 else kept[-5:])
    assert len(kept) > 15


def slopes(x, y, at):
    """Of the cost, by intercept and slope, one sample after another."""
    misses = [1 / (1 + math.exp(-(at[0] + at[1] * place))) - label for place, label in zip(x, y, strict=True)]
    return math.fsum(misses), math.fsum(m * place for m, place in zip(misses, x, strict=True)) + RIDGE * at[1]


@pytest.mark.parametrize("seed", range(2))
def test_the_fit_is_a_minimum(seed: int) -> None:
    """The cost is strictly convex, so where both slopes vanish is the only one."""
    dice = random.Random(seed)
    count = dice.choice([2, 3, 12, 300])
    x = [dice.choice([dice.random(), 0.5]) for _ in range(count)]
    y = [float(dice.random() < 0.05 + 0.9 * place) for place in x]
    y[0], y[1] = 0.0, 1.0
    minimum = logistic(torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
    assert slopes(x, y, minimum) == pytest.approx((0, 0), abs=1e-9 * count)


def test_the_model_is_used_once_there_are_enough_of_both() -> None:
    stage = DeepGRPO(warmup=10, window=100)

    def with_points(successes: int, failures: int):
        groups = range(successes + failures)
        rows = [{"group": group, "raw": float(group < successes), "given": 1, "pivot": 0.3} for group in groups]
        return settled(stage, batch(rows))[1]

    for successes, failures in ((0, 0), (11, 0), (0, 11), (5, 5)):  # ten are not more than ten
        assert stage.fitted(with_points(successes, failures)) is None
    assert stage.fitted(with_points(6, 5)) is not None
    assert stage.fitted(with_points(6, 6)) == pytest.approx((0, 0), abs=1e-9)


def test_report() -> None:
    stage, raw = DeepGRPO(), [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    given = batch_of(
        *(raw, [0, 0, 1, 1, 2, 2, 3, 3], [10, 6, 8, 8, 5, 3, 4, 4], {"raw_rewards": raw}),
        prompts=[4, 4, 5, 5, 4, 4, 5, 5],
        given=[0, 0, 0, 0, 5, 5, 2, 2],
        pivot=[0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.25, 0.25],
    )
    stat, _ = settled(stage, given)
    told = values_of(stage.report(given, stat, stage.init_state()))
    assert told == {
        "branches": 1.0,  # four for four
        "tokens": 0.5,  # 16 for 32
        "pivot": 0.375,
        "recovered": 0.5,
        "both_outcomes": 1.0,
        "both_outcomes_without": 0.5,
        "fitted": 0.0,
    }
    fitted = settled(DeepGRPO(warmup=1), given)[1]
    assert stage.report(given, stat, fitted).keys() == told.keys()  # two points are not more than ten
    assert "slope" in DeepGRPO(warmup=1).report(given, stat, fitted)
