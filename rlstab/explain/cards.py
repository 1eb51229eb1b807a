"""Cards: the docstring of a method, read as sections, checked, and written as a page of Markdown."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlstab.core.batch import SIGNALS
from rlstab.core.compose import Composition, Within
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import Setting, settings_of
from rlstab.errors import RlstabError, did_you_mean
from rlstab.presets import PRESETS
from rlstab.zoo import METHODS

#: The sections of a card, in the order in which they stand.
SECTIONS = (
    "Problem",
    "Equation",
    "Reads",
    "Writes",
    "Denominator",
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
_MARK = "<!-- Written by `rlstab cards` from the docstrings"
_RUN_SETTINGS = (
    "Two settings of a run change what is measured here. `refresh: rollout | step`: the evidence is that of the policy "
    "that sampled, or is made anew at the start of each optimizer step. `scope: step | microbatch`: statistics are "
    "taken over the whole optimizer step, or over each micro-batch alone, which only reproduces published code."
)


#: What Markdown would take for emphasis, a tag or an escape; in ``2 * 3``, ``a_t`` and ``a < b`` it takes nothing.
_MISREAD = re.compile(r"\\|\*(?! )|(?<! )\*|(?<![^\W_])_|_(?![^\W_])|<(?=[\w/!?])")


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
class Card:
    """A docstring, read. Make one with :func:`card`.

    Attributes:
        cls: the method.
        summary: what it does to tokens, one line.
        sections: text by name, dedented, in the order of :data:`SECTIONS`.
        parameters: the section of that name, one a field.
    """

    cls: type[TokenObjective]
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

    @property
    def denominators(self) -> list[str]:
        """What happens to the denominator: ``kept``, ``all``, ``untouched``, or two of them by a setting."""
        return self.sections["Denominator"].partition(":")[0].split(" or ")


def card(cls: type[TokenObjective]) -> Card:
    """The card of a method.

    Raises:
        CardError: a section is missing, unknown, empty or out of order, or the Parameters are not the fields.
    """
    who = cls.__qualname__
    lines = inspect.cleandoc(cls.__dict__.get("__doc__") or "").splitlines()
    texts: dict[str, list[str]] = {"": []}
    current = ""
    for line in lines:
        if header := re.fullmatch(r"([A-Z]\w+):", line):
            current = header[1]
            if current not in SECTIONS:
                raise CardError(
                    f"{who}: the card has a section '{current}', which no card has. {did_you_mean(current, SECTIONS)}"
                )
            if current in texts:
                raise CardError(f"{who}: the card has two sections '{current}'. Merge them.")
            texts[current] = []
        elif current and line and not line.startswith("    "):
            raise CardError(f"{who}: under '{current}' stands {line!r}, which is not indented. Indent it by 4.")
        else:
            texts[current].append(line[4:] if current else line)
    sections = {name: "\n".join(text).strip("\n") for name, text in texts.items()}
    summary = sections.pop("")
    _check_sections(who, summary, list(sections), [name for name, text in sections.items() if not text])
    found = Card(cls, summary, sections, _parameters(cls, sections["Parameters"]))
    if not set(found.denominators) <= {"kept", "all", "untouched"}:
        raise CardError(
            f"{who}: Denominator begins with '{found.sections['Denominator'].split()[0]}'. Begin it with 'kept:', "
            f"'all:' or 'untouched:', or with two of them and 'or' between."
        )
    return found


def _check_sections(who: str, summary: str, present: list[str], empty: list[str]) -> None:
    missing = [name for name in SECTIONS if name not in present]
    if missing:
        raise CardError(
            f"{who}: the card lacks the section '{missing[0]}'. Its sections are, in this order: {_listed()}."
        )
    for stands, belongs in zip(present, SECTIONS, strict=True):
        if stands != belongs:
            raise CardError(f"{who}: the section '{stands}' stands where '{belongs}' belongs. Order: {_listed()}.")
    if empty:
        raise CardError(f"{who}: the section '{empty[0]}' of the card is empty. Write 'none' if there is nothing.")
    if not summary or "\n" in summary:
        raise CardError(f"{who}: the card does not begin with one line, and an empty one, on what it does to tokens.")


def _listed() -> str:
    return ", ".join(SECTIONS)


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]


def _parameters(cls: type[TokenObjective], text: str) -> tuple[Parameter, ...]:
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
            raise CardError(f"{who}: '{head[1]}' is no field of the class. {known}")
        heads.append((head[1], head[2] or "", head[3]))
    names = [name for name, _, _ in heads]
    for name, setting in settings.items():
        if name not in names:
            raise CardError(
                f"{who}: the field '{name}' is not there. Add: - ``{name}``: {_range_and_default(setting)} and then "
                f"where the default comes from."
            )
    if names != list(settings):
        raise CardError(f"{who}: they stand as {', '.join(names)}, the fields as {', '.join(settings)}.")
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


# -- a page --------------------------------------------------------------------------------------------------------


def markdown(card: Card, beside: Collection[str] = ()) -> str:
    """The page of a card, in the Markdown of GitHub.

    Args:
        card: of any method, also of another package.
        beside: names of methods whose pages lie in the same folder; mentions of them become links.
    """
    cls = card.cls
    module = "rlstab" if cls.__module__.startswith("rlstab.zoo.") else cls.__module__
    recipes = [f"`{name}`" for name, one in PRESETS.items() if cls.name in _settings_in(one.objective)]
    beside = set(beside) - {cls.name}
    pieces = [
        f"{_MARK}; edit the one of {cls.__qualname__}. -->",
        f"# `{cls.name}` · `{cls.__qualname__}`",
        f"**{_inline(card.summary, beside)}**",
        _table(
            ["in Python", "in YAML", "in the presets"],
            [[f"`from {module} import {cls.__qualname__}`", f"`{_yaml(cls)}`", ", ".join(recipes) or "none"]],
        ),
    ]
    for name, text in card.sections.items():
        pieces.append(f"## {name}")
        if name == "Parameters" and card.parameters:
            rows = [
                [
                    f"`{one.name}`",
                    _inline(one.symbol),
                    f"`{one.range}`",
                    _default_cell(one),
                    _inline(one.source, beside),
                ]
                for one in card.parameters
            ]
            pieces.append(_table(["name", "symbol", "range", "default", "meaning, and source of the default"], rows))
        else:
            body = _body(text, beside)
            if name == "Interacts":
                body = [
                    re.sub(r"^- (good with|careful with|surprising):", r"- **\1:**", one, flags=re.M) for one in body
                ]
            pieces += body
        if name == "Reads" and cls.measure is not TokenObjective.measure:
            pieces.append(_RUN_SETTINGS)
        if name == "Limits" and cls.exceptions:
            pieces.append("Laws of `rlstab.testing` that it does not obey:")
            pieces.append("\n".join(f"- *{law}*: {_inline(why, beside)}" for law, why in cls.exceptions.items()))
    return "\n\n".join(pieces) + "\n"


def _yaml(cls: type[TokenObjective]) -> str:
    required = [one.name for one in settings_of(cls) if one.default is dataclasses.MISSING]
    return "{" + ", ".join([f"name: {cls.name}", *(f"{name}: ..." for name in required)]) + "}"


def _default_cell(parameter: Parameter) -> str:
    return "required" if parameter.default == "required" else f"`{parameter.default}`"


def _table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _body(text: str, beside: Collection[str]) -> list[str]:
    """Paragraphs unwrapped, items as one list, indented lines as blocks, doctests as the code that they are."""
    pieces: list[str] = []
    for kind, group in itertools.groupby(_blocks(text), key=lambda block: block[0]):
        blocks = ["\n".join(lines) for _, lines in group]
        if kind == "item":
            pieces.append("\n".join(f"- {_inline(block.removeprefix('- '), beside)}" for block in blocks))
        elif kind == "code":
            pieces += [f"```text\n{inspect.cleandoc(block)}\n```" for block in blocks]
        elif kind == "doctest":
            pieces.append(f"```python\n{''.join(map(_script, blocks))}```")
        else:
            pieces += [_inline(block, beside) for block in blocks]
    return pieces


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    kind, lines = "", [""]
    for line in [*text.splitlines(), ""]:
        if not line and kind == "code":
            lines.append(line)  # a formula may have empty lines between its parts
            continue
        if kind == "doctest" and line:
            new = kind
        elif not line:
            new = ""
        elif line.startswith(">>> "):
            new = "doctest"
        elif line.startswith("    ") and kind in ("", "code"):
            new = "code"
        elif line.startswith("- "):
            new = "item"
        else:
            new = kind if kind in ("item", "text") else "text"
        if new != kind or line.startswith("- "):
            if kind:
                yield kind, lines
            kind, lines = new, []
        lines.append(line)
    if kind:
        yield kind, lines


def _script(session: str) -> str:
    """A doctest as plain Python, with what it prints as comments."""
    pieces = []
    for example in doctest.DocTestParser().get_examples(session):
        source = example.source
        last = ast.parse(source).body[-1]
        if example.want and isinstance(last, ast.Expr) and not _prints(last):
            source = (
                f"print({source.strip()})\n"
                if not isinstance(last.value, ast.Tuple)
                else f"print(({source.strip()}))\n"
            )
        pieces += [source, *(f"# {line}\n" for line in example.want.splitlines())]
    return re.sub(r"\A(?:(?:import|from) .*\n)+", r"\g<0>\n", "".join(pieces))


def _prints(statement: ast.Expr) -> bool:
    call = statement.value
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"


def _inline(text: str, beside: Collection[str] = ()) -> str:
    """Text on one line: code spans, links to arXiv and to other methods, nothing that Markdown would misread."""
    words = " ".join(text.split())
    pieces = []
    for place, piece in enumerate(words.split("``")):
        if place % 2:
            pieces.append(f"[`{piece}`]({piece}.md)" if piece in beside else f"`{piece}`")
        else:
            plain = re.sub(_MISREAD, r"\\\g<0>", piece)
            pieces.append(re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", plain))
    return "".join(pieces)


# -- all of them ---------------------------------------------------------------------------------------------------


def shipped() -> list[type[TokenObjective]]:
    """The methods of rlstab itself, by name; those of other packages have pages of their own."""
    return [cls for cls in map(METHODS.get, METHODS.names()) if cls.__module__.startswith("rlstab.zoo.")]


def comparison() -> str:
    """Two tables: all methods side by side, and what each preset sets."""
    cards = [card(cls) for cls in shipped()]
    names = {one.cls.name for one in cards}
    rows = []
    for one in cards:
        arxiv = dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", one.sections["Source"]))
        beyond = [name for name in one.heads("Reads") if name not in BASICS]
        reads = [f"live `{name.removeprefix('live ')}`" if "live " in name else f"`{name}`" for name in beyond]
        rows.append(
            [
                f"[`{one.cls.name}`]({one.cls.name}.md)",
                _inline(one.summary, names - {one.cls.name}),
                ", ".join(f"`{name}`" for name in one.heads("Writes")),
                ", ".join(reads) or "none",
                " or ".join(one.denominators),
                ", ".join(f"`{key}`" for key in one.heads("State")) or "none",
                ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in arxiv),
            ]
        )
    header = ["method", "what it does to tokens", "writes", "reads beyond the basics", "denominator", "state", "arXiv"]
    signals = "\n".join(f"- `{name}`: {what}" for name, what in SIGNALS.items())
    return "\n\n".join(
        [
            "## Methods",
            "The basics are the log-probs of the sampled tokens, their advantages, and which response they belong to. "
            "A method reads what is listed under any of its settings; the page of each says which.",
            _table(header, rows),
            f"The signals beyond the basics; live means that a penalty differentiates it:\n\n{signals}",
            "## Presets",
            "An empty cell: not part of the recipe. Where each value comes from stands in `rlstab/presets.py`.",
            _presets([one.cls for one in cards]),
        ]
    )


def _presets(methods: Iterable[type[TokenObjective]]) -> str:
    columns = {name: _settings_in(one.objective) for name, one in PRESETS.items()}
    rows = [["advantage", *(f"`{one.estimator}`" for one in PRESETS.values())]]
    for cls in methods:
        placed = [column.get(cls.name) for column in columns.values()]
        if not any(placed):
            continue
        within = ["" if one is None else f"within `{one[1]}`" if one[1] else "yes" for one in placed]
        rows.append([f"[`{cls.name}`]({cls.name}.md)", *within])
        for setting in settings_of(cls):
            values = ["" if one is None else f"{getattr(one[0], setting.name)}" for one in placed]
            rows.append([f"&emsp;`{setting.name}`", *values])
    return _table(["", *(f"`{name}`" for name in PRESETS)], rows)


def _settings_in(objective: TokenObjective, outer: str = "") -> dict[str, tuple[TokenObjective, str]]:
    """The methods of a recipe by name, each with the name of the one within which it acts, or nothing."""
    if isinstance(objective, Composition):
        return {name: one for member in objective.members for name, one in _settings_in(member, outer).items()}
    if isinstance(objective, Within):
        return {**_settings_in(objective.outer, outer), **_settings_in(objective.inner, objective.outer.name)}
    return {objective.name: (objective, outer)}


def pages() -> dict[str, str]:
    """File name to text: one page a method, and ``index.md``."""
    cards = [card(cls) for cls in shipped()]
    names = [one.cls.name for one in cards]
    found = {f"{one.cls.name}.md": markdown(one, names) for one in cards}
    head = f"{_MARK}. -->\n\n# All methods\n\nOne page each, made from the docstring of the class (`rlstab cards`)."
    return {**found, "index.md": f"{head}\n\n{comparison()}\n"}


def write(folder: str | Path) -> None:
    """Write all pages, and remove those that this function wrote before and that no method has any more.

    Raises:
        CardError: a docstring is not a card, or the folder cannot be written.
    """
    folder, wanted = Path(folder), pages()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in wanted.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        for name in _orphans(folder, wanted):
            (folder / name).unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CardError(f"{folder}: cannot be written: {reason}. Give another folder.") from error


def stale(folder: str | Path) -> list[str]:
    """What is wrong with the pages in a folder, a line each; nothing when they say what the docstrings say.

    Raises:
        CardError: a docstring is not a card.
    """
    folder, wanted = Path(folder), pages()
    found = []
    for name, text in wanted.items():
        page = folder / name
        if not page.is_file():
            found.append(f"{page}: is missing.")
            continue
        written = page.read_text(encoding="utf-8")
        if written != text:
            pairs = itertools.zip_longest(written.split("\n"), text.split("\n"), fillvalue="(nothing)")
            number, (has, should) = next(place for place in enumerate(pairs, 1) if place[1][0] != place[1][1])
            found.append(f"{page}:{number}: {_difference(has, should)}")
    return found + [f"{folder / name}: no method has this name any more." for name in _orphans(folder, wanted)]


def _difference(has: str, should: str) -> str:
    """Both lines around the first character in which they differ."""
    same = next(
        (i for i, (one, other) in enumerate(zip(has, should, strict=False)) if one != other),
        len(min(has, should, key=len)),
    )
    one, other = (
        ("..." if same > 30 else "") + line[max(0, same - 30) : same + 50] + ("..." if len(line) > same + 50 else "")
        for line in (has, should)
    )
    return f"the page says {one!r}, the docstring {other!r}."


def _orphans(folder: Path, wanted: Collection[str]) -> list[str]:
    others = [page for page in sorted(folder.glob("*.md")) if page.name not in wanted]
    return [page.name for page in others if page.read_text(encoding="utf-8").startswith(_MARK)]
