"""``rlstab check FILE --host NAME``: what each method reads, and what the adapter of a host makes of it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rlstab.core.batch import BASICS
from rlstab.core.compose import Composition, walk
from rlstab.core.objective import TokenObjective
from rlstab.hosts import Host, measures, refusal
from rlstab.signals import SIGNAL_NAMES


def host_table(objective: Composition, host: Host) -> RenderableType:
    """One row per method: what it reads, and where the host gets that from."""
    table = Table(show_lines=True, title=f"{host.titled}, through {host.adapter}")
    for column in ("method", "reads", "decides by the whole step", f"from {host.name}"):
        table.add_column(column, overflow="fold")
    for key, method in objective.keyed.items():
        whole = any(measures(leaf.method) or "keep" in leaf.method.writes for leaf in walk(method, observed=True))
        row = (", ".join(reads(method)) or "the ratio alone", "yes" if whole else "no", _from(method, host))
        table.add_row(escape(key), *map(escape, row))
    return Group(table, *map(escape, _forwards(objective, host)))


def reads(method: TokenObjective) -> list[str]:
    """The evidence and the live outputs that a method reads beyond the ratio."""
    live = [f"live {name}" for name in sorted(method.live_needs)]
    return [*sorted(method.needs), *live]


def _from(method: TokenObjective, host: Host) -> str:
    asks = refusal(method) if host.data_level else None
    if asks is not None:
        return f"refused: {asks}"
    found = []
    for name in [*sorted(method.needs - BASICS), *sorted(method.live_needs)]:
        if name not in host.gives | host.live:
            found.append(f"{name}: missing; {host.cure(name)}")
        elif name in host.how:
            found.append(f"{name}: {host.how[name]}")
    return "; ".join(dict.fromkeys(found)) or "all of it"


def _forwards(objective: Composition, host: Host) -> list[str]:
    """What the host shows, and whether evidence costs a forward of its own."""
    if host.data_level:
        return ["sees: the whole optimizer step, once its rollout is scored: refresh is rollout"]
    wanted = [key for key, method in objective.keyed.items() if method.needs & SIGNAL_NAMES]
    told = (
        f"evidence: one more forward without gradient per micro-batch, for {', '.join(wanted)}"
        + (f"; none {host.spared}" if host.spared else "")
        if wanted
        else "evidence: no forward of its own"
    )
    return ["sees: the whole optimizer step, before its first backward pass", told]
