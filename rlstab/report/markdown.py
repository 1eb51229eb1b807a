"""A comparison as Markdown: for terminals, issues, and the pages of a project. Every number comes from the runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rlstab.report.collapse import DEFINITIONS, DETECTORS, TITLES
from rlstab.report.comparison import Cell, Comparison, Table
from rlstab.report.findings import paragraphs
from rlstab.report.model import RunRecord, setting_of
from rlstab.report.numbers import NOTHING, counted, decimals, places
from rlstab.report.statistics import CONFIDENCE, MIN_SEEDS, Estimate
from rlstab.report.sweep import Sweep
from rlstab.visible import visible

#: Settings of a run that a reader wants to know first, and how they are told.
FRAME = {
    "task.name": "task {}",
    "model.name": "model {}",
    "optimisation.rollouts": "rollouts {}",
    "rollout.prompts": "prompts per rollout {}",
    "rollout.group": "responses per prompt {}",
    "optimisation.epochs": "epochs {}",
    "optimisation.mini_batches": "mini-batches {}",
    "optimisation.lr": "learning rate {}",
}


def markdown(comparison: Comparison, *, title: str = "Comparison", command: str | None = None) -> str:
    """The whole page.

    Args:
        comparison: from :func:`rlstab.report.comparison.compare`.
        title: first heading.
        command: that makes the page again.
    """
    parts = [f"# {title}", *_opening(comparison, command)]
    for table in comparison.tables:
        parts += _table(comparison, table)
    for sweep in comparison.sweeps:
        parts += _sweep(sweep)
    parts += _idle(comparison) + _overlaps(comparison) + _missing(comparison) + _again(comparison)
    return visible("\n\n".join(parts), spaces=False) + "\n"


def _opening(comparison: Comparison, command: str | None) -> list[str]:
    percent = f"{100 * CONFIDENCE:g} %"
    parts = []
    if command:
        parts.append("Written by this command from what the runs recorded; no number is typed by hand.")
        parts.append(_shell([command]))
    parts.append(
        f"How to read it. Values are interquartile means over seeds (the lowest and highest quarter cut off, in whole "
        f"seeds), with {percent} bootstrap intervals. Differences are means over the seeds that a method and its "
        f"baseline share, with Student's t intervals. P(higher) is the share of those seeds in which the method ends "
        f"above its baseline, ties half. Each interval is for itself alone; the verdicts in words hold at {percent} "
        f"for all methods of one setting and outcome together (Holm), not over several outcomes. *No visible "
        f"difference* does not mean equal: the interval says how large a difference could have stayed hidden. Fewer "
        f"than {MIN_SEEDS} seeds give no interval, and bootstrap intervals of few are too narrow: in simulations "
        f"with normal values they contain the true value in 72 % of cases with 3 seeds, 88 % with 5, 93 % with 12. "
        f"No verdict rests on them."
    )
    outcomes = _list(f"{one.name}: {one.text}" for one in comparison.outcomes)
    return [*parts, f"Outcomes, each of finished runs:\n\n{outcomes}"]


def _table(comparison: Comparison, table: Table) -> list[str]:
    parts = [f"## {_text(table.title)}"]
    parts += [_text(one) for one in paragraphs(table.about)]
    every = [run for runs in table.runs.values() for run in runs]
    frame = _frame(every)
    if frame:
        parts.append(frame)
    rows = []
    for outcome in comparison.outcomes:
        shown, cells = outcome.name, {method: table.cells[method, outcome.name] for method in table.methods}
        if not any(cell.values for cell in cells.values()):
            continue
        digits = (
            _digits(cell.summary for cell in cells.values()),
            _digits(cell.paired.difference for cell in cells.values() if cell.paired),
        )
        for method, cell in cells.items():
            rows.append([shown, _text(method), *_cells(cell, digits, baseline=method == table.baseline)])
            shown = ""
    baseline = f"difference to {_text(table.baseline)}" if table.baseline else "difference"
    if rows:
        parts.append(_list(_in_words(comparison, table)))
        parts.append(_grid(["outcome", "method", "seeds", "value", baseline, "P(higher)", "in words"], rows))
    else:
        parts.append("No run of this setting has finished: there is nothing to compare.")
    heads = ["method", "runs", "failed", "collapsed", *(TITLES[name] for name in DETECTORS)]
    counts = [
        [
            _text(method),
            str(one.runs),
            str(one.failed),
            str(one.collapsed),
            *(f"{one.fired[name]} of {one.judged[name]}" for name in DETECTORS),
        ]
        for method, one in table.collapses.items()
    ]
    parts.append("Runs in which a detector of collapse fired, of those it could judge:\n\n" + _grid(heads, counts))
    return parts


def _cells(cell: Cell, digits: tuple[int, int], *, baseline: bool) -> list[str]:
    value = [str(len(cell.values)), _estimate(cell.summary, digits[0])]
    if cell.paired is None:
        return [*value, "", "", "baseline" if baseline else ""]
    said = cell.paired.verdict + (f" ({cell.paired.remark})" if cell.paired.remark else "")
    return [
        *value,
        _estimate(cell.paired.difference, digits[1], sign=True),
        _estimate(cell.paired.wins, 2),
        _text(said),
    ]


def _digits(estimates: Iterable[Estimate]) -> int:
    """Decimals that all numbers of a column share, as on the page."""
    return places([number for one in estimates for number in (one.value, one.low, one.high) if number is not None])


def _in_words(comparison: Comparison, table: Table) -> Iterable[str]:
    """One sentence per outcome, from the verdicts; plain text."""
    for outcome in comparison.outcomes:
        said: dict[str, list[str]] = {}
        for method in table.methods:
            paired = table.cells[method, outcome.name].paired
            if paired is not None and table.cells[method, outcome.name].values:
                said.setdefault(paired.verdict, []).append(method)
        if said:
            told = "; ".join(f"{verdict}: {', '.join(methods)}" for verdict, methods in sorted(said.items()))
            yield f"{outcome.name} against {table.baseline}: {told}."


def _sweep(sweep: Sweep) -> list[str]:
    rows = []
    for method, highest in sweep.highest.items():
        points = {one.value: one for one in sweep.points if one.method == method}
        row = [_text(method), "none" if highest is None else f"{highest:g}"]
        for value in sweep.values:
            one = points.get(value)
            row.append("" if one is None else f"{one.collapsed}, {one.below_start}, {one.unknown} of {one.runs}")
        rows.append(row)
    return [
        f"## {_text(f'{sweep.bench}: highest' if sweep.bench else 'Highest')} stable {_text(sweep.key)}",
        "Stable: no seed collapsed, none ended below the reward it began with, all finished; there and at every lower "
        "value tried. Counts: collapsed, ended below the start, not to be judged, of how many seeds.",
        _grid(["method", "highest stable", *(f"{value:g}" for value in sweep.values)], rows),
    ]


def _idle(comparison: Comparison) -> list[str]:
    if not comparison.idle:
        return []
    found: dict[tuple[str, str], list[str]] = {}
    for one in comparison.idle:
        where = ", ".join(part for part in (one.bench, one.setting) if part)
        found.setdefault((one.text, where), []).append(one.method)
    told = (f"{text}. So in {where}: {', '.join(methods)}." for (text, where), methods in found.items())
    return ["## Methods that never acted", _list(told)]


def _overlaps(comparison: Comparison) -> list[str]:
    parts = ["## Overlap between methods"] if comparison.overlaps else []
    for one in comparison.overlaps:
        where = ", ".join(part for part in (one.bench, one.setting) if part)
        rows = [
            [_text(name), str(count), *("" if value is None else f"{value:.2f}" for value in row)]
            for name, count, row in zip(one.names, one.touched, one.matrix, strict=True)
        ]
        parts.append(f"{_text(where)}: tokens that both touched over tokens that either did; {_text(one.compared)}.")
        parts.append(_grid(["method", "tokens", *(_text(name) for name in one.names)], rows))
    return parts


def _missing(comparison: Comparison) -> list[str]:
    parts = []
    if comparison.loaded.left_out:
        parts += ["## Left out", _list(f"{one.path}: {one.why}" for one in comparison.loaded.left_out)]
    if comparison.notes:
        parts += ["## Notes", _list(comparison.notes)]
    return parts


def _again(comparison: Comparison) -> list[str]:
    runs = comparison.loaded.runs
    benches = list(dict.fromkeys(run.bench_command for run in runs if run.bench_command))
    single = [run.command for run in runs if run.command and not run.bench_command]
    versions = [
        f"{what}: {', '.join(sorted({str(run.about[what]) for run in runs if what in run.about}))}"
        for what in ("rlstab", "torch", "transformers", "python", "device", "machine", "cpu")
        if any(what in run.about for run in runs)
    ]
    several = len({run.bench for run in runs}) > 1
    hashes: dict[tuple[str, ...], None] = {}
    for run in runs:
        found = (run.method, str(run.about.get("objective_hash", NOTHING)))
        hashes[(run.bench or NOTHING, *found) if several else found] = None
    cost = sum(run.cpu_seconds or 0 for run in runs)
    parts = ["## Make it again"]
    if benches or single:
        parts.append(_shell([*benches, *single]))
    if cost:
        versions.append(f"{cost / 3600:.1f} CPU hours of {counted(len(runs), 'run')} together")
    parts.append(_list(versions))
    heads = [*(["bench"] if several else []), "method", "objective hash"]
    parts.append(_grid(heads, [[_text(cell) for cell in row] for row in hashes]))
    parts.append("Definitions of collapse:\n\n" + _list(f"{TITLES[name]}: {DEFINITIONS[name]}" for name in DETECTORS))
    return parts


def _frame(runs: Sequence[RunRecord]) -> str:
    """What all runs of a setting share."""
    told = []
    for path, words in FRAME.items():
        values = {repr(setting_of(run.config, path)): setting_of(run.config, path) for run in runs if run.config}
        found = next(iter(values.values()), None)
        if len(values) == 1 and found is not None:
            told.append(words.format(_text(str(found))))
    seeds = sorted({run.seed for run in runs})
    return f"In all runs: {', '.join(told)}. Seeds {', '.join(map(str, seeds))}." if told else ""


def _estimate(one: Estimate, digits: int, *, sign: bool = False) -> str:
    if one.low is None or one.high is None:
        return decimals(one.value, digits, sign)
    value, low, high = (decimals(number, digits, sign) for number in (one.value, one.low, one.high))
    return f"{value} [{low}, {high}]"


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_text(item)}" for item in items)


def _shell(commands: Iterable[str]) -> str:
    lines = "\n".join(re.sub(r"\s+", " ", one).replace("```", "") for one in commands)
    return f"```sh\n{lines}\n```"


def _text(data: str) -> str:
    """Names, paths and errors are data: nothing in them makes markup, ends a cell or begins a line."""
    plain = re.sub(r"\s+", " ", data).strip()
    return re.sub(r"([\\|<>`*\[\]])", r"\\\1", plain)
