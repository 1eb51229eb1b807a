"""The token viewer: one HTML file that holds everything it needs, and a short form for the terminal."""

from __future__ import annotations

import base64
import hashlib
import heapq
import html
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.style import Style
from rich.text import Text

from rlstab.errors import ReportError
from rlstab.files import is_foreign
from rlstab.report.safe_read import read_json
from rlstab.report.token_traces import Method, Numbers, Sample, Tokens, read_tokens
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
    out = Path(out)
    try:
        if is_foreign(out, MARK):
            raise ReportError(
                f"{out} exists, is not a page of the viewer, and stays as it is. Give --out another file."
            )
        out.write_text(page(traces, source), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{out}: cannot be written: {error.strerror}. Give --out another file.") from error
    return out


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


def page(traces: Tokens, source: Path) -> str:
    """The HTML of some samples. It asks for nothing, and nothing that a file says is read as HTML or script."""
    folder = resources.files("rlstab.report")
    style, script = ((folder / f"view.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        f"form-action 'none'"
    )
    return Template((folder / "view.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        title=html.escape(visible(f"Tokens of {_named(source)}", spaces=False)),
        style=style,
        script=script,
        data=_inert(_data(traces, source)),
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
    place = read_json(folder / "bench.json")[0] or {}
    parts = [str(place[key]) for key in ("bench", "setting", "method") if place.get(key)]
    return ", ".join([*parts, f"seed {place['seed']}"]) if parts and "seed" in place else source.resolve().name


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _inert(data: Any) -> str:
    """JSON that is safe in a script element: no text in it ends the element or opens a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def _data(traces: Tokens, source: Path) -> dict[str, Any]:
    names: dict[str, str] = {}
    acts: dict[str, set[str]] = defaultdict(set)
    always = everywhere(traces.samples)
    for sample in traces.samples:
        for key, method in sample.methods.items():
            names[key] = method.name
            acts[key] |= {action for action in method.actions if (key, action) not in always}
    return {
        "source": _plain(str(source)),
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
    influence = sample.influence()
    columns: dict[str, Numbers] = {
        "surprisal": sample.surprisal,
        "entropy": sample.entropies,
        "advantage": sample.advantages,
        "ratio": sample.ratio,
        "weight": sample.weight,
        "bonus": sample.bonus,
        "gate": sample.gate,
        "influence": [_short(value) for value in influence],
    }
    return {
        "rollout": sample.rollout,
        "optimizer": sample.optimizer_step,
        "response": _plain(sample.response),
        "group": None if sample.group is None else _plain(sample.group),
        "prompt": _plain(sample.prompt),
        "reward": sample.reward,
        "tokens": list(map(visible, sample.tokens)),
        "ids": sample.ids,
        "total": _short(sum(influence)),
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
#: Background from a surprisal on, nats: the probabilities are 0.5, 0.1, 0.01 and 0.002. Text is black on it.
SHADES = ((-math.log(0.5), "#c9e3d2"), (-math.log(0.1), "#8ac5c8"), (-math.log(0.01), "#539bc2"), (6.2146, "#e08a4c"))
LABELS = ("0.5", "0.1", "0.01", "0.002")
#: Longer responses are cut here: for them there is the page.
MOST_TOKENS = 600


def show(traces: Tokens, console: Console) -> None:
    """Print responses, those of the largest influence first.

    Texts are printed as data: neither markup nor control characters in them have an effect.
    """
    always = everywhere(traces.samples)
    console.print(_legend())
    for note in traces.notes:
        console.print(Text(_plain(note), style="yellow"))
    for key, action in sorted(always):
        console.print(Text(f"{_title(traces.samples[0], key)}: every token is {action}; not marked", style="dim"))
    for sample in sorted(traces.samples, key=lambda sample: -sum(sample.influence())):
        console.print()
        console.print(_shown(sample, always, console.width))


def _legend() -> Text:
    legend = Text("p at most ")
    for (_, colour), label in zip(SHADES, LABELS, strict=True):
        legend.append(f" {label} ", _shade(colour)).append(" ")
    legend.append(" ")
    for action, mark in ACTION_MARKS.items():
        legend.append(f" {mark}", "bold").append(f" {action}")
    return legend


def _shown(sample: Sample, always: set[tuple[str, str]], width: int) -> Group:
    done: dict[int, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for key, method in sorted(sample.methods.items()):
        for action, places in method.actions.items():
            if (key, action) not in always:
                counts[f"{_title(sample, key)} {action}"] += len(places)
                for place in places:
                    if action not in done[place]:
                        done[place].append(action)
    head = Text(f"rollout {sample.rollout}", "bold")
    if sample.optimizer_step is not None:
        head.append(f", optimizer step {sample.optimizer_step}")
    head.append(f"  response {visible(sample.response)}", "not bold")
    advantages = set(sample.advantages)
    for name, value, sign in (
        ("reward", sample.reward, ""),
        ("advantage", advantages.pop() if len(advantages) == 1 else None, "+"),
        ("influence", sum(sample.influence()), ""),
    ):
        if value is not None:
            head.append(f"  {name} {value:{sign}.3g}", "not bold")
    lines: list[Text] = [head]
    if sample.prompt:
        lines.append(Text("\n".join(_plain(sample.prompt.strip()).splitlines()[-4:]), "dim"))
    lines += _text(sample, done, width)
    acted = ", ".join(f"{name} {count}" for name, count in counts.items())
    lines.append(Text(acted or "no method touched a token", "dim italic"))
    return Group(*lines)


def _text(sample: Sample, done: dict[int, list[str]], width: int) -> Iterator[Text]:
    """Lines of tokens, each followed by as many lines of marks as its tokens need."""
    row: list[tuple[str, int]] = []
    used, broken = 0, False
    for place, token in enumerate(sample.tokens[:MOST_TOKENS]):
        shown = visible(token) if token else f"⟨{sample.ids[place] if sample.ids else 'no text'}⟩"
        if row and (broken or used + cell_len(shown) > width):
            yield from _row(sample, done, row)
            row, used = [], 0
        row.append((shown, place))
        used, broken = used + cell_len(shown), "\n" in token
    yield from _row(sample, done, row)
    if len(sample.tokens) > MOST_TOKENS:
        yield Text(f"... {len(sample.tokens) - MOST_TOKENS} more tokens", "dim")


def _row(sample: Sample, done: dict[int, list[str]], row: list[tuple[str, int]]) -> Iterator[Text]:
    text = Text(overflow="fold")
    for shown, place in row:
        text.append(shown, _style(sample, place, done.get(place, [])))
    yield text
    for level in range(max(len(done.get(place, [])) for _, place in row)):
        marks = Text(style="bold", overflow="fold")
        for shown, place in row:
            actions = done.get(place, [])
            marks.append((ACTION_MARKS[actions[level]] if level < len(actions) else " ").ljust(cell_len(shown)))
        marks.rstrip()
        yield marks


def _style(sample: Sample, place: int, actions: list[str]) -> Style:
    surprisal = sample.surprisal[place] if sample.surprisal else None
    colours = [colour for edge, colour in SHADES if surprisal is not None and surprisal >= edge]
    return (_shade(colours[-1]) if colours else Style()) + Style(strike="dropped" in actions)


def _shade(colour: str) -> Style:
    return Style(color="black", bgcolor=colour)


def _title(sample: Sample, key: str) -> str:
    name = sample.methods[key].name
    return _plain(name if name == key else f"{name} ({key})")
