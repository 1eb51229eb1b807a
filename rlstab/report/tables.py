"""The tables of the page: texts for its cells, and where the drawn intervals begin and end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rlstab.report.collapse import TITLES
from rlstab.report.comparison import Cell, Comparison, Table
from rlstab.report.numbers import NOTHING, counted, decimals, places, setting
from rlstab.report.outcomes import Outcome
from rlstab.report.overlap import Overlap
from rlstab.report.palette import Look
from rlstab.report.statistics import Estimate
from rlstab.report.sweep import Sweep

#: Of the drawing of one difference, in its own units.
WIDTH, MARGIN = 150.0, 7.0
#: Width of a character of a tick's label, and the least gap between two labels, likewise.
CHARACTER, GAP = 6.2, 3.0


def result_table(table: Table, outcome: Outcome, looks: Mapping[str, Look], *, alone: bool) -> dict[str, Any]:
    """One outcome in one setting, which is named unless it is ``alone``."""
    cells = {method: table.cells[method, outcome.name] for method in table.methods}
    value_places = places(list(_numbers(cell.summary for cell in cells.values())))
    differences = [cell.paired.difference for cell in cells.values() if cell.paired]
    difference_places = places(list(_numbers(differences)))
    scale = _Scale([0.0, *_numbers(differences)])
    return {
        "outcome": outcome.name,
        "baseline": table.baseline,
        "caption": _where(table, alone) + f"{outcome.title}: {outcome.text}"
        f"{f', in {outcome.unit}' if outcome.unit else ''}.",
        "axis": scale.ticks() if differences else None,
        "rows": [
            {
                "method": method,
                "look": looks[method],
                "baseline": method == table.baseline,
                "seeds": len(cell.values),
                "value": _texts(cell.summary, value_places),
                "difference": _texts(cell.paired.difference, difference_places, signed=True) if cell.paired else None,
                "forest": scale.drawn(cell.paired.difference) if cell.paired else None,
                "wins": _texts(cell.paired.wins, 2) if cell.paired else None,
                "words": cell.paired.verdict if cell.paired else ("the baseline" if method == table.baseline else ""),
                "told": bool(cell.paired and cell.paired.verdict in ("higher", "lower")),
                "collapsed": f"{table.collapses[method].collapsed} of {table.collapses[method].runs}",
            }
            for method, cell in cells.items()
        ],
        "remarks": _remarks(cells),
    }


def _where(table: Table, alone: bool) -> str:
    return f"{table.title}. " if table.title and not alone else ""


def _texts(one: Estimate, digits: int, signed: bool = False) -> dict[str, str | None]:
    bounds = (one.low, one.high) if one.low is not None and one.high is not None else None
    low, high = (decimals(bound, digits, signed) for bound in bounds) if bounds else (None, None)
    return {"value": decimals(one.value, digits, signed), "low": low, "high": high}


def _numbers(estimates: Iterable[Estimate]) -> Iterable[float]:
    return (number for one in estimates for number in (one.value, one.low, one.high) if number is not None)


def _remarks(cells: Mapping[str, Cell]) -> list[str]:
    found: dict[str, list[str]] = {}
    for method, cell in cells.items():
        if cell.paired and cell.paired.remark:
            found.setdefault(cell.paired.remark, []).append(method)
        elif cell.summary.low is None:
            found.setdefault(cell.summary.how, []).append(method)
    return [f"{', '.join(methods)}: {remark}." for remark, methods in found.items()]


class _Scale:
    """Differences to places in the drawing; all rows of a table share it."""

    def __init__(self, values: list[float]) -> None:
        self.low, self.high = min(values), max(values)

    def at(self, value: float) -> float:
        """From the left edge."""
        span = self.high - self.low
        share = (value - self.low) / span if span > 0 else 0.5
        return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)

    def drawn(self, one: Estimate) -> dict[str, float | None] | None:
        """Point and interval of one row."""
        if one.value is None:
            return None
        low, high = (None if bound is None else self.at(bound) for bound in (one.low, one.high))
        return {"zero": self.at(0.0), "value": self.at(one.value), "low": low, "high": high}

    def ticks(self) -> list[dict[str, Any]]:
        """Zero, and round numbers to its sides, as many as have room."""
        span = self.high - self.low
        if span <= 0:
            return [{"at": self.at(0.0), "text": "0"}]
        smallest = math.floor(math.log10(span)) - 1
        found: list[dict[str, Any]] = []
        for step in [factor * 10.0**power for power in (smallest, smallest + 1) for factor in (1, 2, 5)]:
            coarser = self._every(step)
            if len(coarser) < 2 and found:  # better a little tight than nothing beside zero
                break
            found = coarser
            widest = max(len(tick["text"]) for tick in found) * CHARACTER
            if step / span * (WIDTH - 2 * MARGIN) >= widest + GAP:
                break
        return found

    def _every(self, step: float) -> list[dict[str, Any]]:
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [
            {"at": self.at(index * step), "text": "0" if index == 0 else decimals(index * step, digits, signed=True)}
            for index in range(first, last + 1)
        ]


def collapse_table(table: Table, looks: Mapping[str, Look], *, alone: bool) -> dict[str, Any]:
    """How often each detector fired, of the runs of which it could say anything."""
    rows = []
    for method in table.methods:
        one = table.collapses[method]
        counts = [(one.collapsed, one.runs), (one.failed, one.runs)]
        counts += [(one.fired[name], one.judged[name]) for name in TITLES]
        cells = [{"text": f"{k} of {n}" if n else NOTHING, "some": k > 0} for k, n in counts]
        rows.append({"method": method, "look": looks[method], "cells": cells})
    return {
        "caption": f"{_where(table, alone)}Runs in which a detector fired, out of those it can judge.",
        "columns": ["collapsed", "failed", *TITLES.values()],
        "rows": rows,
    }


def overlap_table(one: Overlap) -> dict[str, Any]:
    """The matrix with the number of touched tokens beside each name."""
    cells = [
        [None if value is None else {"text": f"{value:.2f}", "strength": round(value, 3)} for value in row]
        for row in one.matrix
    ]
    return {
        "caption": f"Of the tokens that either method touched, the share that both touched; {one.compared}.",
        "columns": one.names,
        "rows": [
            {"name": f"{name} ({touched})", "cells": row}
            for name, touched, row in zip(one.names, one.touched, cells, strict=True)
        ],
    }


def sweep_table(one: Sweep, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Stable up to where, and what happened at each value."""
    points = {(point.method, point.value): point for point in one.points}
    rows = []
    for method in [name for name in looks if name in one.highest]:
        highest, cells = one.highest[method], []
        for value in one.values:
            point = points.get((method, value))
            cells.append(
                {"text": NOTHING, "stable": True}
                if point is None
                else {"text": f"{point.collapsed} of {point.runs}", "stable": point.stable}
            )
        found = "none" if highest is None else setting(highest)
        rows.append({"method": method, "look": looks[method], "highest": found, "cells": cells})
    return {"key": one.key, "bench": one.bench, "values": [setting(value) for value in one.values], "rows": rows}


def about(comparison: Comparison) -> list[tuple[str, str]]:
    """Versions, machines and time over all runs; several values are all named."""
    runs = comparison.loaded.runs
    found = []
    for key, title in (
        ("rlstab", "rlstab"),
        ("torch", "torch"),
        ("transformers", "transformers"),
        ("python", "Python"),
        ("machine", "machine"),
        ("cpu", "processor"),
        ("device", "device"),
        ("processes", "processes per run"),
        ("threads", "threads per run"),
    ):
        values = dict.fromkeys(str(run.about[key]) for run in runs if key in run.about)
        if values:
            found.append((title, ", ".join(values)))
    wall = [run.seconds for run in runs if run.seconds is not None]
    spent = [run.cpu_seconds for run in runs if run.cpu_seconds is not None]
    if wall:
        found.append(("wall-clock time", f"{sum(wall) / 60:.1f} minutes, the sum over {counted(len(wall), 'run')}"))
    if spent:
        found.append(("processor time", f"{sum(spent) / 60:.1f} minutes, the sum over {counted(len(spent), 'run')}"))
    return found
