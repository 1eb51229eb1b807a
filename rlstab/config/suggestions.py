"""The probable meaning of an unknown key or name in a YAML file: a name in rlstab, another heading, or a similar name.

``other_names.yaml`` has the names that TRL, verl, PEFT and papers use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from rlstab.config.identity import settings_in
from rlstab.config.settings import RunSettings
from rlstab.core.method_settings import settings_of
from rlstab.errors import NEAR, did_you_mean, likeness, plain
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.zoo import METHODS

#: The headings of a run with the types of what is under them; those of plain values and lists have no model in it.
HEADINGS: Mapping[str, Any] = {name: field.annotation for name, field in RunSettings.model_fields.items()}
#: A key that occurs under more headings than this could belong to any of them.
MOST_HOMES = 3
#: A key that is at least this like a setting of its heading is that one.
MISSPELT = 0.85
#: Letters of a name in another library that may be misspelt: too many short words are alike.
LONG = 6


def unknown_key(key: str, model: type[BaseModel]) -> str:
    """A hint for a key that ``model``, a part of a file, does not have."""
    word, settings_here = plain(key), list(model.model_fields)
    answers = _answers() | {name: f"'{name}' is {kind}." for name, kind in _kinds().items()}
    if word in settings_here or max(likeness(key, name) for name in settings_here) >= MISSPELT:
        return did_you_mean(key, settings_here)
    if "preset" in settings_here:
        return f"Settings of its methods go under `set`: set: {{METHOD: {{{key}: ...}}}}; other methods are items."
    if word not in {*answers, *_homes()} and len(word) >= LONG:
        word = max((name for name in answers if likeness(word, name) >= MISSPELT), default=word)
    other_level = "{name:" if tag_of(model) in METHODS.names() else "the method"
    homes = [home for home in _homes().get(word, ()) if other_level not in home]
    if word in answers:
        return answers[word]
    return f"It belongs to {' or '.join(homes)}." if 0 < len(homes) <= MOST_HOMES else did_you_mean(key, settings_here)


def unknown_name(name: str, expected: Sequence[str]) -> str:
    """A hint for an unknown name of a method, a stage or a preset, where the ``expected`` names are expected."""
    word = _table()["methods"].get(plain(name), plain(name))
    # of two equally similar names, the expected one
    close = max({*expected, *_kinds()}, key=lambda other: (likeness(word, other), other in expected, other))
    if close in expected or likeness(word, close) < NEAR:
        return did_you_mean(word, expected)
    return f"{'It' if close == name else f'Perhaps {close}, which'} is {_kinds()[close]}."


@cache
def _kinds() -> dict[str, str]:
    """What each name is, and where to write it."""
    return {
        **dict.fromkeys(METHODS.names(), "a method of the loss: list it under `objective`"),
        **dict.fromkeys(STAGES.names(), "a stage: list it under `stages`"),
        **{name: f"a preset: write {{preset: {name}}} under `objective`" for name in PRESETS},
    }


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = (Path(__file__).parent / "other_names.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _answers() -> dict[str, str]:
    """A hint for each setting of another library, by its name there."""
    return {
        name: text if text.endswith(".") else f"'{name}' ({library}) is here: {text}."
        for library, names in _table()["settings"].items()
        for name, text in names.items()
    }


@cache
def _homes() -> dict[str, list[str]]:
    """The headings of each setting of a run or a method, by its name."""
    homes = defaultdict[str, list[str]](list)
    for path, model, _ in settings_in(RunSettings):
        heading, _, key = path.replace(".*", "").rpartition(".")
        tag = tag_of(model)
        home = f"`{heading}: {{name: {tag}, {key}: ...}}`" if tag else f"`{heading}.{key}`"
        homes[key] += [home] if heading and home not in homes[key] else []
    for name in METHODS.names():
        for setting in settings_of(METHODS.get(name)):
            homes[setting.name].append(f"the method `{name}`")
    return homes | {key: ["the top of the run file"] for key in HEADINGS}


def tag_of(model: type[BaseModel]) -> str | None:
    """The one `name` that a member of a union may have."""
    name = model.model_fields.get("name")
    names = () if name is None else get_args(name.annotation)
    return names[0] if len(names) == 1 else None
