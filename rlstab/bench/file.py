"""A bench file: methods x settings x seeds over one base run.

::

    name: entropy
    base: countdown.yaml                  # or the run itself
    methods:
      grpo: {name: clip_higher, high: 0.2}
      dapo: {preset: dapo}
      slow: {objective: [clip_higher, s2t], set: {optimisation.lr: 1.0e-4}}
    settings:
      lr-1e-4: {optimisation.lr: 1.0e-4}
      lr-2e-4: {optimisation.lr: 2.0e-4}
    seeds: 5
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from rlstab.bench import launch
from rlstab.bench.launch import Launch, launch_of, template_of
from rlstab.config.allowed_changes import run_hash
from rlstab.config.document import Document, Keys, shown
from rlstab.config.runs import RunConfig, build_run
from rlstab.config.settings import OTHER_MODELS, CollapseRule, Count, Settings
from rlstab.config.user_code import located
from rlstab.config.validation import mistakes_of, require_kind, validate
from rlstab.errors import ConfigError, RlstabError, did_you_mean
from rlstab.tasks.build import require_loadable
from rlstab.tasks.rewards import require_functions

#: Pattern of names, which are also names of folders.
NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,99}")

#: The setting of a bench without settings.
DEFAULT = "default"

#: The largest number of runs of one bench: each is loaded and kept in memory before the first one starts.
MAX_RUNS = 100_000

#: Number of names that an error or a note lists.
SHOWN = 6

Seeds = Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)]


class BenchFile(Settings):
    """The content of a bench file."""

    name: str = Field(description="letters, digits and _ . + -; the folder is runs/<name>")
    about: str = Field("", description="what it asks and what to know about its figures; reports begin with it")
    out: str | None = Field(None, description="folder of the bench; null is runs/<name>")
    base: Any = Field(
        None, description="the run that all methods share, or the path of its file from this file's folder"
    )
    command: str | None = Field(
        None,
        description="in place of base: starts a run of another trainer. {objective}, {seed} and {out} are filled in",
    )
    config: str | None = Field(None, description="file that is filled in likewise; {config} in the command is its path")
    methods: dict[str, Any] = Field({}, description="objectives by name, or {objective: ..., set: {key: value}}")
    baseline: str | None = Field(None, description="the method that the others are compared with; null is the first")
    settings: dict[str, dict[str, JsonValue]] = Field({}, description="values by dotted key, such as optimisation.lr")
    seeds: Seeds = Field(5, description="number of seeds, from 0; or a list of them")
    workers: Count | None = Field(None, description="runs at a time; null is one per CPU, and with a command one")
    stack: list[Any] = Field([], description="methods of which every one is left out, or added to the base, in turn")
    ablate: Literal["leave_one_out", "add_one_in", "both"] | None = Field(None, description="ablation of the stack")
    collapse: CollapseRule | None = Field(
        None, description="when the report calls a run lost, such as {below: 0.5, of: peak}; null is its own definition"
    )
    slurm: dict[str, JsonValue] = Field(
        {}, description="settings of slurm jobs, as in submitit: time in minutes, partition, gpus_per_node, ..."
    )
    keep_checkpoints: bool = Field(False, description="keep the final checkpoint of a finished run")


class MethodEntry(Settings):
    """A method with its objective and further settings of the run."""

    objective: Any = Field(None, description="objective as in a run file; null is the base's")
    set: dict[str, JsonValue] = Field({}, description="values by dotted key, in place of those of each setting")
    scale: dict[str, float] = Field({}, description="factors by dotted key, on the numbers of each setting")


@dataclass(frozen=True, eq=False)
class BenchRun:
    """One run of a bench.

    Attributes:
        folder: the folder of the run.
        config: the whole run, with its folder as ``tracking.out``; or the command that makes it.
    """

    setting: str
    method: str
    seed: int
    folder: Path
    config: RunConfig | Launch

    @classmethod
    def of(cls, config: RunConfig | Launch, out: Path, setting: str, method: str, seed: int) -> BenchRun:
        """The run of a method in a setting, with its seed and its folder in that of the bench."""
        folder = out / "runs" / setting / method / f"seed-{seed}"
        if isinstance(config, Launch):
            return cls(setting, method, seed, folder, replace(config, seed=seed))
        changes: dict[str, Any] = {"out": str(folder)}
        if "checkpoint_every" not in config.tracking.model_fields_set:
            changes["checkpoint_every"] = 0  # runs of a bench are short, and a finished one needs no checkpoint
        tracking = config.tracking.model_copy(update=changes)
        return cls(setting, method, seed, folder, config.model_copy(update={"seed": seed, "tracking": tracking}))

    @property
    def name(self) -> str:
        """``setting/method/seed-0``, also its path under ``runs/``."""
        return f"{self.setting}/{self.method}/seed-{self.seed}"

    @property
    def training(self) -> RunConfig:
        """The whole run, if rlstab's trainer makes it."""
        assert isinstance(self.config, RunConfig)
        return self.config

    @property
    def rollouts(self) -> int:
        """Its number of rollouts; 1 for a command, whose length is unknown."""
        return 1 if isinstance(self.config, Launch) else self.config.optimisation.rollouts

    @property
    def settings(self) -> dict[str, Any]:
        """The content of ``config.yaml`` in its folder, as plain data."""
        return self.config.settings if isinstance(self.config, Launch) else self.config.model_dump(mode="json")

    @cached_property
    def hash(self) -> str:
        """See :func:`rlstab.config.run_hash`."""
        return _hash(self.config)


@dataclass(frozen=True)
class Bench:
    """A checked bench.

    Attributes:
        file: its content, with the base in place, the stack expanded, the baseline named and the seeds listed.
        out: the folder of the bench.
        moved: whether this is another folder than the file names.
        source: path of the file, or empty.
        workers: runs at a time.
        runs: all runs in the order in which they start: seed by seed, so that a part of a bench is balanced.
        notes: what a reader of the comparison should know: methods or settings that are equal, names that one folder
            may hold.
        again: the command to continue, if it is not ``rlstab bench``; such a bench has no file.
    """

    file: BenchFile
    out: Path
    moved: bool
    source: str
    workers: int
    runs: tuple[BenchRun, ...]
    notes: tuple[str, ...]
    again: str = ""

    @property
    def resolved(self) -> dict[str, Any]:
        """The file as plain data without shared parts; loads to the same bench."""
        unused = {"base"} if self.file.command else {"command", "config"}
        return self.file.model_dump(mode="json", exclude={"stack", "ablate", *unused})


def load_bench(source: str | Path | Mapping[str, Any], *, out: str | Path | None = None) -> Bench:
    """A checked bench: the stack expanded, every run of it loaded.

    Args:
        source: path of a YAML file, or the mapping that it would hold (``base`` is then relative to this folder).
        out: folder to use instead of the file's.

    Raises:
        ConfigError: every mistake of the file and of its runs, with file and line.
    """
    document = Document.read(source) if isinstance(source, str | Path) else Document(source)
    require_kind(document, "bench")
    document = located(document)
    file = validate(document, BenchFile, dict(document.data))
    folder = Path(document.name).parent
    base = _base(document, file, folder)
    methods = _methods(document, file, base)
    settings = {name: _values(document, ("settings", name)) for name in file.settings} or {DEFAULT: {}}
    for kind in ("methods", "settings"):
        for name in getattr(file, kind):
            _check_name(document, (kind, name), name)
    _check_name(document, ("name",), file.name)
    seeds = _seeds(document, file.seeds, len(methods) * len(settings))
    baseline = file.baseline or next(iter(methods))
    if baseline not in methods:
        raise document.error(("baseline",), f"no method is called '{baseline}'. {did_you_mean(baseline, methods)}")
    template = None
    if file.command is not None:
        keys = set().union(*settings.values(), *(method.set for method in methods.values()))
        template = template_of(document, file.command, file.config, keys, folder)
    loaded: dict[tuple[str, str], RunConfig | Launch] = {}  # every run without its seed
    mistakes: dict[str, list[str]] = {}  # all are reported at once
    for setting, method in product(settings, methods):
        try:
            # the method's values override, and its stages follow the setting's
            entry, values = methods[method], settings[setting]
            run, values_of_run = base.replaced("objective", entry.objective), {**values, **entry.set}
            for key in sorted(values_of_run, key=lambda key: key.count(".")):  # a section before its keys
                joins_stages = key == "stages" and key in entry.set and key in values
                value = Document.joined([values[key], entry.set[key]]) if joins_stages else values_of_run[key]
                run = run.replaced(key, value)
            for key, factor in entry.scale.items():
                run = _scaled(document, run, key, factor, ("methods", method, "scale", key))
            if template is not None:
                loaded[setting, method] = launch_of(template, document, run)
                continue
            config = loaded[setting, method] = build_run(run)
            require_loadable(config.task)
            require_functions(config.reward)
        except RlstabError as error:
            for text in mistakes_of(error):
                mistakes.setdefault(text, []).append(f"{setting}/{method}")
    if mistakes:
        combinations = len(methods) * len(settings)
        lines = [
            text if len(names) == combinations else f"{text}\n  in {few(names)}" for text, names in mistakes.items()
        ]
        raise ConfigError("\n".join(lines))
    out_folder = Path(out or file.out or f"runs/{file.name}")
    runs = tuple(
        BenchRun.of(loaded[setting, method], out_folder, setting, method, seed)
        for seed, setting, method in product(seeds, settings, methods)
    )
    resolved = {
        "out": str(out_folder),
        "base": base.data,
        "config": file.config and str((folder / file.config).absolute()),
        "methods": {
            name: {"objective": entry.objective.data, "set": _plain(entry.set), "scale": entry.scale}
            for name, entry in methods.items()
        },
        "baseline": baseline,
        "settings": {name: _plain(values) for name, values in settings.items()},
        "seeds": list(seeds),
    }
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers, notes = file.workers or (1 if template else processors), tuple(_alike(methods, settings, loaded))
    return Bench(file.model_copy(update=resolved), out_folder, out is not None, document.name, workers, runs, notes)


def _plain(values: Mapping[str, Document]) -> dict[str, Any]:
    return {key: value.data for key, value in values.items()}


@dataclass(frozen=True)
class _Method:
    objective: Document
    set: dict[str, Document]
    scale: dict[str, float]


def _base(document: Document, file: BenchFile, folder: Path) -> Document:
    """The run that all methods share; for a command, a method without an objective."""
    if file.command is not None:
        if file.base is not None:
            raise document.error(("base",), "a bench has a base or a command. Remove one of them.")
        return Document({}, document.name, {})
    if file.config is not None:
        raise document.error(("config",), "there is no command that reads it. Name it in the base.")
    if "base" not in document.data:
        text = "the key `base` is missing. Give the run that all methods share, or the `command` of another trainer."
        raise document.error((), text)
    if isinstance(file.base, Mapping):
        return document.part(("base",))
    if not isinstance(file.base, str):
        text = f"expected a run, or the path of a run file, not {shown(file.base)}."
        raise document.error(("base",), text)
    try:
        run = Document.read(folder / file.base)
    except ConfigError as error:
        raise document.error(("base",), str(error)) from error
    if not isinstance(run.data, Mapping):
        raise run.error((), "a run is a mapping with the keys model, task, rollout, objective, optimisation, ...")
    return located(run)


def _methods(document: Document, file: BenchFile, base: Document) -> dict[str, _Method]:
    base_objective = base.part(("objective",)) if "objective" in base.data else None
    default = base_objective if file.command is None else Document([], document.name, {})  # a command may take none
    methods = {name: _method(document, name, default) for name in file.methods}
    if file.ablate and not file.stack:
        raise document.error(("ablate",), "there is no stack to ablate. List its methods under `stack`.")
    if file.stack:
        for name, objective in _ablations(document, base_objective, file.ablate or "both").items():
            if name in methods:
                raise document.error(("methods", name), "the stack makes a method of this name too. Rename this one.")
            methods[name] = _Method(objective, {}, {})
    if not methods:
        raise document.error(("methods",), "nothing to compare. Name objectives under `methods`, or list a `stack`.")
    return methods


def _ablations(
    document: Document, base: Document | None, mode: Literal["leave_one_out", "add_one_in", "both"]
) -> dict[str, Document]:
    """Objectives by name: ``base``, ``all``, ``base-plus-s2t``, ``all-minus-s2t``, ...

    The base's objective is a part of all of them; without one there is no ``base``, and ``base-plus-s2t`` is only s2t.
    Equal objectives appear once, under the name that is first above: for a stack of two, ``all`` without one
    equals the base with the other.

    Args:
        document: a bench file; its ``stack`` is a list of methods.
        base: the objective of the base run, or None.
        mode: ``add_one_in`` makes ``base-plus-*``, ``leave_one_out`` makes ``all-minus-*``, always with ``base`` and
            ``all``.

    Raises:
        ConfigError: two items have the same name.
    """
    items: dict[str, Document] = {}
    for index, item in enumerate(document.data["stack"]):
        # mistakes in the item are found when it is loaded
        name = str(item.get("preset", item.get("name")) if isinstance(item, Mapping) else item)
        path = "stack", index
        if name in items:
            raise document.error(path, f"two methods of the stack are called '{name}'. Remove one of them.")
        items[name] = document.part(path)
    all_names = frozenset(items)
    chosen = {"base": frozenset[str](), "all": all_names}
    if mode in ("add_one_in", "both"):
        chosen |= {f"base-plus-{name}": frozenset({name}) for name in items}
    if mode in ("leave_one_out", "both"):
        chosen |= {f"all-minus-{name}": all_names - {name} for name in items}
    objectives: dict[str, Document] = {}
    made_sets: set[frozenset[str]] = set() if base else {frozenset()}
    for label, names in chosen.items():
        if names not in made_sets:
            made_sets.add(names)
            parts = [base] if base else []
            objectives[label] = Document.joined([*parts, *(item for name, item in items.items() if name in names)])
    return objectives


def _method(document: Document, name: str, base_objective: Document | None) -> _Method:
    path = ("methods", name)
    entry = document.data["methods"][name]
    if not isinstance(entry, Mapping) or entry.keys() & {"name", "preset"}:
        return _Method(document.part(path), {}, {})
    checked = validate(document, MethodEntry, dict(entry), path)
    if "objective" in entry:
        objective = document.part((*path, "objective"))
    elif base_objective is not None:
        objective = base_objective
    else:
        raise document.error(path, "the key `objective` is missing, and the base has none to take instead.")
    for key in checked.scale:
        _free(document, key, (*path, "scale", key))
    return _Method(objective, _values(document, (*path, "set")) if checked.set else {}, checked.scale)


def _values(document: Document, path: Keys) -> dict[str, Document]:
    """Values by dotted key; keys that the bench sets itself are refused."""
    values = document.part(path)
    return {key: values.part((_free(document, key, (*path, key)),)) for key in values.data}


#: Settings that a bench decides itself, by the first part of a dotted key.
DECIDED = {
    "seed": "the bench gives each run its seed. List them under `seeds`.",
    "objective": "an objective is a method of the bench. Name it under `methods`.",
    "tracking": "the bench decides where its runs are kept. Set tracking in the base.",
    "model": "all runs of a bench start from one model. Set it in the base.",
}
#: Settings of the model that leave its start as it is.
OTHER_POLICIES = {"model.teacher_prompt", *(f"model.{name}" for name in OTHER_MODELS.values())}


def _free(document: Document, key: str, path: Keys) -> str:
    if document.data.get("command") is not None:
        if key in launch.RESERVED or not launch.NAME.fullmatch(key):
            text = f"{shown(key)} cannot name a value: a name begins with a letter, and the bench gives "
            raise document.error(path, f"{text}{', '.join(launch.RESERVED)} itself. Call it something else.")
        return key
    head, _, rest = key.partition(".")
    if head in DECIDED and key not in OTHER_POLICIES:
        raise document.error(path, DECIDED[head])
    if not rest and head in RunConfig.model_fields.keys() - {"task", "stages"}:
        raise document.error(path, f"this would replace all of {head}. Write dotted keys, for example {head}.KEY.")
    return key


def _check_name(document: Document, path: Keys, name: str) -> None:
    if not NAME.fullmatch(name):
        text = f"{shown(name)} cannot name a folder. Use up to 100 letters, digits and _ . + -, and no dot in front."
        raise document.error(path, text)


def _seeds(document: Document, seeds: int | list[int], runs: int) -> tuple[int, ...]:
    """The seeds of a bench that makes ``runs`` runs with one seed."""
    count = seeds if isinstance(seeds, int) else len(seeds)
    if count > MAX_RUNS // runs:
        text = f"{shown(count)} seeds x {runs} runs are too many: a bench has at most {MAX_RUNS}. Take fewer seeds."
        raise document.error(("seeds",), text)
    if isinstance(seeds, int):
        return tuple(range(seeds))
    for index, seed in enumerate(seeds):
        if seed in seeds[:index]:
            raise document.error(("seeds", index), f"the seed {seed} appears twice. Remove one of them.")
    return tuple(seeds)


def _scaled(document: Document, run: Document, key: str, factor: float, keys: Keys) -> Document:
    """The run with one of its numbers scaled; a number in the key is an index in a list, such as a stage's."""
    path = tuple(int(step) if step.isdecimal() else step for step in key.split("."))
    value, data = None, copy.deepcopy(run.data)
    with suppress(KeyError, IndexError, TypeError):
        value = run.part(path).data
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise document.error(keys, f"{key} is not a number here, so it cannot be scaled. Set it, or correct the key.")
    scaled, container = factor * value, reduce(getitem, path[:-1], data)
    container[path[-1]] = int(scaled) if isinstance(value, int) and scaled.is_integer() else scaled
    return Document(data, run.name, run.marks)


def _alike(
    methods: Iterable[str], settings: Iterable[str], loaded: Mapping[tuple[str, str], RunConfig | Launch]
) -> Iterator[str]:
    """Sentences about settings and methods that are the same, and about names that differ only in case."""
    hashes = {key: _hash(config) for key, config in loaded.items()}
    of_settings = {setting: tuple(hashes[setting, method] for method in methods) for setting in settings}
    of_methods = {method: tuple(hashes[setting, method] for setting in settings) for method in methods}
    for kind, contents in (("settings", of_settings), ("methods", of_methods)):
        for names in _groups(contents, contents.__getitem__):
            yield f"the {kind} {', '.join(names)} are the same: their runs differ only in name."
        for names in _groups(contents, str.lower):
            yield f"the {kind} {', '.join(names)} differ only in case: some file systems keep them in one folder."


def _groups(names: Iterable[str], key: Callable[[str], Any]) -> list[list[str]]:
    """Groups of at least two names with the same key."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def few(names: Sequence[str]) -> str:
    """The first names, and the number of others."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _hash(run: RunConfig | Launch) -> str:
    return run.hash if isinstance(run, Launch) else run_hash(run)
