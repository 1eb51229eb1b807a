"""A comparison as Markdown: for terminals, issues, and the pages of a project. Every number comes from the runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources

import jinja2

from rlstab.report.collapse import DEFINITIONS, DETECTORS, TITLES
from rlstab.report.comparison import Cell, Comparison, Table
from rlstab.report.formatting import NOTHING, counted, decimals, paragraphs, places, setting
from rlstab.report.runs import RunRecord, setting_of
from rlstab.report.statistics import MIN_SEEDS, Estimate
from rlstab.visible import visible

#: Settings of a run that a reader wants to know first.
FRAME = {
    "task.name": "task",
    "model.name": "model",
    "optimisation.rollouts": "rollouts",
    "rollout.prompts": "prompts per rollout",
    "rollout.group": "responses per prompt",
    "optimisation.epochs": "epochs",
    "optimisation.mini_batches": "mini-batches",
    "optimisation.lr": "learning rate",
}


def markdown(comparison: Comparison, *, title: str = "Comparison", command: str = "") -> str:
    """The whole page.

    Args:
        comparison: from :func:`rlstab.report.comparison.compare`.
        title: first heading.
        command: that makes the page again.
    """
    runs = comparison.loaded.runs
    several = len({run.bench for run in runs}) > 1
    # Markdown is not escaped as HTML is: the filter `text` does it
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters |= {"text": _text, "fence": _fenced, "setting": setting}
    template = environment.from_string((resources.files("rlstab.report") / "page.md").read_text(encoding="utf-8"))
    page = template.render(
        title=title,
        command=command,
        least=MIN_SEEDS,
        outcomes=comparison.outcomes,
        tables=comparison.tables,
        paragraphs=paragraphs,
        frame=_frame,
        result_rows=lambda table: list(_result_rows(comparison, table)),
        sweeps=comparison.sweeps,
        idle=list(_idle(comparison)),
        overlaps=comparison.overlaps,
        left_out=comparison.loaded.left_out,
        notes=comparison.notes,
        commands=_commands(runs),
        versions=_versions(runs),
        several=several,
        hashes=_hashes(runs, several),
        titles={name: TITLES[name] for name in DETECTORS},
        definitions=DEFINITIONS,
        grid=_grid,
    )
    return visible(page.rstrip() + "\n", spaces=False)


def _result_rows(comparison: Comparison, table: Table) -> Iterator[list[str]]:
    for outcome in comparison.outcomes:
        cells = {method: table.cells[method, outcome.name] for method in table.methods}
        if not any(cell.values for cell in cells.values()):
            continue
        digits = _digits(cell.summary for cell in cells.values())
        paired = _digits(cell.paired.difference for cell in cells.values() if cell.paired)
        for place, (method, cell) in enumerate(cells.items()):
            value = [str(len(cell.values)), _estimate(cell.summary, digits)]
            yield ["" if place else outcome.name, method, *value, *_compared(cell, paired, method == table.baseline)]


def _compared(cell: Cell, digits: int, baseline: bool) -> list[str]:
    if cell.paired is None:
        return ["", "", "baseline" if baseline else ""]
    verdict = cell.paired.verdict + (f" ({cell.paired.remark})" if cell.paired.remark else "")
    return [_estimate(cell.paired.difference, digits, sign=True), _estimate(cell.paired.wins, 2), verdict]


def _digits(estimates: Iterable[Estimate]) -> int:
    """Decimals that all numbers of a column share, as on the page."""
    return places([number for one in estimates for number in (one.value, one.low, one.high) if number is not None])


def _estimate(estimate: Estimate, digits: int, *, sign: bool = False) -> str:
    value = decimals(estimate.value, digits, sign)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{decimals(estimate.low, digits, sign)}, {decimals(estimate.high, digits, sign)}]"


def _idle(comparison: Comparison) -> Iterator[str]:
    methods: dict[tuple[str, str], list[str]] = defaultdict(list)
    for idle in comparison.idle:
        methods[idle.text, ", ".join(filter(None, (idle.bench, idle.setting)))].append(idle.method)
    for (text, where), names in methods.items():
        yield f"{text}. This holds in {where}: {', '.join(names)}."


def _commands(runs: Sequence[RunRecord]) -> list[str]:
    benches = dict.fromkeys(run.bench_command for run in runs if run.bench_command)
    return [*benches, *(run.command for run in runs if run.command and not run.bench_command)]


def _versions(runs: Sequence[RunRecord]) -> dict[str, str]:
    versions = {
        what: ", ".join(sorted({str(run.about[what]) for run in runs if what in run.about}))
        for what in ("rlstab", "torch", "transformers", "python", "device", "machine", "cpu")
        if any(what in run.about for run in runs)
    }
    if cost := sum(run.cpu_seconds or 0 for run in runs):
        versions["cost"] = f"{cost / 3600:.1f} CPU-hours for {counted(len(runs), 'run')}"
    return versions


def _hashes(runs: Sequence[RunRecord], several: bool) -> list[list[str]]:
    rows = {
        (*([run.bench or NOTHING] if several else []), run.method, str(run.about.get("objective_hash", NOTHING))): None
        for run in runs
    }
    return list(map(list, rows))


def _frame(table: Table) -> str:
    """What all runs of a setting share."""
    runs = [run for runs in table.runs.values() for run in runs]
    shared = []
    for path, words in FRAME.items():
        values = {str(setting_of(run.config, path)) for run in runs if run.config}
        if len(values) == 1 and values != {"None"}:
            shared.append(f"{words} {_text(values.pop())}")
    seeds = sorted({run.seed for run in runs})
    return f"In all runs: {', '.join(shared)}. Seeds {', '.join(map(str, seeds))}." if shared else ""


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(map(_text, heads)), ["---"] * len(heads), *(list(map(_text, row)) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fenced(command: str) -> str:
    return re.sub(r"\s+", " ", command).replace("```", "")


def _text(data: str) -> str:
    """Names, paths and errors are data: nothing in them makes markup, ends a cell or begins a line.

    A bracket is harmless where no address follows it, and intervals are easier to read without a stroke.
    """
    plain = re.sub(r"\s+", " ", data).strip()
    interval = re.fullmatch(r"[\d.,+\u2212\u2013\s]+\[[\d.,+\u2212\s]+\]", plain)
    return plain if interval else re.sub(r"([\\|<>`*\[\]])", r"\\\1", plain)
