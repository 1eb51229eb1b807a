"""``rlstab init``: a run file with every setting and a comment on each, from the code."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from rich.console import Group, RenderableType

from rlstab.config import load_run
from rlstab.config.bundled_examples import example, examples
from rlstab.config.document import flow
from rlstab.config.objectives import dump_objective, dump_stages
from rlstab.config.runs import RunConfig
from rlstab.config.settings import TaskSettings
from rlstab.core.metadata import card, summary
from rlstab.core.method_settings import settings_of
from rlstab.errors import UnknownName, did_you_mean
from rlstab.explain.catalogue import blocks
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.zoo import METHODS

#: Columns of a file, and the one in which comments begin.
WIDTH, COLUMN = 118, 36

#: The run that a preset is put into, since a preset has neither a model nor data nor a schedule.
AROUND = "countdown"

_COMBINED = {
    "within": "the inner methods see only the tokens that the outer ones keep",
    "observe": "measured and reported, without effect",
}

#: A line of YAML and its comment; a line without text is a blank one.
Line = tuple[str, str]


def recipes() -> dict[str, str]:
    """Name and one line of every recipe: the examples of runs, and the presets that no example is named after."""
    runs = {name: example.about for name, example in examples().items() if example.kind == "run"}
    return runs | {name: preset.about for name, preset in PRESETS.items() if name not in runs}


def recipe_list() -> RenderableType:
    """The recipes, and how to write one as a file."""
    heading = f"examples of runs, and presets in the run of the example {AROUND}"
    return Group(*blocks([(heading, [*recipes().items()])]), "rlstab init NAME writes NAME.yaml.")


def run_file(recipe: str, name: str = "FILE") -> str:
    """The text of the run file of a recipe; ``name`` is what its first lines call it.

    Raises:
        UnknownName: no recipe has this name.
    """
    recipe_titles = recipes()
    if recipe not in recipe_titles:
        raise UnknownName(f"no recipe is called '{recipe}'. {did_you_mean(recipe, recipe_titles)}")
    head, sources = [f"{recipe}: {recipe_titles[recipe]}"], dict[str, str]()
    if recipe in examples() and examples()[recipe].kind == "run":
        data = dict(examples()[recipe].data)
    else:
        data = _around(recipe)
        head.append(f"A preset is a loss and stages; model, task and schedule are those of the example `{AROUND}`.")
        sources.update(PRESETS[recipe].sources)
    head += [
        "Every setting is here. One that is left out has its default.",
        f"  rlstab check {name}    # what it means, before anything runs",
        f"  rlstab train {name}",
    ]
    lines = _run(load_run(data), data, sources)
    return "\n".join([*(f"# {line}" for line in head), "", *_set(lines)])


def _around(preset: str) -> dict[str, Any]:
    """The run that a preset is put into; the preset replaces the loss, the stages and what methods are shown."""
    data = {key: value for key, value in example(AROUND, "run").data.items() if key != "stages"}
    shown = ("old_logprobs", "refresh")  # null follows from what the methods read
    optimisation = {key: value for key, value in data.get("optimisation", {}).items() if key not in shown}
    tracking = {**data.get("tracking", {}), "out": f"runs/{preset}"}
    return {**data, "objective": {"preset": preset}, "optimisation": optimisation, "tracking": tracking}


def _run(run: RunConfig, data: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Line]:
    """All sections, each setting as in the recipe: null where the recipe leaves it to the other settings."""
    for key in RunConfig.model_fields:
        if key == "stages":
            yield "stages:", "what acts outside the loss"
            yield from _methods(dump_stages(run.pipeline), "  ", sources)
        elif key == "objective":
            yield "objective:", "the methods of the loss; their order does not matter"
            yield from _methods(dump_objective(run.composition), "  ", sources)
        elif isinstance(section := getattr(run, key), BaseModel):
            yield f"{key}:", summary(type(section))
            yield from _settings(type(section), data.get(key, {}), type(section).model_fields, "  ")
        else:
            yield from _settings(RunConfig, data, [key])
        yield "", ""


def _settings(cls: type[BaseModel], values: Mapping[str, Any], keys: Iterable[str], indent: str = "") -> Iterator[Line]:
    properties = cls.model_json_schema()["properties"]
    tasks = get_args(get_args(TaskSettings)[0])
    for key in keys:
        field = cls.model_fields[key]
        value = values.get(key, field.get_default(call_default_factory=True))
        comment = _said(field.description or "", properties[key])
        if cls in tasks and key == "name":
            other_tasks = [task.model_fields["name"].default for task in tasks if task is not cls]
            comment = f"or {', '.join(map(str, other_tasks))}, with settings of their own"
        yield f"{indent}{key}: {flow(value)}", comment


def _methods(items: Sequence[Mapping[str, Any]], indent: str, sources: Mapping[str, str]) -> Iterator[Line]:
    for item in items:
        name = item["name"]
        if name in _COMBINED:
            yield f"{indent}- name: {name}", _COMBINED[name]
            for key, part in item.items():
                if key != "name":
                    yield f"{indent}  {key}:", ""
                    yield from _methods(part if isinstance(part, list) else [part], f"{indent}    ", sources)
            continue
        cls: Any = METHODS.get(name) if name in METHODS.names() else STAGES.get(name)
        yield f"{indent}- name: {name}", summary(cls)
        allowed = {key.name: str(key).replace(" or None", " or null") for key in settings_of(cls)}
        texts = card(cls).parameters
        for key in allowed:
            source = sources.get(f"{name}.{key}")
            remark = f" This value: {source}." if source else ""
            comment = f"{texts.get(key, allowed[key])}{remark}".replace("``", "`")
            yield f"{indent}  {key}: {flow(item[key])}", comment


def _said(description: str, schema: Mapping[str, Any]) -> str:
    """What a field is and, where there is a choice, its possible values."""
    options = [option.get("items", option) for option in schema.get("anyOf", [schema])]
    choices = [" | ".join(option["enum"]) for option in options if "enum" in option]
    return "; ".join(part for part in (description, *choices) if part)


def _set(lines: Iterable[Line]) -> Iterator[str]:
    """Lines with their comments: to the right in one column, or above where there is no room."""
    for text, comment in lines:
        if not comment:
            yield text
        elif len(text) + 2 <= COLUMN and COLUMN + 2 + len(comment) <= WIDTH:
            yield f"{text:<{COLUMN}}# {comment}"
        else:
            head = " " * (len(text) - len(text.lstrip())) + "# "
            yield from textwrap.wrap(
                comment, WIDTH, initial_indent=head, subsequent_indent=head, break_on_hyphens=False
            )
            yield text
