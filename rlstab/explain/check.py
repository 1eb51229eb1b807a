"""``rlstab check``: whether a run can start, what it needs and costs, and what a host's adapter makes of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rlstab.config import Document, load_objective, load_run, objective_hash, run_hash
from rlstab.config.runs import RunConfig
from rlstab.console import Terminal
from rlstab.core.batch import BASICS
from rlstab.core.compose import Composition, walk
from rlstab.core.objective import TokenObjective
from rlstab.explain import stages
from rlstab.explain.costs import costs
from rlstab.explain.notes import notes
from rlstab.hosts import Host, adapted, measures
from rlstab.signals import SIGNAL_NAMES


def check(objective: Composition, run: RunConfig | None, tried: Sequence[str] = ()) -> None:
    """Print what a file means for rlstab's trainer.

    Args:
        objective: the objective of the file.
        run: the run of the file, if it has more than an objective.
        tried: findings from trying the run, see :func:`rlstab.preflight.preflight`.
    """
    console = Terminal()
    console.print(
        f"no conflict: objective {objective_hash(objective)}" + (f", run {run_hash(run)}" if run else ""), style="bold"
    )
    acting = [*objective.keyed.items(), *((stage.name, stage) for stage in (run.pipeline if run else ()))]
    lines = [*tried, *(f"{name}: {method!r}" for name, method in acting)]
    needed = costs(objective, run)
    if run is not None:
        lines.append(f"ratio against: {run.optimisation.old_logprobs}")
        needed += stages.needs(run.pipeline)
    for line in [*lines, *(line.replace("`", "") for line in needed)]:
        console.print(escape(line))
    for note in notes(objective, run):
        console.print(f"[yellow]note:[/] {escape(note)}")


def check_host(objective: Composition, name: str) -> None:
    """Print how the adapter for another trainer runs an objective; one that cannot run raises the adapter's error.

    Raises:
        UnknownName: there is no adapter for the host.
        MissingSignal: the host does not provide a signal that a method reads.
        ConfigError: the host keeps its loss, and neither a mask nor advantages can express a method.
    """
    console, host = Terminal(), adapted(name)
    console.print(host_table(objective, host))
    host.require(objective)
    settings = ", ".join(f"{name}={value.value!r}" for name, value in host.settings(objective).items())
    if settings:
        console.print(escape(f"{host.section}: {settings}"), soft_wrap=True)  # to be copied
    if host.deterministic:
        console.print(f"equal runs on a GPU need {host.deterministic}", highlight=False, soft_wrap=True)
    verb = "express" if host.data_level else "train"
    console.print(f"objective {objective_hash(objective)}: {host.name} can {verb} it")


def read(source: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[Composition, RunConfig | None]:
    """The objective of a file, or of the mapping that it would hold, and its run if it has one or settings are given.

    Raises:
        ConfigError, Conflict: see :func:`rlstab.config.load_run`.
    """
    data = Document.read(source).data if isinstance(source, str) else source
    is_run = isinstance(data, Mapping) and {*data} != {"objective"} and not data.keys() & {"name", "preset"}
    run = load_run(source, overrides) if is_run or overrides else None
    return (run.composition if run else load_objective(source)), run


def host_table(objective: Composition, host: Host) -> RenderableType:
    """One row per method: what it reads, and where the host gets it; below it, what that costs."""
    table = Table(show_lines=True, title=f"{host.titled}, through {host.adapter}")
    for column in ("method", "reads", "decides by the whole step", f"from {host.name}"):
        table.add_column(column, overflow="fold")
    for key, method in objective.keyed.items():
        by_step = any(measures(leaf.method) or "keep" in leaf.method.writes for leaf in walk(method, observed=True))
        live = [f"live {name}" for name in sorted(method.live_needs)]
        evidence = [*sorted(method.needs & BASICS), *sorted(method.needs - BASICS), *live]
        row = key, ", ".join(evidence) or "only the ratio", "yes" if by_step else "no", _from(method, host)
        table.add_row(*map(escape, row))
    lines = [f"sees: {host.sees}"]
    readers = [key for key, method in objective.keyed.items() if method.needs & SIGNAL_NAMES]
    if readers and not host.data_level:
        forward = f"one more forward pass without gradient per micro-batch, for {', '.join(readers)}"
        lines.append(f"evidence: {forward}" + (f"; none {host.spared}" if host.spared else ""))
    elif not host.data_level:
        lines.append("evidence: no separate forward pass")
    return Group(table, *map(escape, lines))


def _from(method: TokenObjective, host: Host) -> str:
    if (asks := host.refuses(method)) is not None:
        return f"refused: {asks}"
    sources = []
    for name in [*sorted(method.needs - BASICS), *sorted(method.live_needs)]:
        if name not in host.gives | host.live:
            sources.append(f"{name}: missing; {host.cure(name)}")
        elif name in host.how:
            sources.append(f"{name}: {host.how[name]}")
    return "; ".join(dict.fromkeys(sources)) or "all of it"
