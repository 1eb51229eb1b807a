"""The numbers behind the page's figures, as JSON that is safe inside a script element."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlstab.report.curves import BUDGET, POINTS, Seeds, metrics_of, seeds_of
from rlstab.report.model import RunRecord

#: Characters that could end a script element, open a comment in it, or end a line in older scripts.
_UNSAFE = {ord(one): f"\\u{ord(one):04x}" for one in "<>&\u2028\u2029"}
#: Fewer points than this show no shape.
_FEWEST = 24


def safe_json(data: Any) -> str:
    """JSON for the inside of a ``<script>`` element: nothing in it can end the element. NaN and Inf become null."""
    return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False, ensure_ascii=False).translate(_UNSAFE)


def curves(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]]) -> dict[str, Any]:
    """Curves of all runs: ``{"grids": [[rollouts]], "curves": {setting: {method: {metric: ...}}}}``.

    Args:
        groups: runs by setting and method; the keys are those of the page's controls.
    """
    runs = [run for methods in groups.values() for some in methods.values() for run in some]
    many = sum(len(metrics_of([run])) for run in runs)
    points = max(_FEWEST, min(POINTS, BUDGET // max(many, 1)))
    grids: dict[tuple[int, ...], int] = {}
    found = {
        setting: {
            method: {
                metric: _curve(one, grids)
                for metric in sorted(metrics_of(some))
                if (one := seeds_of(some, metric, points)) is not None
            }
            for method, some in methods.items()
        }
        for setting, methods in groups.items()
    }
    return {"grids": [list(one) for one in grids], "curves": found}


def clocks(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]]) -> dict[str, Any]:
    """What each run had spent by when: ``{setting: {method: {seed: {"rollout": [...], "seconds": [...], ...}}}}``.

    Args:
        groups: as for :func:`curves`.
    """
    return {
        setting: {
            method: {str(run.seed): clock for run in runs if (clock := _clock(run))} for method, runs in methods.items()
        }
        for setting, methods in groups.items()
    }


def _clock(run: RunRecord) -> dict[str, list[float | None]]:
    if not run.spent:
        return {}
    rollouts = max((curve[0] for curve in run.spent.values()), key=len)
    kept = np.unique(np.linspace(0, len(rollouts) - 1, min(len(rollouts), POINTS)).round().astype(int))
    found: dict[str, list[float | None]] = {"rollout": [0, *(float(one) for one in rollouts[kept])]}
    for unit, (ends, values) in run.spent.items():
        if np.array_equal(ends, rollouts):
            found[unit] = [0, *_short(values[kept])]
    return found


def _curve(one: Seeds, grids: dict[tuple[int, ...], int]) -> dict[str, Any]:
    grid = grids.setdefault(tuple(int(rollout) for rollout in one.rollouts), len(grids))
    return {"grid": grid, "names": list(one.seeds), "seeds": [_short(row) for row in one.values]}


def _short(values: Iterable[float]) -> list[float | None]:
    """Six significant digits: of shares near 1, such as the tokens kept, four would draw steps."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
