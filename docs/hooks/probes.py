"""What came of the probes, from the runs that ship: a table for the page of each, and the map as a page."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

from rlstab.probe.map import Map, draw_map
from rlstab.probe.records import Record
from rlstab.probe.rows import row
from rlstab.probe.suite import FIXED, START, probes


@cache
def drawn() -> Map:
    """The map of every run that ships; a run that several rows have in common stands in each of them."""
    folder = resources.files("rlstab.probe") / "recorded"
    files = sorted(file.name for file in folder.iterdir())
    lines = [line for name in files for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    records = [Record(**json.loads(line)) for line in lines]
    names = sorted({record.row for record in records} - FIXED.keys() - {START})
    there = {record.probe for record in records}
    return draw_map(
        [probe for probe in probes() if probe.name in there], {name: row(name).kinds for name in names}, records
    )


def table(name: str) -> list[str]:
    """Lines of Markdown: what was predicted for each row of a probe, and what was seen."""
    whole = drawn()
    lines = ["| row | predicted | held | tolerated dose against the base's | price |", "|---|---|---|---|---|"]
    for place, column in enumerate(whole.columns):
        for key, title in whole.rows.items():
            cell = whole.cells[key, place]
            if column.probe.name != name or key == "base" or not cell.outcomes:
                continue
            row_title = f"{title}, {column.policy}" if column.policy else title
            held = {True: "yes", False: "no", None: ""}[whole.held(cell)]
            price = "" if isinstance(cell.score, str) else str(cell.score.price)
            lines.append(f"| {row_title} | {cell.prediction or ''} | {held} | {whole.shown(cell)} | {price} |")
    return lines
