"""A diagnosis on a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rlstab.diagnose.diagnosis import Diagnosis, diagnose_paths
from rlstab.diagnose.remedies import Remedy
from rlstab.diagnose.signs import SIGNS
from rlstab.report.formatting import counted, listed, setting
from rlstab.report.runs import setting_of
from rlstab.visible import visible

#: Of more runs than this each has one line.
FEW = 3
#: Of methods without a comparison here, so many are named.
MOST_METHODS = 8
#: The page that says the same of every cause.
PAGE = "docs/troubleshooting.md"


def run_diagnose(paths: Sequence[str | Path], console: Console, *, as_json: bool = False) -> None:
    """Read the runs under some paths and print what came first in each.

    Args:
        paths: see :func:`rlstab.diagnose.readers.read_logs`.
        console: where to print.
        as_json: one list for machines instead, an entry for each run.

    Raises:
        ReportError: see :func:`rlstab.diagnose.diagnosis.diagnose_paths`.
    """
    found = diagnose_paths(paths)
    if as_json:
        # escaped, so that no control character of the log reaches the terminal
        console.file.write(json.dumps([one.as_json() for one in found], indent=1, ensure_ascii=True) + "\n")
        return
    console.print(overview(found) if len(found) > FEW else Group(*(shown(one) for one in found)), highlight=False)


def overview(found: Sequence[Diagnosis]) -> RenderableType:
    """A line for each run, and how often each cause was the first."""
    table = Table.grid(padding=(0, 2))
    for one in found:
        table.add_row(_safe(one.log.title), escape(one.told()))
    titles = [one.remedy.title if one.remedy else "nothing found" for one in found]
    counts = [f"{title} {titles.count(title)}" for title in sorted(set(titles), key=lambda one: -titles.count(one))]
    return Group(table, "", f"{counted(len(found), 'run')}: {', '.join(counts)}. Name one of them for the whole text.")


def shown(one: Diagnosis) -> RenderableType:
    """Everything about one run."""
    log = one.log
    head = f"[bold]{_safe(log.title)}[/] [dim]({_safe(log.writer)}, {counted(log.last, log.unit)})[/]"
    return Group(head, Padding(Group(*_told(one)), (0, 0, 1, 2)))


def _told(one: Diagnosis) -> Iterator[RenderableType]:
    colour = "green" if one.first is None else "bold yellow"
    yield f"[{colour}]{escape(one.told())}[/]"
    for remark in one.remarks:
        yield f"[yellow]note:[/] {_safe(remark)}"
    if one.first:
        yield _signs(one)
    if one.remedy:
        yield from _remedy(one.remedy, one)
    yield from _looked_at(one)


def _signs(one: Diagnosis) -> Table:
    assert one.first is not None
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for sign in (one.first.sign, *one.first.later):
        table.add_row(f"{one.log.unit} {sign.step}", SIGNS[sign.name].title, f"[dim]{escape(sign.text)}[/]")
    return table


def _remedy(remedy: Remedy, one: Diagnosis) -> Iterator[RenderableType]:
    yield ""
    yield f"[bold]likely:[/] {escape('; or '.join(remedy.likely))}."
    yield f"[bold]first:[/] {escape(remedy.first)}"
    for host, names in remedy.settings.items():
        if host == one.log.writer or one.log.writer not in remedy.settings:
            yield f"  [dim]{host}:[/] {_safe(', '.join(_setting(name, one) for name in names))}"
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


def _setting(name: str, one: Diagnosis) -> str:
    """A setting, with its value where the run tells it."""
    value = setting_of(one.log.config, name)
    told = setting(value) if isinstance(value, float) else value
    return f"{name} (here {told})" if isinstance(told, str | int) and not isinstance(told, bool) else name


def _evidence(remedy: Remedy) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for method, figures in remedy.evidence:
        one = figures[0]
        where = f"{one.bench}, {one.setting}" if one.setting != "default" else one.bench
        told = "; ".join(figure.told for figure in figures)
        place = f"against {one.baseline}, {counted(one.seeds, 'seed')}, task {one.task}; {one.page}, {where}"
        table.add_row(escape(method), f"{escape(told)}\n[dim]{escape(place)}[/]")
    commands = dict.fromkeys(figure.command for _, figures in remedy.evidence for figure in figures)
    table.add_row("", f"[dim]again: {escape('; '.join(commands))}[/]")
    return Padding(table, (0, 0, 0, 2))


def _looked_at(one: Diagnosis) -> Iterator[RenderableType]:
    yield ""
    if one.looked_at:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for sign in one.looked_at:
            table.add_row(f"[dim]{escape(SIGNS[sign.name].title)}[/]", f"[dim]{escape(sign.text)}[/]")
        yield "[bold]looked at, and not found:[/]"
        yield Padding(table, (0, 0, 0, 2))
    reasons: dict[str, list[str]] = {}
    for unseen in one.unseen:
        reasons.setdefault(unseen.text, []).append(SIGNS[unseen.name].unseen)
    if reasons:
        yield "[bold]cannot be seen:[/]"
        for why, what in reasons.items():
            yield f"  {escape(listed(what))} [dim]({escape(why)})[/]"


def _safe(text: str) -> str:
    """A text of the log, as data."""
    return escape(visible(text, spaces=False))
