"""The map as one HTML page without scripts; a cell opens its curves."""

import math
from functools import partial
from typing import Any

from rlstab.page.render import rendered
from rlstab.probe.map import LEGEND, Map, MapCell
from rlstab.probe.score import SURVIVAL, Score
from rlstab.report.formatting import setting

#: Shades of a colour in either direction; each is a factor of two.
SHADES = 3
#: How far the seeds of row and base stand beside their dose, as a share of the width.
SHIFT = 0.012


def page(drawn: Map) -> str:
    """The HTML of a map."""
    functions = {"about": _about, "colour": partial(_colour, drawn), "figure": partial(_figure, drawn)}
    context = {"map": drawn, "legend": LEGEND, "numbers": {}}
    return rendered("probe/map.html", context | functions)


def _about(score: Score) -> list[tuple[str, str]]:
    doses = [
        f"above {setting(score.doses[-1])}" if math.isinf(dose) else f"{dose:.3g}"
        for dose in (score.tolerated, score.harm)
    ]
    return [
        ("tolerated dose", doses[0]),
        ("ends below its start from", doses[1]),
        ("price: left of the gain at the first dose", str(score.price)),
        ("seeds", ", ".join(map(str, score.seeds))),
    ]


def _colour(drawn: Map, cell: MapCell) -> str:
    """A CSS class: how many factors of two more or less than the base, which three seeds do not resolve; or grey."""
    difference = drawn.seen(cell)
    if isinstance(cell.score, str) or difference in (None, "same"):
        return "grey"
    relative = cell.score.relative.value
    steps = SHADES if relative in (0, math.inf) else abs(math.log2(relative))
    shade = 2 if cell.score.quick else min(SHADES, max(1, round(steps)))
    return f"d{4 + shade if difference == 'more' else 4 - shade}"


def _figure(drawn: Map, row: str, index: int) -> dict[str, Any]:
    """A line of means and a point for each seed, for the row and the base, as shares of the axes; doses are evenly
    spaced.
    """
    base, cell, start = drawn.cells["base", index], drawn.cells[row, index], drawn.starts[index]
    doses = sorted(base.outcomes.keys() | cell.outcomes.keys())
    across = {dose: (position + 0.5) / len(doses) for position, dose in enumerate(doses)}
    top = max([0.1, *(value for outcomes in (base, cell) for _, value in _points(outcomes))])

    def curve(kind: str, drawn_cell: MapCell, shift: float) -> tuple[str, Any, Any]:
        means = [(dose, sum(seeds.values()) / len(seeds)) for dose, seeds in sorted(drawn_cell.outcomes.items())]
        points = [(across[dose] + shift, value / top) for dose, value in _points(drawn_cell)]
        return kind, [(across[dose], mean / top) for dose, mean in means], points

    levels = {}
    if base.outcomes and not math.isnan(start):
        seeds = base.outcomes[min(base.outcomes)]
        survival = start + SURVIVAL * (sum(seeds.values()) / len(seeds) - start)
        levels = {"survival": survival / top, "start": start / top}
    return {
        "curves": [curve("second", base, -SHIFT), *([curve("first", cell, SHIFT)] if row != "base" else [])],
        "doses": [(position, setting(dose)) for dose, position in across.items()],
        "levels": levels.items(),
        "heights": [f"{value:.2f}" for value in (0, top / 2, top)],
    }


def _points(cell: MapCell) -> list[tuple[float, float]]:
    return [(dose, value) for dose, seeds in cell.outcomes.items() for value in seeds.values()]
