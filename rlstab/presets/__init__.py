"""Named compositions: the recipes of ``presets.yaml``, each value with its source."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rlstab.core.compose import Composition, compose, within
from rlstab.core.objective import TokenObjective
from rlstab.errors import UnknownName, did_you_mean
from rlstab.stages import STAGES
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.stage import Stage
from rlstab.zoo import METHODS

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True)
class Preset:
    """One recipe.

    Attributes:
        objective: the loss of the recipe.
        estimator: the stage that makes the advantages, with its defaults.
        about: what it is, one sentence.
        sources: ``method.setting`` to where the value comes from, for every setting of the objective and the stages.
        stages: what it does outside the loss, apart from the estimator.
    """

    objective: Composition
    estimator: str
    about: str
    sources: Mapping[str, str] = field(repr=False)
    stages: tuple[Stage, ...] = ()

    @property
    def pipeline(self) -> Pipeline:
        """What it does outside the loss."""
        return Pipeline.of(*self.stages, STAGES.get(self.estimator)())


class _Presets(Mapping[str, Preset]):
    """Recipes by name, in the order of the file. The file is read, and a recipe made, when it is first asked for."""

    def __getitem__(self, name: str) -> Preset:
        return _made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_table())

    def __len__(self) -> int:
        return len(_table())


#: Recipes by name.
PRESETS: Mapping[str, Preset] = _Presets()


def preset(name: str) -> Preset:
    """The recipe of this name.

    Raises:
        UnknownName: with the nearest known name.
    """
    if name not in PRESETS:
        raise UnknownName(f"no preset is called '{name}'. {did_you_mean(name, PRESETS)}")
    return PRESETS[name]


@cache
def _table() -> Mapping[str, Any]:
    import yaml  # not needed without presets

    table: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"))
    return table


@cache
def _made(name: str) -> Preset:
    recipe = _table()[name]
    objective, stages = recipe["objective"], recipe.get("stages", {})
    methods: dict[str, TokenObjective] = {key: METHODS.get(key)(**_values(objective[key])) for key in objective}
    for inner, outer in recipe.get("within", {}).items():
        methods[inner] = within(methods.pop(outer), methods[inner])
    return Preset(
        objective=compose(*methods.values()),
        estimator=recipe["estimator"],
        about=recipe["about"],
        sources={
            f"{key}.{setting}": source.replace("{script}", recipe.get("script", ""))
            for key, settings in {**objective, **stages}.items()
            for setting, (_, source) in settings.items()
        },
        stages=tuple(STAGES.get(key)(**_values(settings)) for key, settings in stages.items()),
    )


def _values(settings: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    return {setting: value for setting, (value, _) in settings.items()}
