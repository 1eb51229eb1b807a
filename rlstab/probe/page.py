"""The map as one self-contained HTML page without scripts; a cell opens its curves."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

from markupsafe import Markup

from rlstab.probe.map import LEGEND, Map, MapCell
from rlstab.probe.score import SURVIVAL, Score
from rlstab.report.formatting import setting
from rlstab.report.output import digest
from rlstab.report.template import rendered

#: The size of a figure, and its margins.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 220, 34, 10, 8, 24

#: Shades of a colour in either direction; each is a factor of two.
STEPS = 3


def page(drawn: Map) -> str:
    """The HTML of a map."""
    folder = resources.files("rlstab.probe")
    style, template = ((folder / f"map.{kind}").read_text(encoding="utf-8") for kind in ("css", "html"))
    lines = []
    for row, title in drawn.rows.items():
        cells = [_cell(drawn, row, index) for index in range(len(drawn.columns))]
        lines.append({"title": title, "cells": cells, "base": row == "base", "acted": drawn.acted(row)})
    context = {
        "style": Markup(style),
        "policy": f"default-src 'none'; style-src '{digest(style)}'",
        "legend": LEGEND,
        "columns": drawn.columns,
        "lines": lines,
        "sentences": drawn.sentences,
        "remarks": drawn.remarks,
        "size": {"width": WIDTH, "height": HEIGHT},
    }
    return rendered(template, {}, context)


def _cell(drawn: Map, row: str, index: int) -> dict[str, Any]:
    cell, column, score = drawn.cells[row, index], drawn.columns[index], drawn.cells[row, index].score
    value, bracket, interval = drawn.shown(cell).partition(" [")
    return {
        "id": f"c-{list(drawn.rows).index(row)}-{index}",
        "row": drawn.rows[row],
        "column": column.title,
        "dial": column.probe.dial,
        "shown": drawn.shown(cell),
        "value": value,
        "interval": bracket.strip() + interval,
        "why": score if isinstance(score, str) else "",
        "colour": _colour(drawn, cell),
        "price": None if isinstance(score, str) else round(40 * min(max(score.price.value, 0), 1.25) / 1.25, 1),
        "about": [] if isinstance(score, str) else _about(score),
        "prediction": cell.prediction,
        "held": drawn.held(cell),
        "figure": _figure(drawn, row, index),
    }


def _colour(drawn: Map, cell: MapCell) -> str:
    """A CSS class: how many factors of two more or less than the base, which three seeds do not resolve; or grey."""
    difference = drawn.seen(cell)
    if isinstance(cell.score, str) or difference in (None, "same"):
        return "grey"
    relative = cell.score.relative.value
    steps = STEPS if relative in (0, math.inf) else abs(math.log2(relative))
    return f"{difference}{2 if cell.score.quick else min(STEPS, max(1, round(steps)))}"


def _about(score: Score) -> list[tuple[str, str]]:
    def dose(value: float) -> str:
        return f"above {setting(score.doses[-1])}" if math.isinf(value) else f"{value:.3g}"

    return [
        ("tolerated dose", dose(score.tolerated)),
        ("ends below its start from", dose(score.harm)),
        ("price: left of the gain at the first dose", str(score.price)),
        ("seeds", ", ".join(map(str, score.seeds))),
    ]


def _figure(drawn: Map, row: str, index: int) -> dict[str, Any]:
    """Lines of means and a point for each seed, for the row and the base; doses are evenly spaced."""
    base, cell, start = drawn.cells["base", index], drawn.cells[row, index], drawn.starts[index]
    doses = sorted(base.outcomes.keys() | cell.outcomes.keys())
    x = {dose: LEFT + (WIDTH - LEFT - RIGHT) * (k + 0.5) / len(doses) for k, dose in enumerate(doses)}
    top = max([0.1, *(value for map_cell in (base, cell) for _, value in _points(map_cell))])

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top), 1)

    def drawn_of(kind: str, map_cell: MapCell, aside: float) -> dict[str, Any]:
        means = [(dose, sum(seeds.values()) / len(seeds)) for dose, seeds in sorted(map_cell.outcomes.items())]
        return {
            "kind": kind,
            "line": " ".join(f"{x[dose]:.1f},{y(mean)}" for dose, mean in means),
            "points": [(round(x[dose] + aside, 1), y(value)) for dose, value in _points(map_cell)],
        }

    levels = []
    if base.outcomes and not math.isnan(start):
        seeds = base.outcomes[min(base.outcomes)]
        survival = start + SURVIVAL * (sum(seeds.values()) / len(seeds) - start)
        levels = [("survival", y(survival)), ("start", y(start))]
    curves = [drawn_of("base", base, -4)] + ([drawn_of("own", cell, 4)] if row != "base" else [])
    ticks = [(y(value), f"{value:.2f}") for value in (0, top / 2, top)]
    labels = [(round(position, 1), setting(dose)) for dose, position in x.items()]
    return {"curves": curves, "doses": labels, "levels": levels, "ticks": ticks}


def _points(cell: MapCell) -> list[tuple[float, float]]:
    return [(dose, value) for dose, seeds in cell.outcomes.items() for value in seeds.values()]
