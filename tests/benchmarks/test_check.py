import pytest
import torch

import rlstab.signals.tiled_head
from benchmarks import check
from benchmarks.goals import Found, load
from benchmarks.protocol import Run


@pytest.mark.slow
def test_the_check_fails_where_rows_without_gradient_are_not_left_out(monkeypatch):
    goals = [goal for goal in load() if goal.row in ("3, 20 %", "3, 5 %", "3, 0 %")]

    def everything(grads, count, device):
        return torch.arange(count, device=device)

    limits = {goal.row: goal.check.must for goal in goals}
    monkeypatch.setattr(rlstab.signals.tiled_head, "live_rows", everything)
    monkeypatch.setattr(check, "MODES", ["bwd"])
    records = check.measure(Run("head", None), 1, memory=False)
    values = {row: value.value for row, (_, value) in check.verdicts(goals, records).items() if value is not None}
    assert values.keys() == limits.keys()
    assert all(values[row] > limits[row] for row in limits), values


@pytest.mark.parametrize(
    ("values", "failed", "left"),
    [([0.9, 0.22, 0.9], False, 1), ([0.9, 0.8], True, 0), ([0.22, 0.9], False, 1), ([None, None], True, 0)],
)
def test_what_misses_is_measured_once_more_and_the_better_value_counts(values, failed, left, monkeypatch):
    goal = next(goal for goal in load() if goal.row == "3, 20 %").small()
    taken = iter([value and Found(value, "", "", {}) for value in values])
    monkeypatch.setattr(check, "verdicts", lambda goals, records: {goal.row: (goal, next(taken))})
    assert check._failed(check.check(list, [])) == [goal.row] * failed
    assert len(list(taken)) == left


def test_the_checked_limits_are_no_stricter_than_the_goals():
    for goal in load():
        if goal.check is not None:
            assert goal.better == "lower"
            assert goal.check.must >= goal.limits.must, goal.row
