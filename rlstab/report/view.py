"""The token viewer: one HTML file that holds everything it needs, and a short form for the terminal."""

from __future__ import annotations

import heapq
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

from rlstab.errors import ReportError
from rlstab.report.output import digest, refuse_foreign, resource, safe_json, write_text
from rlstab.report.token_traces import Method, Numbers, Sample, Tokens, read_tokens
from rlstab.safe_read import read_mapping
from rlstab.trace.effects import ACTIONS
from rlstab.visible import visible

#: Responses on a page, and in the terminal, where nothing else is asked for.
PAGE_LIMIT, TERMINAL_LIMIT = 2000, 8

#: What a page of ours has in its title.
MARK = b"<title>Tokens of "


def write_view(
    source: str | Path,
    out: str | Path | None = None,
    *,
    rollout: int | None = None,
    limit: int | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Write the page of a trace, and return where.

    Args:
        source: see :func:`rlstab.report.token_traces.read_tokens`.
        out: of the page; None is ``view.html`` in a run folder, or the name of the trace file with ``.html``.
        rollout: only this one.
        limit: responses, those of the largest influence; None is 2000.
        tokenizer: see :func:`rlstab.report.token_traces.read_tokens`.

    Raises:
        ReportError: nothing to show, or the page cannot be written.
    """
    source = Path(source)
    traces = choose(read_tokens(source, tokenizer), rollout, PAGE_LIMIT if limit is None else limit)
    if out is None:
        out = source / "view.html" if source.is_dir() else source.with_suffix(".html")
    refuse_foreign(Path(out), [MARK], "a page of the viewer", "--out")
    return write_text(Path(out), page(traces, _named(source), str(source)), "--out")


def choose(traces: Tokens, rollout: int | None, limit: int) -> Tokens:
    """The samples of one rollout, and of these at most ``limit``, those of the largest influence, in their order.

    Raises:
        ReportError: no sample of this rollout, or no sample wanted.
    """
    if limit < 1:
        raise ReportError(f"--limit {limit}: expected a number of at least 1.")
    samples = [sample for sample in traces.samples if rollout is None or sample.rollout == rollout]
    if not samples:
        traced = sorted({sample.rollout for sample in traces.samples})
        raise ReportError(f"rollout {rollout} was not traced. Give one of {', '.join(map(str, traced))}.")
    notes = list(traces.notes)
    if len(samples) > limit:
        notes.append(
            f"{len(samples)} responses were read; here are the {limit} of the largest influence. --limit changes that."
        )
        largest = heapq.nlargest(limit, range(len(samples)), key=lambda place: sum(samples[place].influence()))
        samples = [samples[place] for place in sorted(largest)]
    return Tokens(samples, notes)


def page(traces: Tokens, title: str, source: str = "") -> str:
    """The HTML of some samples. It asks for nothing, and nothing in its arguments is read as HTML or script.

    Args:
        traces: at least one sample; notes stand above them.
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


def everywhere(samples: Sequence[Sample]) -> set[tuple[str, str]]:
    """Keys of methods with what they do to every token of every sample: marks would only hide the rest."""
    each = [
        {
            (key, action)
            for key, method in sample.methods.items()
            for action, places in method.actions.items()
            if len(places) == len(sample.tokens)
        }
        for sample in samples
    ]
    return set.intersection(*each) if each else set()


def _named(source: Path) -> str:
    """A run of a bench is named by what the bench calls it: of the folder, ``seed-0`` alone says nothing."""
    folder = source if source.is_dir() else source.parent
    place = read_mapping(folder / "bench.json")[0] or {}
    parts = [str(place[key]) for key in ("bench", "setting", "method") if place.get(key)]
    return ", ".join([*parts, f"seed {place['seed']}"]) if parts and "seed" in place else source.resolve().name


def _data(traces: Tokens, source: str) -> dict[str, Any]:
    names: dict[str, str] = {}
    acts: dict[str, set[str]] = defaultdict(set)
    always = everywhere(traces.samples)
    for sample in traces.samples:
        for key, method in sample.methods.items():
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
        "samples": list(map(_sample, traces.samples)),
    }


def _plain(text: str) -> str:
    return visible(text, spaces=False)


def _sample(sample: Sample) -> dict[str, Any]:
    influence = [_short(value) for value in sample.influence()]
    columns = {name: getattr(sample, name) for name in ("surprisal", "ratio", "weight", "bonus", "gate")}
    columns |= {"entropy": sample.entropies, "advantage": sample.advantages, "influence": influence}
    return {
        "rollout": sample.rollout,
        "optimizer": sample.optimizer_step,
        "response": _plain(sample.response),
        "group": None if sample.group is None else _plain(sample.group),
        "prompt": _plain(sample.prompt),
        "reward": sample.reward,
        "tokens": list(map(visible, sample.tokens)),
        "ids": sample.ids,
        "total": _short(sum(sample.influence())),
        "methods": {visible(key): _method(method) for key, method in sample.methods.items()},
        **{name: _column(values) for name, values in columns.items()},
    }


def _method(method: Method) -> dict[str, Any]:
    values = {"weights": method.weight, "bonuses": method.bonus, "gates": method.gate}
    return {**method.actions, **{name: list(places.items()) for name, places in values.items() if places}}


def _column(values: Numbers) -> Numbers | float | None:
    """One number where all are equal; the page reads both."""
    return values[0] if values and all(value == values[0] for value in values) else values or None


def _short(value: float) -> float:
    return float(f"{value:.4g}")


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


def show(traces: Tokens, console: Console) -> None:
    """Print responses, those of the largest influence first.

    Texts are printed as data: neither markup nor control characters in them have an effect.
    """
    always = everywhere(traces.samples)
    shades = [(f" {label} ", _shade(colour)) for label, (_, colour) in SHADES.items()]
    marks = [(f" {mark} ", "bold") for mark in ACTION_MARKS.values()]
    legend = [*shades, *(part for pair in zip(marks, ACTION_MARKS, strict=True) for part in pair)]
    console.print(Text.assemble("p at most ", *legend))
    for note in traces.notes:
        console.print(Text(_plain(note), style="yellow"))
    for key, action in sorted(always):
        console.print(Text(f"{_title(traces.samples[0], key)}: every token is {action}; not marked", style="dim"))
    for sample in sorted(traces.samples, key=lambda sample: -sum(sample.influence())):
        console.print(Text(""), *_shown(sample, always, console.width), sep="\n")


def _shown(sample: Sample, always: set[tuple[str, str]], width: int) -> Iterator[Text]:
    done: dict[int, list[str]] = defaultdict(list)
    acted = []
    for key, method in sorted(sample.methods.items()):
        for action, places in method.actions.items():
            if (key, action) not in always:
                acted.append(f"{_title(sample, key)} {action} {len(places)}")
                for place in places:
                    done[place] += [action] if action not in done[place] else []
    step = "" if sample.optimizer_step is None else f", optimizer step {sample.optimizer_step}"
    head = Text.assemble((f"rollout {sample.rollout}{step}", "bold"), f"  response {visible(sample.response)}")
    advantages = set(sample.advantages)
    for name, value, sign in (
        ("reward", sample.reward, ""),
        ("advantage", advantages.pop() if len(advantages) == 1 else None, "+"),
        ("influence", sum(sample.influence()), ""),
    ):
        if value is not None:
            head.append(f"  {name} {value:{sign}.3g}")
    yield head
    if sample.prompt:
        yield Text("\n".join(_plain(sample.prompt.strip()).splitlines()[-4:]), "dim")
    yield from _lines(sample, done, width)
    yield Text(", ".join(acted) or "no method touched a token", "dim italic")


def _lines(sample: Sample, done: Mapping[int, list[str]], width: int) -> Iterator[Text]:
    """Lines of tokens, each followed by as many lines of marks as its tokens need."""
    rows: list[list[tuple[str, int]]] = [[]]
    used = 0
    for place, token in enumerate(sample.tokens[:MOST_TOKENS]):
        shown = visible(token) if token else f"⟨{sample.ids[place] if sample.ids else 'no text'}⟩"
        if rows[-1] and ("\n" in sample.tokens[place - 1] or used + cell_len(shown) > width):
            rows.append([])
            used = 0
        rows[-1].append((shown, place))
        used += cell_len(shown)
    for row in rows:
        yield Text.assemble(*((shown, _style(sample, place, done)) for shown, place in row), overflow="fold")
        widths = [cell_len(shown) for shown, _ in row]
        for actions in zip_longest(*(done.get(place, []) for _, place in row)):
            marks = [ACTION_MARKS.get(action, "").ljust(width) for action, width in zip(actions, widths, strict=True)]
            yield Text("".join(marks).rstrip(), "bold", overflow="fold")
    if len(sample.tokens) > MOST_TOKENS:
        yield Text(f"... {len(sample.tokens) - MOST_TOKENS} more tokens", "dim")


def _style(sample: Sample, place: int, done: Mapping[int, list[str]]) -> Style:
    surprisal = sample.surprisal[place] if sample.surprisal else None
    colours = [colour for edge, colour in SHADES.values() if surprisal is not None and surprisal >= edge]
    return (_shade(colours[-1]) if colours else Style()) + Style(strike="dropped" in done.get(place, []))


def _shade(colour: str) -> Style:
    return Style(color="black", bgcolor=colour)


def _title(sample: Sample, key: str) -> str:
    name = sample.methods[key].name
    return _plain(name if name == key else f"{name} ({key})")
