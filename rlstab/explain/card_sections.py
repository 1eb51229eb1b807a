"""A card: the docstring of a method or a stage, read as sections and checked against its fields."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlstab.core.metadata import docstring
from rlstab.core.method import Method
from rlstab.core.settings import Setting, settings_of
from rlstab.errors import RlstabError, did_you_mean
from rlstab.stages.stage import Stage

Kind = TypeVar("Kind", bound=Method[Any])

#: The sections of the card of a method, in order.
SECTIONS = (
    "Problem",
    "Equation",
    "Reads",
    "Writes",
    "Denominator",
    "Parameters",
    "State",
    "Deviations",
    "Surprises",
    "Example",
    "Source",
)
#: The sections of the card of a stage, in order. What it does to others, and where it does nothing, stands in them: the
#: classes of methods declare both.
STAGE_SECTIONS = (
    "Problem",
    "Equation",
    "Reads",
    "Gives",
    "Parameters",
    "State",
    "Deviations",
    "Interacts",
    "Limits",
    "Example",
    "Source",
)
#: What every batch and every policy has; what a method reads beyond it has to be provided.
BASICS = frozenset(
    {"old_logprobs", "logprobs", "advantages", "sequence", "position", "sequence_ids", "group_ids", "live logprobs"}
)


class CardError(RlstabError, ValueError):
    """The docstring of a method is not a card, or the pages made from it are stale."""


@dataclass(frozen=True)
class Parameter:
    """One setting as the card states it.

    Attributes:
        name: of the field.
        symbol: of the paper, or empty.
        range: allowed values.
        default: as Python writes it, or ``required``.
        source: what it means and where the default comes from.
    """

    name: str
    symbol: str
    range: str
    default: str
    source: str


@dataclass(frozen=True)
class Card(Generic[Kind]):
    """A docstring, read. Make one with :func:`card`.

    Attributes:
        cls: the method, or the stage.
        summary: what it does, one line.
        sections: text by name, dedented, in the order of :func:`sections_of`.
        parameters: the section of that name, one per field.
    """

    cls: type[Kind]
    summary: str
    sections: Mapping[str, str]
    parameters: tuple[Parameter, ...]

    def items(self, section: str) -> list[str]:
        """The ``- `` items of a section, each on one line."""
        return _items(self.sections[section])

    def heads(self, section: str) -> list[str]:
        """What stands in double backticks at the start of each item, with the ``live`` before it."""
        found = (re.match(r"((?:live )?)``([^`]+)``", item) for item in self.items(section))
        return [one[1] + one[2] for one in found if one]

    def named(self, section: str) -> list[str]:
        """All names in double backticks at the starts of items, before the colon: ``- `right`, `wrong` (n,): ...``."""
        return [name for item in self.items(section) for name in re.findall(r"``(\w+)``", item.partition(":")[0])]

    @property
    def denominators(self) -> list[str]:
        """What happens to the denominator: ``kept``, ``all``, ``untouched``, or two of them by a setting."""
        return self.sections["Denominator"].partition(":")[0].split(" or ")


def sections_of(cls: type[Method[Any]]) -> tuple[str, ...]:
    """The sections that the card of a class has, in order."""
    return STAGE_SECTIONS if issubclass(cls, Stage) else SECTIONS


def card(cls: type[Kind]) -> Card[Kind]:
    """The card of a method or a stage.

    Raises:
        CardError: a section is missing, unknown, empty or out of order, the Parameters are not the fields, or there is
            no docstring.
    """
    text = docstring(cls)
    if not text:
        raise CardError(
            f"{cls.__qualname__}: there is no docstring to make a card of. Write one, or run Python without -OO."
        )
    return _read(cls, text)


@functools.cache  # the page of a method looks at the cards of all others
def _read(cls: type[Any], docstring: str) -> Card[Any]:
    who, lines, known = cls.__qualname__, docstring.splitlines(), sections_of(cls)
    texts: dict[str, list[str]] = {"": []}
    current = ""
    for line in lines:
        if header := re.fullmatch(r"([A-Z]\w+):", line):
            current = header[1]
            if current not in known:
                raise CardError(
                    f"{who}: the card has a section '{current}', which no card has. {did_you_mean(current, known)}"
                )
            if current in texts:
                raise CardError(f"{who}: the card has two sections '{current}'. Merge them.")
            texts[current] = []
        elif current and line and not line.startswith("    "):
            raise CardError(f"{who}: the line {line!r} under '{current}' is not indented. Indent it by 4.")
        else:
            texts[current].append(line[4:] if current else line)
    sections = {name: "\n".join(text).strip("\n") for name, text in texts.items()}
    summary = sections.pop("")
    _check_sections(who, known, list(sections), [name for name, text in sections.items() if not text])
    if not summary or "\n" in summary:
        to_tokens = "" if issubclass(cls, Stage) else " to tokens"
        raise CardError(f"{who}: the card does not begin with one line, and an empty one, on what it does{to_tokens}.")
    found = Card(cls, summary, sections, _parameters(cls, sections["Parameters"]))
    if "Denominator" in known and not set(found.denominators) <= {"kept", "all", "untouched"}:
        raise CardError(
            f"{who}: Denominator begins with '{found.sections['Denominator'].split()[0]}'. Begin it with 'kept:', "
            f"'all:' or 'untouched:', or with two of them and 'or' between."
        )
    return found


def _check_sections(who: str, known: tuple[str, ...], present: list[str], empty: list[str]) -> None:
    listed = ", ".join(known)
    missing = [name for name in known if name not in present]
    if missing:
        raise CardError(f"{who}: the card lacks the section '{missing[0]}'. Its sections are, in this order: {listed}.")
    for stands, belongs in zip(present, known, strict=True):
        if stands != belongs:
            raise CardError(f"{who}: the section '{stands}' is where '{belongs}' belongs. Order: {listed}.")
    if empty:
        raise CardError(f"{who}: the section '{empty[0]}' of the card is empty. Write 'none' if there is nothing.")


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]


def _parameters(cls: type[Method[Any]], text: str) -> tuple[Parameter, ...]:
    """The section Parameters, which has to say of each field what the code says, and more."""
    who = f"{cls.__qualname__}: Parameters"
    settings = {one.name: one for one in settings_of(cls)}
    heads: list[tuple[str, str, str]] = []
    for item in _items(text):
        head = re.fullmatch(r"``(\w+)``(?: \(([^)]+)\))?: (.+)", item)
        if head is None:
            raise CardError(f"{who}: {item!r} does not begin with ``name``: or ``name`` (symbol):.")
        if head[1] not in settings:
            known = f"{did_you_mean(head[1], settings)}" if settings else "The class has no field."
            raise CardError(f"{who}: '{head[1]}' is not a field of the class. {known}")
        heads.append((head[1], head[2] or "", head[3]))
    names = [name for name, _, _ in heads]
    for name, setting in settings.items():
        if name not in names:
            raise CardError(
                f"{who}: the field '{name}' is not there. Add: - ``{name}``: {_range_and_default(setting)} and then "
                f"where the default comes from."
            )
    if names != list(settings):
        raise CardError(f"{who}: the card lists {', '.join(names)}, the class {', '.join(settings)}.")
    if not settings and text != "none":
        raise CardError(f"{who}: the class has no field, and the section says {text!r}. Write 'none'.")
    found = []
    for name, symbol, said in heads:
        stated = _range_and_default(settings[name])
        if not said.startswith(stated):
            raise CardError(f"{who}: '{name}' is {said.split('. ')[0]!r} on the card, {stated!r} in the code.")
        source = said.removeprefix(stated).strip()
        if not source:
            raise CardError(
                f"{who}: '{name}' has a default without a source. After {stated!r} say where it comes from: the paper "
                f"and its section, code, or your own choice."
            )
        found.append(Parameter(name, symbol, str(settings[name]), _default(settings[name]), source))
    return tuple(found)


def _default(setting: Setting) -> str:
    return "required" if setting.default is dataclasses.MISSING else repr(setting.default)


def _range_and_default(setting: Setting) -> str:
    default = _default(setting)
    return f"{setting}, {default if default == 'required' else f'default {default}'}."
