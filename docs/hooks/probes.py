"""What came of the probes, from the runs that ship: a table for the page of each, and the map as a page."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from rlstab.probe.map import Map, draw_map
from rlstab.probe.records import Record
from rlstab.probe.rows import row
from rlstab.probe.suite import FIXED, START, probes

#: By model, the page of its map beside those of its probes; the small model has no name.
MAPS = {None: "map.html", "smollm2": "smollm2-map.html"}


@cache
def drawn(model: str | None = None) -> Map:
    """The map of every run on a model that ships; a run that several rows have in common stands in each of them."""
    folder = resources.files("rlstab.probe") / "recorded"
    files = sorted(file.name for file in folder.iterdir())
    lines = [line for name in files for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    suite = {probe.name: probe for probe in probes(model=model)}
    records = [record for line in lines if (record := Record(**json.loads(line))).probe in suite]
    names = sorted({record.row for record in records} - FIXED.keys() - {START})
    kinds = {name: row(name).kinds for name in names}
    there = {record.probe for record in records}
    return draw_map([probe for probe in suite.values() if probe.name in there], kinds, records)


def outcomes(page: str) -> str:
    """What came of the probes of a page: what was predicted for each row, and what was seen; nothing without runs."""
    model = page if page in MAPS else None
    whole, own = drawn(model), {probe.name for probe in probes(model=model) if model or probe.name == page}
    lines = ["| row | predicted | held | tolerated dose against the base's | price |", "|---|---|---|---|---|"]
    for place, column in enumerate(whole.columns):
        for key, title in whole.rows.items():
            cell = whole.cells[key, place]
            if column.probe.name not in own or key == "base" or not cell.outcomes:
                continue
            probe = model and column.probe.name.removeprefix(f"{model}-")
            row_title = ", ".join(filter(None, [title, probe, column.policy]))
            held = {True: "yes", False: "no", None: ""}[whole.held(cell)]
            price = "" if isinstance(cell.score, str) else str(cell.score.price)
            lines.append(f"| {row_title} | {cell.prediction or ''} | {held} | {whole.shown(cell)} | {price} |")
    rows = "\n".join(lines)
    return f"\n## What came of it\n\n{rows}\n\nSingle runs: [the map]({MAPS[model]}).\n" if whole.columns else ""
