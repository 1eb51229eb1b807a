"""The cost of runs, and runs cut at the same cost: a method may sample more for one rollout."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import WIDTH, bin_weights, rounded
from rlstab.report.runs import RunRecord
from rlstab.signs import counted_signs

#: Units of cost other than rollouts by which runs can be compared, with the words for them.
UNITS: Mapping[str, str] = {"tokens": "sampled tokens", "seconds": "seconds of training"}


def budget_of(runs: Sequence[RunRecord], by: str) -> float | None:
    """What the cheapest of some finished runs has spent, which all have spent; None if none recorded it."""
    return min((float(run.spent[by][1][-1]) for run in runs if by in run.spent), default=None)


def up_to(run: RunRecord, by: str, budget: float) -> RunRecord | None:
    """The run up to the last whole bin within a budget; None if no bin is, or its cost is unknown.

    The last evaluation is interpolated, by cost, between the two that are nearest to the budget.
    """
    if by not in run.spent:
        return None
    ends, totals = run.spent[by]
    within_budget = totals <= budget * (1 + 1e-9)
    if not within_budget.any():
        return None
    last = int(ends[within_budget][-1])
    metrics = {
        name: (rollouts[rollouts <= last], values[rollouts <= last]) for name, (rollouts, values) in run.metrics.items()
    }
    evaluations = [record for record in run.evaluations if record["rollout"] < last]
    costs = cost_at(run, by, np.array([record["rollout"] for record in run.evaluations]))
    final: dict[str, float] = {"rollout": last}
    for name in {name for record in run.evaluations for name in record} - {"rollout"}:
        points = [(cost, record[name]) for cost, record in zip(costs, run.evaluations, strict=True) if name in record]
        if points[0][0] <= budget <= points[-1][0] * (1 + 1e-9):
            final[name] = rounded(float(np.interp(budget, *np.array(points).T)))
    return replace(run, metrics=metrics, evaluations=[*evaluations, final], by=by, judged=counted_signs(run))


def cost_at(run: RunRecord, unit: str, rollouts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What a run had spent up to the end of given rollouts."""
    ends, totals = run.spent[unit]
    return np.asarray(np.interp(rollouts, [0, *ends], [0.0, *totals]), dtype=np.float64)


def weights_of(run: RunRecord, ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weights of bins in a mean over a whole run: their rollouts, or their cost in a run that is cut by cost."""
    if run.by == "rollouts":
        return bin_weights(run.bin_width, ends)
    width = run.bin_width if run.bin_width > 1 else WIDTH
    return cost_at(run, run.by, ends) - cost_at(run, run.by, (ends - 1) // width * width)


def costs_of(runs: Mapping[str, Sequence[RunRecord]], baseline: str | None) -> dict[str, str]:
    """By method, what a rollout costs: the amount for the baseline, and multiples of it for the others."""
    costs_of_method = {name: {unit: _cost_of_rollout(group, unit) for unit in UNITS} for name, group in runs.items()}
    first = costs_of_method.get(baseline or "", {})
    texts: dict[str, str] = {}
    for name, costs in costs_of_method.items():
        if name == baseline or not any(first.values()):
            amounts = {"tokens": "{:,.0f} tokens", "seconds": "{:.3g} s"}
            parts = [amounts[unit].format(cost) for unit, cost in costs.items() if cost]
        else:
            short = {"tokens": "tokens", "seconds": "time"}
            pairs = ((short[unit], cost, first[unit]) for unit, cost in costs.items())
            parts = [f"{cost / other:.2f}\u00d7 {unit}" for unit, cost, other in pairs if cost and other]
        texts[name] = ", ".join(parts)
    return texts


def _cost_of_rollout(runs: Sequence[RunRecord], unit: str) -> float | None:
    """The mean over runs of what a rollout costs."""
    costs = [
        float(totals[-1]) / int(ends[-1]) for run in runs if unit in run.spent for ends, totals in [run.spent[unit]]
    ]
    return math.fsum(costs) / len(costs) if costs else None
