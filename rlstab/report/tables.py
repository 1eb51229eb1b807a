"""The rows of a report's tables as text, the same in HTML and in Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlstab.config.allowed_changes import is_measured
from rlstab.console import counted
from rlstab.report.comparison import Cell, Outcome, Table
from rlstab.report.formatting import decimals, estimate, places
from rlstab.report.runs import RunRecord
from rlstab.report.statistics import Estimate, Paired


@dataclass(frozen=True)
class TableRow:
    """One method in one outcome.

    Attributes:
        method: its name.
        seeds: number of seeds with a value.
        value: the mean of the runs that were not lost, with its interval where it has one.
        difference: how far it is from the baseline; empty for the baseline itself, and without a baseline.
        verdict: what the difference says, in words.
        cost: what a rollout costs, in words.
        remark: what the verdict alone hides, why there is no interval, and which settings differ from those of the
            baseline; empty if nothing.
    """

    method: str
    seeds: int
    value: str
    difference: str
    verdict: str
    cost: str
    remark: str


def rows_of(table: Table, outcome: Outcome) -> list[TableRow]:
    """The methods of a table in one outcome; the numbers of a column have the same number of decimals."""
    cells = {method: table.cells[method, outcome.name] for method in table.methods}
    value_digits = _digits(cell.summary for cell in cells.values())
    difference_digits = _digits(cell.paired.difference for cell in cells.values() if cell.paired)

    def row(method: str, cell: Cell, paired: Paired | None) -> TableRow:
        remarks = [paired.remark, in_words(paired, outcome)] if paired else []
        remarks = [text for text in remarks if text] or ([cell.summary.how] if cell.summary.low is None else [])
        rate = table.losses[method].rate
        if cell.values and 0 < rate.hits == rate.count:
            remarks.append("of lost runs, since none survived")
        evaluated = outcome.name.startswith("eval/")
        differing = table.differs.get(method, {}).items()
        remarks += [text for path, text in differing if evaluated or not is_measured(path)]
        return TableRow(
            method=method,
            seeds=len(cell.values),
            value=_text(cell.summary, value_digits),
            difference=_text(paired.difference, difference_digits, signed=True) if paired else "",
            verdict=paired.verdict if paired else "the baseline" if method == table.baseline else "",
            cost=table.costs[method],
            remark="; ".join(remarks),
        )

    return [row(method, cell, cell.paired) for method, cell in cells.items()]


def in_words(paired: Paired, outcome: Outcome) -> str:
    """What the seeds of a comparison without a visible difference could have shown; else empty."""
    power, unit = paired.power, f" {outcome.unit}" if outcome.unit else ""
    if power is None or paired.difference.value is None:
        return ""
    low, high = (decimals(end, places([power[0]])) for end in power)
    return f"the difference that {len(paired.seeds)} seeds show in 8 of 10 repetitions is one of {low} to {high}{unit}"


def _digits(estimates: Iterable[Estimate]) -> int:
    return places(
        [number for entry in estimates for number in (entry.value, entry.low, entry.high) if number is not None]
    )


def _text(number: Estimate, digits: int, signed: bool = False) -> str:
    return estimate(number.value, number.low, number.high, digits, signed)


def about_runs(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Versions, machines and time over all runs; if values differ, all are named."""
    titles = {"python": "Python", "cpu": "processor", "processes": "processes per run", "threads": "threads per run"}
    about = {}
    for key in ("rlstab", "torch", "transformers", "python", "machine", "cpu", "device", "processes", "threads"):
        if values := dict.fromkeys(str(run.about[key]) for run in runs if key in run.about):
            about[titles.get(key, key)] = ", ".join(values)
    for title, spent in (
        ("wall-clock time", [run.seconds for run in runs if run.seconds is not None]),
        ("processor time", [run.cpu_seconds for run in runs if run.cpu_seconds is not None]),
    ):
        if spent:
            about[title] = f"{sum(spent) / 60:.1f} minutes, the sum over {counted(len(spent), 'run')}"
    return about
