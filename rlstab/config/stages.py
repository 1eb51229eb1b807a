"""Stages in YAML: a list of what acts outside the loss, each by its name with its settings.

::

    stages:
      - {name: goldilocks, pool: 256}   # which prompts
      - overlong                        # reward shapers, any number
      - {name: grpo, std: false}        # the advantage
      - {name: deep_grpo, branches: 4}  # more responses
      - {name: stages.py:Thirds}        # a class in a file of one's own

What a run does not name is ``in_order`` and ``grpo``, or what its presets bring. ``advantage: {estimator: rloo}`` is
a shorter way to write the stage ``rloo``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlstab.config.document import Document, Place, shown
from rlstab.config.methods import made, settings_as_yaml
from rlstab.config.own_code import is_own, load_method, name_in_yaml
from rlstab.errors import Conflict, UnknownName
from rlstab.presets import Preset
from rlstab.stages import STAGES
from rlstab.stages.pipeline import Pipeline, check_exclusions
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, Stage
from rlstab.zoo import METHODS


class AdvantageSettings(BaseModel):
    """The advantage estimator, in the short way."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    std: bool = Field(True, description="grpo: divide by the group's standard deviation")
    epsilon: Annotated[float, Field(gt=0)] = Field(1e-4, description="grpo: added to it")
    ddof: Literal[0, 1] = Field(1, description="grpo: 1 divides squares by n - 1")


def build_stages(document: Document, recipes: Sequence[Preset], methods: Iterable[str]) -> Pipeline:
    """The stages under the keys ``stages`` and ``advantage`` of a run, and those of its presets.

    Args:
        document: a mapping.
        recipes: the presets of its objective; the run's own stages come before theirs.
        methods: names of the methods in its objective.

    Raises:
        ConfigError: with file and line.
        Conflict: stages that do not fit together, or presets that bring different ones.
    """
    own = [_stage(document, item, place) for item, place in _items(document)]
    short, explicit = _short(document)
    named = next((one for one in own if isinstance(one, AdvantageEstimator)), None)
    if explicit and named is not None:
        text = f"the stage '{named.name}' estimates the advantages already. Remove one of them."
        raise Conflict(document.text(("advantage",), text))
    try:
        own += [short] if explicit else []
        stages = own + _brought(recipes, own, short)
        if not any(isinstance(one, AdvantageEstimator) for one in stages):
            stages.append(short)
        pipeline = Pipeline.of(*stages)
        check_exclusions(stages, dict.fromkeys(methods, "method"))
        _refuse_unused(document, pipeline.estimator)
    except Conflict as error:
        raise Conflict(
            document.text(("stages",) if "stages" in document.data else ("objective",), str(error))
        ) from None
    return pipeline


def dump_stages(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The canonical form: every stage with every setting, in the order in which a rollout runs through them."""
    return [{"name": name_in_yaml(one), **settings_as_yaml(one)} for one in pipeline]


def _stage(document: Document, item: Any, place: Place) -> Stage:
    if isinstance(item, str):
        item = {"name": item}
    if not isinstance(item, Mapping):
        raise document.error(place, f"expected a stage, for example {{name: overlong}}, not {shown(item)}.")
    if "name" not in item:
        raise document.error(place, "a stage needs its `name`.")
    name = item["name"]
    if not isinstance(name, str):
        raise document.error((*place, "name"), f"expected the name of a stage, not {shown(name)}.")
    settings = {key: item[key] for key in item if key != "name"}
    if is_own(name):
        cls = load_method(document, name, (*place, "name"), STAGES, Stage, "stage")
        return made(document, cls, settings, place)
    try:
        cls = STAGES.get(name)
    except UnknownName as error:
        other = f"no stage is called '{name}', it is a method of the loss: list it under `objective`."
        raise document.error((*place, "name"), other if name in METHODS.names() else str(error)) from error
    return made(document, cls, settings, place)


def _items(document: Document) -> list[tuple[Any, Place]]:
    given = document.data.get("stages")
    if isinstance(given, list | tuple):
        return [(one, ("stages", index)) for index, one in enumerate(given)]
    return [] if given is None else [(given, ("stages",))]


def _short(document: Document) -> tuple[AdvantageEstimator, bool]:
    """The stage that ``advantage`` describes, and whether it names an estimator; else it holds settings of ``grpo``."""
    data = document.data.get("advantage", {})
    checked = document.validate(AdvantageSettings, data, ("advantage",))
    assert isinstance(checked, AdvantageSettings)
    settings = checked.model_dump(exclude={"estimator"}) if checked.estimator == "grpo" else {}
    stage = STAGES.get(checked.estimator)(**settings)
    assert isinstance(stage, AdvantageEstimator)
    return stage, "estimator" in data


def _refuse_unused(document: Document, estimator: AdvantageEstimator) -> None:
    """Settings of ``grpo`` under ``advantage`` would do nothing where another stage makes the advantages."""
    unused = [key for key in document.data.get("advantage", {}) if key != "estimator"]
    if unused and estimator.name != "grpo":
        raise document.error(
            ("advantage", unused[0]),
            f"a setting of grpo, but '{estimator.name}' estimates the advantages. Remove it, or use grpo.",
        )


def _brought(recipes: Sequence[Preset], own: Sequence[Stage], short: AdvantageEstimator) -> list[Stage]:
    """What the presets bring, less what the run says itself: a stage of that name, or of a kind that a run has once.

    An estimator that the presets bring by its name has the settings of ``short``, if that is the same one.
    """
    taken = {one.name for one in own}
    once = tuple(kind for kind in (PromptSelector, AdvantageEstimator) if any(isinstance(one, kind) for one in own))
    estimators = sorted({recipe.estimator for recipe in recipes})
    if len(estimators) > 1 and AdvantageEstimator not in once:
        raise Conflict(
            f"the presets use different advantage estimators: {', '.join(estimators)}.\n  Say which with advantage: "
            f"{{estimator: ...}}."
        )
    brought: dict[str, Stage] = {}
    for one in (
        *(stage for recipe in recipes for stage in recipe.stages),
        *(short if name == short.name else STAGES.get(name)() for name in estimators),
    ):
        if one.name in taken or isinstance(one, once):
            continue
        if brought.setdefault(one.name, one) != one:
            raise Conflict(f"the presets bring '{one.name}' with different settings. Name it under `stages`.")
    return list(brought.values())
