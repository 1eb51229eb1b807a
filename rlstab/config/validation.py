"""Checks of the keys and values of a YAML file against the pydantic models of ``settings``.

Each mistake is one line with file, line and setting; all mistakes of a file are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rlstab.config.document import Document, Keys, Kind, flow, kind_of_file, shown
from rlstab.config.identity import models_in
from rlstab.config.suggestions import HEADINGS, tag_of, unknown_key
from rlstab.errors import ConfigError, Conflict, RlstabError, did_you_mean

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
