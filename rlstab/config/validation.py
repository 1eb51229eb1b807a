"""Checks of the keys and values of a YAML file against the pydantic models of ``settings``.

Each mistake is one line with file, line and setting; all mistakes of a file are reported at once. An unknown key or
name probably means a name in rlstab, another heading, or a similar name; ``other_names.yaml`` has the names that TRL,
verl, PEFT and papers use.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from rlstab.config.allowed_changes import models_in, settings_in
from rlstab.config.document import Document, Keys, Kind, flow, kind_of_file, shown
from rlstab.config.settings import RunSettings
from rlstab.core.method_settings import settings_of
from rlstab.errors import NEAR, ConfigError, Conflict, RlstabError, did_you_mean, likeness, plain
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.zoo import METHODS

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")

#: The kind of a file, and the command that takes it.
_USE: Mapping[Kind, str] = {
    "bench": "a bench file. Run it by `rlstab bench {}`; --dry-run tries it",
    "run": "a run file. Train it by `rlstab train {}`, or name it as the `base` of a bench file",
    "objective": "an objective alone. Write it under the key `objective` of a run file",
}
#: What YAML calls the kinds of values that pydantic names.
_KINDS = {"dictionary": "a mapping", "list": "a list", "tuple": "a list"}


def validate(document: Document, model: type[Model], data: Any, path: Keys = ()) -> Model:
    """A part of a document as a model; unknown keys, missing keys and values out of range are errors.

    Args:
        document: gives errors their file and line.
        model: what the part should be.
        data: the part.
        path: the keys of the part in the document.

    Raises:
        ConfigError: one line per mistake, each with file and line, in the order of the file.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines, mistakes = dict[tuple[Any, ...], str](), error.errors(include_url=False)
        for mistake in mistakes:  # only the first one of a value that fits no member of a union
            if mistake["type"] == "too_short" and any(mistake["loc"] == other["loc"][:-1] for other in mistakes):
                continue  # it lacks the items that are wrong
            value = tuple(_steps_in(data, mistake["loc"])) if mistake["type"] != "missing" else mistake["loc"]
            lines.setdefault(value, _line(document, model, mistake, data, path))
        raise ConfigError(_by_line(lines.values())) from None


def require_kind(document: Document, expected: Kind) -> None:
    """Refuse a file of another kind; a run file also serves as the file of an objective.

    Raises:
        ConfigError: says what the file is, and which command takes it.
    """
    kind = kind_of_file(document.data)
    if kind != expected and (kind, expected) != ("run", "objective"):
        raise document.error((), f"this is {_USE[kind].format(document.name or 'FILE')}.")


def together(checks: Iterable[Callable[[], Result]]) -> list[Result]:
    """The results of several checks of one file; their errors are raised together, in the order of the file."""
    results, errors = list[Result](), list[RlstabError]()
    for check in checks:
        try:
            results.append(check())
        except (ConfigError, Conflict) as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(_by_line(line for error in errors for line in mistakes_of(error)))
    return results


#: A number as YAML writes it.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def mistakes_of(error: RlstabError) -> list[str]:
    """The mistakes that an error names, one by one; further lines of a mistake are indented."""
    return re.split(r"\n(?=\S)", str(error))


def _by_line(lines: Iterable[str]) -> str:
    positions = {line: re.match(r"(.*?):(\d+): ", line) for line in lines}
    return "\n".join(
        sorted(positions, key=lambda line: (match[1], int(match[2])) if (match := positions[line]) else ("", 0))
    )


def _line(document: Document, model: type[BaseModel], mistake: Mapping[str, Any], data: Any, path: Keys) -> str:
    """A mistake that pydantic found, in the words of a YAML file."""
    kind, loc, context = mistake["type"], mistake["loc"], mistake.get("ctx", {})
    keys = (*path, *_steps_in(data, loc))
    last = loc[-1] if loc else ""
    if kind == "misfit":
        return document.text((*keys, *context["keys"]), context["text"])
    if kind == "extra_forbidden":
        return document.text(keys, f"unknown key '{last}'. {unknown_key(str(last), _model_at(model, loc))}")
    if kind == "missing":
        problem = f"the setting `{last}` is missing; it has no default" if isinstance(last, str) else "too few values"
        return document.text(keys, f"{problem}.")
    if kind == "union_tag_invalid":
        tags = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
        hint = did_you_mean(str(context["tag"]), tags)
        return document.text((*keys, "name"), f"no {last} is called '{context['tag']}'. {hint}")
    if kind == "union_tag_not_found":
        return document.text(keys, f"a {last} needs its `name`.")
    message = re.sub("a valid (dictionary|list|tuple).*", lambda kind: _KINDS[kind[1]], mistake["msg"])
    message = re.sub("^(List|Tuple) (should .*) after validation", r"a list \2", message)
    if not message.startswith("Input should"):
        return document.text(keys, f"{message[:1].lower()}{message[1:]}.")
    text = f"{message.removeprefix('Input ')}, not {shown(mistake['input'])}."
    if isinstance(value := mistake["input"], str):
        if kind in ("float_type", "int_type") and _NUMBER.fullmatch(value):
            text += f" Write it without the quotes: {value}."
        elif kind == "literal_error":
            choices = re.findall("'([^']*)'", str(context["expected"]))
            text += "".join(f" Did you mean {guess}?" for guess in get_close_matches(value.lower(), choices, 1))
        elif "a list" in message:
            text += f" Write {last}: {flow([value])}."
    if kind.startswith("model_") and (section := next(models_in(HEADINGS.get(str(last))), None)) is not None:
        key, field = next(iter(section[0].model_fields.items()))
        value = mistake["input"] if isinstance(mistake["input"], str) else field.get_default()
        text += f" Write for example {last}: {flow({key: value})}."
    return document.text(keys, text)


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel]:
    """The model in which an unknown key is, by its ``loc`` in pydantic: keys, indices and tags of unions."""
    models = [model]
    for step in loc[:-1]:
        fields = [candidate.model_fields[str(step)] for candidate in models if step in candidate.model_fields]
        inner_models = [inner for field in fields for inner, _ in models_in(field.annotation)]
        models = inner_models or [candidate for candidate in models if tag_of(candidate) == step] or models
    return models[0]


def _steps_in(data: Any, loc: Sequence[str | int]) -> Iterator[str | int]:
    """The elements of pydantic's ``loc`` that are keys and indices of the data; others name members of unions."""
    for step in loc:
        if isinstance(data, Mapping) and step in data:
            yield step
            data = data[step]
        elif isinstance(data, list | tuple) and isinstance(step, int) and step < len(data):
            yield step
            data = data[step]


# -- what an unknown key or name may mean ------------------------------------------------------------------------------

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
