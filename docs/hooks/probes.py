"""What came of the probes, from the runs that ship: a table for the page of each, and the map as a page.

``python -m docs.hooks.probes`` prints every number of both maps, and how often predictions and quick verdicts held.
"""

import json
from collections import Counter
from collections.abc import Set
from functools import cache
from importlib import resources

from rlstab.probe.map import Column, Map, MapCell, draw_map
from rlstab.probe.records import Record
from rlstab.probe.rows import row
from rlstab.probe.score import QUICK_SEEDS, Outcomes, score
from rlstab.probe.suite import FIXED, START, probes

#: By model, the page of its map next to those of its probes; the small model has no name.
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
    lines = ["| row | predicted | held | tolerated dose relative to the base's | price |", "|---|---|---|---|---|"]
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


# -- what predictions and quick verdicts are worth --------------------------------------------------------------------


def predictions(whole: Map, rows: Set[str]) -> Counter[tuple[str, bool]]:
    """How many predictions for some rows held and how many did not, by what was predicted."""
    told = Counter[tuple[str, bool]]()
    for (name, _), cell in whole.cells.items():
        did = whole.held(cell)
        if name in rows and did is not None and cell.prediction is not None:
            told[cell.prediction, did] += 1
    return told


def quick_verdicts(whole: Map, rows: Set[str]) -> Counter[tuple[str, str]]:
    """Cells of some rows by the verdict of a quick map and by that of all doses and seeds, where there are more."""
    verdicts = Counter[tuple[str, str]]()
    for (name, place), cell in whole.cells.items():
        if name not in rows or isinstance(cell.score, str) or cell.score.quick:
            continue
        own, base = (_quick(of, whole.columns[place]) for of in (cell, whole.cells["base", place]))
        quick = score(own, base, whole.starts[place])
        verdicts[quick if isinstance(quick, str) else quick.verdict, cell.score.verdict] += 1
    return verdicts


def _quick(cell: MapCell, column: Column) -> Outcomes:
    seeds, doses = column.probe.bench["seeds"][:QUICK_SEEDS], set(map(float, column.probe.quick_doses))
    there = {dose: outcomes for dose, outcomes in cell.outcomes.items() if dose in doses}
    return {dose: {seed: of[seed] for seed in seeds if seed in of} for dose, of in there.items()}


def how_many_held(told: Counter[tuple[str, bool]]) -> str:
    """How many of all predictions held, in words."""
    return f"{sum(count for (_, did), count in told.items() if did)} of {told.total()}"


def stated() -> str:
    """What docs/results.md says of the predictions for methods; it is stale where it says another number."""
    whole = drawn()
    return f"{how_many_held(predictions(whole, whole.rows.keys() - FIXED.keys()))} held"


def _print(title: str, whole: Map, rows: Set[str]) -> None:
    told = predictions(whole, rows)
    words = sorted({word for word, _ in told})
    by_word = ", ".join(f"{told[word, True]} of {told[word, True] + told[word, False]} '{word}'" for word in words)
    print(f"{title}: {how_many_held(told)} predictions held ({by_word}).")
    for (quick, full), count in sorted(quick_verdicts(whole, rows).items()):
        print(f"{title}: quick '{quick}', at all doses and seeds '{full}': {count}")


if __name__ == "__main__":
    for model in MAPS:
        whole = drawn(model)
        print(whole.markdown)
        _print("methods", whole, whole.rows.keys() - FIXED.keys())
        _print("fixed rows", whole, FIXED.keys() - {"base"})
