"""``rlstab check``: what each method of a file does, needs and costs, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rlstab.config import Document, load_objective, load_run, objective_hash, run_hash
from rlstab.config.runs import RunConfig
from rlstab.console import Terminal
from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import Composition, Observe, walk
from rlstab.core.metadata import summary
from rlstab.core.objective import TokenObjective, active_methods, unmet
from rlstab.explain import stage_words
from rlstab.explain.costs import COSTS
from rlstab.explain.host_table import host_table
from rlstab.explain.idle import idle_in_run, repeated, unsafe
from rlstab.explain.interactions import interactions
from rlstab.hosts import adapted
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.pipeline import unmet as stages_unmet


def check(path: str, overrides: Mapping[str, Any], console: Console | None = None, *, host: str | None = None) -> None:
    """Print what a file means, for rlstab's own trainer or a host; what cannot run raises what the trainer would raise.

    Raises:
        ConfigError, Conflict: see :func:`rlstab.config.load_run`.
        UnknownName: no adapter ships for the host.
        MissingSignal: the host cannot give what a method reads.
        ConfigError: the host's own loss stays, and no mask and no advantages can say what a method asks for.
    """
    console = console or Terminal()
    objective, run = read(path, overrides)
    if host is not None:
        console.print(host_table(objective, adapted(host)))
        adapted(host).require(objective)
        verb = "train" if adapted(host).package else "express"
        console.print(f"objective {objective_hash(objective)}: {adapted(host).name} can {verb} it")
        return
    console.print(describe(objective))
    if run is not None:
        console.print(describe_stages(run.pipeline))
        optimisation = run.optimisation
        console.print(
            f"advantage: {run.pipeline.estimator.name}; ratio against: {optimisation.old_logprobs}; "
            f"{optimisation.optimizer_steps_per_rollout} optimizer step(s) per rollout of {run.rollout.prompts} x "
            f"{run.rollout.group} responses"
        )
    for note in notes(objective, run):
        console.print(f"[yellow]note:[/] {escape(note)}")
    console.print(
        f"objective {objective_hash(objective)}" + (f", run {run_hash(run)}" if run else "") + ": no conflict"
    )


def read(path: str, overrides: Mapping[str, Any]) -> tuple[Composition, RunConfig | None]:
    """What a file holds: a run and its objective, or an objective alone.

    Raises:
        ConfigError, Conflict: see :func:`rlstab.config.load_run`.
    """
    data = Document.read(path).data
    is_run = isinstance(data, Mapping) and data.keys() != {"objective"} and not data.keys() & {"name", "preset"}
    run = load_run(path, overrides) if is_run or overrides else None
    return (run.composition if run else load_objective(path)), run


def describe(objective: Composition) -> RenderableType:
    """A table: one row per method, with its effect, settings, what it reads and what that costs."""
    table = Table(show_lines=True)
    for column in ("method", "what it does to tokens", "settings", "reads", "writes"):
        table.add_column(column, overflow="fold")
    for key, method in objective.keyed.items():
        table.add_row(key, *map(escape, (_effect(method), _settings(method), _reads(method), _writes(method))))
    signals = sorted(objective.needs - BASICS)
    lines = [
        f"needs {name}: {SIGNALS.get(name, 'a signal of your own')}; {COSTS.get(name, 'yours to provide')}"
        for name in signals
    ]
    lines += [f"differentiates {name} of the live policy" for name in sorted(objective.live_needs)]
    return Group(table, *lines)


def describe_stages(pipeline: Pipeline) -> RenderableType:
    """A table: one row per stage in the order of a rollout, with what it does and needs; then whose that is."""
    table = Table(show_lines=True)
    for column in ("stage", "acts on", "what it does", "needs", "keeps"):
        table.add_column(column, overflow="fold")
    for one in pipeline:
        cells = (one.kind, one.in_words(), ", ".join(sorted(one.needs)) or "basics only", ", ".join(one.init_state()))
        table.add_row(one.name, *map(escape, cells))
    lines = [
        f"needs {name}, for {one.name}: {escape(stage_words.has(one, name))}"
        for one in pipeline
        for name in sorted(one.needs)
    ]
    return Group(table, *lines)


def notes(objective: Composition, run: RunConfig | None) -> list[str]:
    """What a user would want to be told: methods that cannot act, and pairs that pull against each other."""
    of_run = [*unsafe(objective, run), *idle_in_run(objective, run), *stage_words.lacking(run.pipeline)] if run else []
    pulling = [text for kind, text in interactions(objective) if kind in ("conflicts", "redundant")]
    published = unmet(objective) + (
        stages_unmet(run.pipeline, [one.name for one in active_methods(objective)]) if run else []
    )
    return of_run + repeated(objective) + published + [text.replace("`", "") for text in pulling]


def _effect(method: TokenObjective) -> str:
    only = "Only observed: " if isinstance(method, Observe) else ""
    leaves = walk(method, observed=True)
    told = (("Among the tokens left: " if leaf.around else "") + summary(type(leaf.method)) for leaf in leaves)
    return only + " ".join(told)


def _settings(method: TokenObjective) -> str:
    return repr(method).partition("(")[2].removesuffix(")") or "none"


def _reads(method: TokenObjective) -> str:
    return ", ".join(sorted((method.needs - BASICS) | {f"live {name}" for name in method.live_needs})) or "basics only"


def _writes(method: TokenObjective) -> str:
    return ", ".join(sorted(method.writes))
