"""The rows of a map: a method, stage, preset, file or class, as a method of the bench of each probe."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstab.bench.file import NAME
from rlstab.config import Document, load_objective
from rlstab.config.objectives import at_defaults
from rlstab.config.runs import RunConfig
from rlstab.config.user_classes import load_class
from rlstab.config.user_code import is_user_code, located
from rlstab.core.compose import walk
from rlstab.core.method import Method
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError, Conflict, RlstabError, UnknownName, did_you_mean
from rlstab.presets import PRESETS
from rlstab.probe.suite import FIXED, START, Probe
from rlstab.stages import STAGES
from rlstab.stages.stage import Stage
from rlstab.zoo import METHODS


@dataclass(frozen=True)
class Row:
    """A row of the map.

    Attributes:
        name: the name of the row and of its folders.
        objective: items of an objective; empty for a stage.
        stages: items of stages.
        whole: whether the objective is complete, as a recipe is; else the base's objective is added.
    """

    name: str
    objective: tuple[Any, ...]
    stages: tuple[Any, ...] = ()
    whole: bool = False

    def _items(self, length: int) -> list[Any]:
        """The items of its objective, for responses of that length, which a single method may need as a setting."""
        is_method = self.name in METHODS.names() and self.objective == ({"name": self.name},)
        return [at_defaults(self.name, length)] if is_method else list(self.objective)

    def methods(self) -> list[TokenObjective]:
        """The methods of its objective."""
        items = self._items(1)
        return [leaf.method for leaf in walk(load_objective({"objective": items}))] if items else []

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of its methods and stages, then the sources that the methods address; a prediction may name any of
        them.
        """
        methods = self.methods()
        stages = [str(item.get("name") if isinstance(item, Mapping) else item) for item in self.stages]
        addressed = sorted({kind for method in methods for kind in method.about.addresses})
        return (*(method.name for method in methods), *stages, *addressed, *(["stage"] if stages else []))

    def entry(self, probe: Probe) -> dict[str, Any]:
        """The row as an entry under ``methods`` in the bench of a probe.

        A method joins the base's objective; if both fill the same slot, it replaces the base's clip. In a probe of
        stale or other samplers, the ratio of the base does not involve them (``recompute``). A row whose methods act by
        the ratio gets one that does (``rollout``), unless they compare sampler and trainer themselves.
        """
        base, set_here = probe.bench["base"], dict[str, Any]()
        if self.stages:
            set_here["stages"] = list(self.stages)
        drift = {compared for method in self.methods() for compared in method.reads_drift}
        blind = base["optimisation"]["old_logprobs"] == "recompute"
        if blind and "live" in drift and not drift & {"sampler", "start"}:
            set_here["optimisation.old_logprobs"] = "rollout"
        items = self._items(base["rollout"]["max_new_tokens"])
        return {"objective": self._joined(base["objective"], items) if items else base["objective"], "set": set_here}

    def _joined(self, base: list[Any], items: list[Any]) -> list[Any]:
        if self.whole:
            return items
        all_items = [*base, *items]
        for tried in (all_items, ["token_mean", *items], items):
            with suppress(Conflict):
                load_objective({"objective": tried})
                return tried
        return all_items  # the bench then reports the conflict


def row(source: str) -> Row:
    """The row for an argument of the command line.

    Args:
        source: a preset, a method, a stage, a YAML file with an objective (and stages), or ``path/to/file.py:Class``.
            A name that a preset and a method share means the preset.

    Raises:
        UnknownName: it is none of these.
        ConfigError: the file cannot be read, or has no objective.
    """
    if is_user_code(source):
        return _of_class(source)
    if source.endswith((".yaml", ".yml")):
        return _of_file(source)
    if source in PRESETS:
        return Row(source, ({"preset": source},), whole=True)
    if source in METHODS.names():
        return Row(source, ({"name": source},))
    if source in STAGES.names():
        return Row(source, (), ({"name": source},))
    names = {*PRESETS, *METHODS.names(), *STAGES.names()}
    raise UnknownName(f"no preset, method or stage is called '{source}'. {did_you_mean(source, names)}")


def rows(sources: Sequence[str]) -> list[Row]:
    """See :func:`row`.

    Raises:
        ConfigError: two rows have the same name, a name is that of a fixed row or cannot name a folder, or the methods
            of a row cannot be made.
    """
    rows_by_name = dict[str, Row]()
    for text in sources:
        if text in FIXED:
            raise ConfigError(f"'{text}' is a row of every map already. Leave it out.")
        line = row(text)
        if line.name in rows_by_name or line.name in {*FIXED, START}:
            raise ConfigError(f"{text}: another row is called '{line.name}'. Leave one out, or rename this one.")
        if not NAME.fullmatch(line.name):
            raise ConfigError(f"{text}: its name names a folder too. Use letters, digits and _ . + -.")
        try:
            line.methods()  # mistakes in them are reported here, before any run
        except RlstabError as error:
            raise ConfigError(f"{text}: {error}") from error
        rows_by_name[line.name] = line
    return list(rows_by_name.values())


def _of_class(source: str) -> Row:
    document = located(Document({"class": source}))
    text: str = document.data["class"]
    cls = load_class(document, text, ("class",), "a method or a stage", "Name a class of either.")
    if not issubclass(cls, Method):
        raise ConfigError(f"{source} is neither a method nor a stage. Name a class of either.")
    stage, item = issubclass(cls, Stage), ({"name": text},)
    return Row(cls.__name__, () if stage else item, item if stage else ())


def _of_file(source: str) -> Row:
    document = located(Document.read(source))
    data = document.data if isinstance(document.data, Mapping) else {"objective": document.data}
    data = {"objective": data} if data.keys() & {"name", "preset"} else data
    for key in data:
        if key not in RunConfig.model_fields:
            raise document.error((key,), f"unknown key '{key}'. {did_you_mean(str(key), RunConfig.model_fields)}")
    parts = [data.get("objective") or [], data.get("stages") or []]
    objective, stages = (tuple(part) if isinstance(part, list | tuple) else (part,) for part in parts)
    if not objective and not stages:
        raise document.error((), "the key `objective` is missing. List the methods to probe there.")
    return Row(Path(source).stem, objective, stages, whole=bool(objective))
