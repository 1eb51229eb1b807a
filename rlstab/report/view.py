"""The token viewer: one HTML file that holds everything it needs, and a short form for the terminal."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from string import Template
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from rlstab.record.effects import ACTIONS
from rlstab.record.response_traces import MethodMarks, ResponseTrace, ResponseTraces, read_responses
from rlstab.report.output import digest, refuse_foreign, resource, safe_json, write_text
from rlstab.safe_read import read_mapping
from rlstab.visible import visible

#: Responses on a page, and in the terminal, where nothing else is asked for.
PAGE_LIMIT, TERMINAL_LIMIT = 2000, 8

#: Start of the title of a page that rlstab wrote.
MARK = b"<title>Tokens of "


def write_view(
    source: str | Path,
    out: str | Path | None = None,
    *,
    step: int | None = None,
    limit: int | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Write the page of a dump, and return where.

    Args:
        source: see :func:`rlstab.record.read_dump`.
        out: of the page; None is ``view.html`` in the folder, or the name of the file with ``.html``.
        step: of this optimizer step alone.
        limit: responses, those of the largest influence; None is 2000.
        tokenizer: see :func:`rlstab.record.response_traces.read_responses`.

    Raises:
        ReportError: nothing to show, or the page cannot be written.
    """
    source = Path(source)
    traces = read_responses(source, tokenizer, step=step, limit=PAGE_LIMIT if limit is None else limit)
    if out is None:
        out = source / "view.html" if source.is_dir() else source.with_suffix(".html")
    refuse_foreign(Path(out), [MARK], "a page of the viewer", "--out")
    return write_text(Path(out), page(traces, _named(source), str(source)), "--out")


def page(traces: ResponseTraces, title: str, source: str = "") -> str:
    """The HTML of some responses. It asks for nothing, and nothing in its arguments is read as HTML or script.

    Args:
        traces: responses; notes stand above them.
        title: what they are of, after "Tokens of".
        source: from where they were read; empty shows none.
    """
    style, script = map(resource, ("view.css", "view.js"))
    return Template(resource("view.html")).substitute(
        script_digest=digest(script),
        style_digest=digest(style),
        title=html.escape(_plain(f"Tokens of {title}")),
        style=style,
        script=script,
        data=safe_json(_data(traces, source)),
    )


def everywhere(responses: Sequence[ResponseTrace]) -> set[tuple[str, str]]:
    """Keys of methods with what they do to every token of every response: marks would only hide the rest."""
    each = [
        {
            (key, action)
            for key, method in response.methods.items()
            for action, indices in method.actions.items()
            if len(indices) == len(response.tokens)
        }
        for response in responses
    ]
    return set.intersection(*each) if each else set()


def _named(source: Path) -> str:
    """A run of a bench is named by what the bench calls it: of the folder, ``seed-0`` alone says nothing."""
    folder = source if source.is_dir() else source.parent
    cell = read_mapping(folder / "bench.json")[0] or {}
    parts = [str(cell[key]) for key in ("bench", "setting", "method") if cell.get(key)]
    return ", ".join([*parts, f"seed {cell['seed']}"]) if parts and "seed" in cell else source.resolve().name


def _data(traces: ResponseTraces, source: str) -> dict[str, Any]:
    names: dict[str, str] = {}
    acts: dict[str, set[str]] = defaultdict(set)
    always = everywhere(traces.responses)
    for response in traces.responses:
        for key, method in response.methods.items():
            names[key] = method.name
            acts[key] |= {action for action in method.actions if (key, action) not in always}
    return {
        "source": _plain(source),
        "notes": list(map(_plain, traces.notes)),
        "actions": ACTIONS,
        "methods": {visible(key): _plain(name) for key, name in sorted(names.items())},
        "acts": {visible(key): sorted(actions) for key, actions in acts.items()},
        "done": sorted(set().union(*acts.values())),
        "everywhere": [f"{visible(key)} {action}" for key, action in sorted(always)],
        "responses": list(map(_response, traces.responses)),
    }


def _plain(text: str) -> str:
    return visible(text, spaces=False)


def _response(response: ResponseTrace) -> dict[str, Any]:
    return {
        "step": response.step,
        "response": _plain(response.response),
        "group": None if response.group is None else _plain(response.group),
        "prompt": _plain(response.prompt),
        "reward": response.reward,
        "tokens": list(map(visible, response.tokens)),
        "ids": response.ids,
        "total": float(f"{sum(response.influence):.4g}"),
        "methods": {visible(key): _method(method) for key, method in response.methods.items()},
        **{name: _column(values) for name, values in response.values.items()},
        "influence": _column(response.influence),
    }


def _method(method: MethodMarks) -> dict[str, Any]:
    return {**method.actions, **{name: list(values.items()) for name, values in method.values.items()}}


def _column(values: Sequence[float | None]) -> Sequence[float | None] | float | None:
    """One number where all are equal; the page reads both."""
    return values[0] if values and all(value == values[0] for value in values) else values or None


# -- in a terminal -----------------------------------------------------------------------------------------------------

#: Under a token, by what was done to it.
ACTION_MARKS = {"dropped": "x", "boosted": "^", "damped": "v", "clipped": "#", "regularised": "~", "unclipped": "o"}
#: By probability, the surprisal in nats from which a token has this background. Text is black on it.
SHADES = {
    "0.5": (0.693, "#c9e3d2"),
    "0.1": (2.303, "#8ac5c8"),
    "0.01": (4.605, "#539bc2"),
    "0.002": (6.215, "#e08a4c"),
}
#: Longer responses are cut here: for them there is the page.
MOST_TOKENS = 600


def show(traces: ResponseTraces, console: Console) -> None:
    """Print responses, those of the largest influence first.

    Texts are printed as data: neither markup nor control characters in them have an effect.
    """
    always = everywhere(traces.responses)
    shades = [(f" {label} ", _shade(colour)) for label, (_, colour) in SHADES.items()]
    marks = [(f" {mark} ", "bold") for mark in ACTION_MARKS.values()]
    legend = [*shades, *(part for pair in zip(marks, ACTION_MARKS, strict=True) for part in pair)]
    console.print(Text.assemble("p at most ", *legend))
    for note in traces.notes:
        console.print(Text(_plain(note), style="yellow"))
    for key, action in sorted(always):
        console.print(Text(f"{_title(traces.responses[0], key)}: every token is {action}; not marked", style="dim"))
    for response in sorted(traces.responses, key=lambda response: -sum(response.influence)):
        console.print(Text(""), *_shown(response, always, console.width), sep="\n")


def _shown(response: ResponseTrace, always: set[tuple[str, str]], width: int) -> Iterator[Text]:
    done: dict[int, list[str]] = defaultdict(list)
    acted = []
    for key, method in sorted(response.methods.items()):
        for action, indices in method.actions.items():
            if (key, action) not in always:
                acted.append(f"{_title(response, key)} {action} {len(indices)}")
                for index in indices:
                    done[index] += [action] if action not in done[index] else []
    head = Text.assemble((f"optimizer step {response.step}", "bold"), f"  response {visible(response.response)}")
    advantages = set(response.values.get("advantage", []))
    for name, value, sign in (
        ("reward", response.reward, ""),
        ("advantage", advantages.pop() if len(advantages) == 1 else None, "+"),
        ("influence", sum(response.influence), ""),
    ):
        if value is not None:
            head.append(f"  {name} {value:{sign}.3g}")
    yield head
    if response.prompt:
        yield Text("\n".join(_plain(response.prompt.strip()).splitlines()[-4:]), "dim")
    yield from _lines(response, done, width)
    yield Text(", ".join(acted) or "no method touched a token", "dim italic")


def _lines(response: ResponseTrace, done: Mapping[int, list[str]], width: int) -> Iterator[Text]:
    """Lines of tokens, each followed by as many lines of marks as its tokens need."""
    rows: list[list[tuple[str, int]]] = [[]]
    used = 0
    for index, token in enumerate(response.tokens[:MOST_TOKENS]):
        shown = visible(token) if token else f"⟨{response.ids[index] if response.ids else 'no text'}⟩"
        if rows[-1] and ("\n" in response.tokens[index - 1] or used + cell_len(shown) > width):
            rows.append([])
            used = 0
        rows[-1].append((shown, index))
        used += cell_len(shown)
    for row in rows:
        yield Text.assemble(*((shown, _style(response, index, done)) for shown, index in row), overflow="fold")
        widths = [cell_len(shown) for shown, _ in row]
        for actions in zip_longest(*(done.get(index, []) for _, index in row)):
            marks = [ACTION_MARKS.get(action, "").ljust(width) for action, width in zip(actions, widths, strict=True)]
            yield Text("".join(marks).rstrip(), "bold", overflow="fold")
    if len(response.tokens) > MOST_TOKENS:
        yield Text(f"... {len(response.tokens) - MOST_TOKENS} more tokens", "dim")


def _style(response: ResponseTrace, index: int, done: Mapping[int, list[str]]) -> Style:
    surprisal = response.values["surprisal"][index] if "surprisal" in response.values else None
    colours = [colour for edge, colour in SHADES.values() if surprisal is not None and surprisal >= edge]
    return (_shade(colours[-1]) if colours else Style()) + Style(strike="dropped" in done.get(index, []))


def _shade(colour: str) -> Style:
    return Style(color="black", bgcolor=colour)


def _title(response: ResponseTrace, key: str) -> str:
    name = response.methods[key].name
    return _plain(name if name == key else f"{name} ({key})")
