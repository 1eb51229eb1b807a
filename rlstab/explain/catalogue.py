"""``rlstab list``: methods by the source of instability that they are against, stages by kind, presets, examples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import get_args

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rlstab.config.bundled_examples import Kind, examples
from rlstab.config.user_code import classes
from rlstab.core.batch import BASICS
from rlstab.core.compose import Composition
from rlstab.core.metadata import SOURCES, docstring, summary
from rlstab.core.method import Method
from rlstab.core.objective import TokenObjective
from rlstab.explain.costs import beyond_free
from rlstab.explain.sample import sample
from rlstab.explain.stage_cards import KINDS
from rlstab.explain.stage_words import has
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.stages.stage import Stage
from rlstab.zoo import METHODS


def listing_of_files(files: Sequence[str]) -> RenderableType:
    """What the classes of the user's own in some files do, as :func:`listing` says it of those that ship.

    Raises:
        ConfigError: a file cannot be loaded.
    """
    parts: list[RenderableType] = []
    for file in files:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(no_wrap=True)
        for cls in classes(file):
            told = summary(cls) if issubclass(cls, Method) else docstring(cls).partition("\n")[0]
            facts = "task"
            if issubclass(cls, TokenObjective):
                facts = f"method · {_facts(cls)}"
            elif issubclass(cls, Stage):
                facts = f"stage: {cls.kind} · {_stage_facts(cls)}"
            rows.add_row(escape(cls.__qualname__), f"{escape(told)}\n[dim]{escape(facts)}[/]")
        parts += [f"[bold]{escape(file)}[/]", Padding(rows, (0, 0, 1, 2))]
    return Group(*parts)


def listing() -> RenderableType:
    """What each method and stage does, reads, keeps and costs at its defaults, where it is from; presets, examples."""
    presets = Table.grid(padding=(0, 2))
    for name, one in PRESETS.items():
        assert isinstance(one.objective, Composition)
        names = [*one.objective.keyed, *(stage.name for stage in one.stages)]
        presets.add_row(name, escape(f"{one.about} {', '.join(names)}"))
    files = Table.grid(padding=(0, 2))
    for kind in get_args(Kind):
        files.add_row(kind, ", ".join(name for name, one in examples().items() if one.kind == kind))
    return Group(
        *_groups(),
        *_stages(),
        "[bold]presets[/]",
        Padding(presets, (0, 0, 1, 2)),
        "[bold]examples[/], for --example",
        Padding(files, (0, 0, 0, 2)),
    )


def _groups() -> Iterator[RenderableType]:
    methods = [METHODS.get(name) for name in METHODS.names()]
    width = max(map(len, METHODS.names()), default=0)
    for source, about in {**SOURCES, "": "against none of these sources"}.items():
        here = [cls for cls in methods if _first(cls) == source]
        if here:
            rows = Table.grid(padding=(0, 2))
            rows.add_column(min_width=width, no_wrap=True)
            for cls in here:
                rows.add_row(cls.name, f"{escape(summary(cls))}\n[dim]{escape(_facts(cls))}[/]")
            yield f"[bold]{source}[/]: {about}" if source else f"[bold]others[/]: {about}"
            yield Padding(rows, (0, 0, 1, 2))


def _stages() -> Iterator[RenderableType]:
    """The stages in the order in which a rollout runs through their kinds."""
    classes = [STAGES.get(name) for name in STAGES.names()]
    width = max(map(len, STAGES.names()), default=0)
    for kind, (head, _) in KINDS.items():
        here = [cls for cls in classes if issubclass(cls, kind)]
        if here:
            rows = Table.grid(padding=(0, 2))
            rows.add_column(min_width=width, no_wrap=True)
            for cls in here:
                rows.add_row(cls.name, f"{escape(summary(cls))}\n[dim]{escape(_stage_facts(cls))}[/]")
            yield f"[bold]stages: {kind.kind}[/]: {head[0].lower()}{head[1:]}"
            yield Padding(rows, (0, 0, 1, 2))


def _stage_facts(cls: type[Stage]) -> str:
    """One line; of a stage that cannot be made without knowing its settings, only what the class says."""
    told = []
    stage = sample(cls)
    if stage is not None:
        told.append(f"reads {', '.join(sorted(stage.needs)) or 'the basics'}")
        told.append(f"state: {', '.join(stage.init_state())}" if stage.init_state() else "no state")
        costs: dict[str, list[str]] = {}
        for name in sorted(stage.needs):
            costs.setdefault(has(stage, name), []).append(name)
        told += [f"{', '.join(names)}: {cost}" for cost, names in costs.items() if not cost.startswith("free")]
    return " · ".join(told + _arxiv(cls))


def _arxiv(cls: type) -> list[str]:
    numbers = re.findall(r"arXiv (\d{4}\.\d{5})", docstring(cls).rpartition("Source:")[2])
    return [f"arXiv {', '.join(dict.fromkeys(numbers))}"] if numbers else []


def _first(cls: type[TokenObjective]) -> str:
    """The source under which it is listed."""
    return next((source for source in SOURCES if source in cls.about.addresses), "")


def _facts(cls: type[TokenObjective]) -> str:
    """One line; of a method that cannot be made without knowing its settings, only what the class says."""
    told = []
    method = sample(cls)
    if method is not None:
        live = [f"live {name}" for name in sorted(method.live_needs)]
        told.append(f"reads {', '.join([*sorted(method.needs - BASICS), *live]) or 'the basics'}")
        told.append(f"state: {', '.join(method.init_state())}" if method.init_state() else "no state")
        told.append("; ".join(beyond_free(method)) or "free")
    others = [source for source in SOURCES if source in cls.about.addresses and source != _first(cls)]
    told += [f"also {', '.join(others)}"] if others else []
    return " · ".join(told + _arxiv(cls))
