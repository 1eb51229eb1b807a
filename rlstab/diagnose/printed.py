"""A diagnosis on a terminal, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rlstab.console import counted
from rlstab.diagnose.diagnosis import Diagnosis, First, diagnose_paths
from rlstab.diagnose.remedies import Remedy
from rlstab.report.formatting import listed, setting
from rlstab.report.runs import setting_of
from rlstab.signs import SIGNS
from rlstab.visible import visible

#: With more runs than this, each gets one line.
FEW = 3
#: The most methods without a comparison that are named.
MOST_METHODS = 8
#: The page with the same text about every cause.
PAGE = "docs/troubleshooting.md"


def run_diagnose(paths: Sequence[str | Path], console: Console, *, as_json: bool = False) -> None:
    """Read the runs under some paths and print what came first in each.

    Args:
        paths: see :func:`rlstab.diagnose.readers.read_logs`.
        console: where to print.
        as_json: print a list for machines instead, with an entry for each run.

    Raises:
        ReportError: see :func:`rlstab.diagnose.diagnosis.diagnose_paths`.
    """
    runs = diagnose_paths(paths)
    if as_json:
        # escaped, so that no control character of the log reaches the terminal
        console.file.write(json.dumps([run.as_json() for run in runs], indent=1, ensure_ascii=True) + "\n")
        return
    console.print(overview(runs) if len(runs) > FEW else Group(*map(shown, runs)), highlight=False)


def overview(runs: Sequence[Diagnosis]) -> RenderableType:
    """A line for each run, and the number of runs by cause."""
    table = Table.grid(padding=(0, 2))
    for run in runs:
        table.add_row(_safe(run.log.title), escape(run.told()))
    titles = Counter(run.remedy.title if run.remedy else "nothing found" for run in runs)
    counts = ", ".join(f"{title} {count}" for title, count in titles.most_common())
    return Group(table, "", f"{counted(len(runs), 'run')}: {counts}. Give one of them for the full text.")


def _grid(*first: bool) -> Table:
    """A table with a column for each bool, which says whether it is right-aligned, and a last column that folds."""
    table = Table.grid(padding=(0, 2))
    for right in first:
        table.add_column(justify="right" if right else "left", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def shown(run: Diagnosis) -> RenderableType:
    """Everything about one run."""
    log = run.log
    head = f"[bold]{_safe(log.title)}[/] [dim]({_safe(log.writer)}, {counted(log.rollouts, log.unit)})[/]"
    return Group(head, Padding(Group(*_told(run)), (0, 0, 1, 2)))


def _told(run: Diagnosis) -> Iterator[RenderableType]:
    colour = "green" if run.first is None else "bold yellow"
    yield f"[{colour}]{escape(run.told())}[/]"
    for remark in run.remarks:
        yield f"[yellow]note:[/] {_safe(remark)}"
    if run.first:
        yield _signs(run.first, run.log.unit)
    if run.remedy:
        yield from _remedy(run.remedy, run)
    yield from _looked_at(run)


def _signs(first: First, unit: str) -> Table:
    table = _grid(True, False)
    for sign in (first.sign, *first.later):
        table.add_row(f"{unit} {sign.step}", SIGNS[sign.name].title, f"[dim]{escape(sign.text)}[/]")
    return table


def _remedy(remedy: Remedy, run: Diagnosis) -> Iterator[RenderableType]:
    yield ""
    yield f"[bold]likely:[/] {escape('; or '.join(remedy.likely))}."
    yield f"[bold]first:[/] {escape(remedy.first)}"
    for host, names in remedy.settings.items():
        if host == run.log.writer or run.log.writer not in remedy.settings:
            yield f"  [dim]{host}:[/] {_safe(', '.join(_setting(name, run) for name in names))}"
    if remedy.evidence:
        yield "[bold]compared here:[/]"
        yield _evidence(remedy)
    compared = {method for method, _ in remedy.evidence}
    without = [name for name in (*remedy.stages, *remedy.methods) if name not in compared]
    if without:
        more = len(without) - MOST_METHODS
        named = [*without[:MOST_METHODS], *([f"{more} more"] if more > 0 else [])]
        yield f"[bold]no evidence here for:[/] {escape(listed(named))}"
    yield f"[dim]{PAGE} says more; rlstab explain NAME says what a method does.[/]"


def _setting(name: str, run: Diagnosis) -> str:
    """A setting, with its value if the run has it."""
    value = setting_of(run.log.config, name)
    told = setting(value) if isinstance(value, float) else value
    return f"{name} (here {told})" if isinstance(told, str | int) and not isinstance(told, bool) else name


def _evidence(remedy: Remedy) -> Padding:
    table = _grid(False)
    for method, figures in remedy.evidence:
        figure = figures[0]
        where = f"{figure.bench}, {figure.setting}" if figure.setting != "default" else figure.bench
        told = "; ".join(figure.told for figure in figures)
        seeds = counted(figure.seeds, "seed")
        source = f"against {figure.baseline}, {seeds}, task {figure.task}; {figure.page}, {where}"
        table.add_row(escape(method), f"{escape(told)}\n[dim]{escape(source)}[/]")
    commands = dict.fromkeys(figure.command for _, figures in remedy.evidence for figure in figures)
    table.add_row("", f"[dim]again: {escape('; '.join(commands))}[/]")
    return Padding(table, (0, 0, 0, 2))


def _looked_at(run: Diagnosis) -> Iterator[RenderableType]:
    yield ""
    if run.looked_at:
        table = _grid(False)
        for sign in run.looked_at:
            table.add_row(f"[dim]{escape(SIGNS[sign.name].title)}[/]", f"[dim]{escape(sign.text)}[/]")
        yield "[bold]looked at, and not found:[/]"
        yield Padding(table, (0, 0, 0, 2))
    reasons: dict[str, list[str]] = {}
    for unseen in run.unseen:
        reasons.setdefault(unseen.text, []).append(SIGNS[unseen.name].unseen)
    if reasons:
        yield "[bold]cannot be seen:[/]"
        for why, what in reasons.items():
            yield f"  {escape(listed(what))} [dim]({escape(why)})[/]"


def _safe(text: str) -> str:
    """A text of the log, escaped."""
    return escape(visible(text, spaces=False))
