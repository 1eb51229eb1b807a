"""The token viewer in a terminal: a quick look at the responses on which the methods acted most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, Group
from rich.style import Style
from rich.text import Text

from rlstab.report.tokens import Sample, Tokens
from rlstab.report.view import everywhere
from rlstab.visible import visible

#: Under a token, by what was done to it.
MARKS = {"dropped": "x", "boosted": "^", "damped": "v", "clipped": "#", "regularised": "~", "exempt": "o"}
#: Background from a surprisal on, nats: the probabilities are 0.5, 0.1, 0.01 and 0.002. Text is black on it.
SHADES = ((-math.log(0.5), "#c9e3d2"), (-math.log(0.1), "#8ac5c8"), (-math.log(0.01), "#539bc2"), (6.2146, "#e08a4c"))
LABELS = ("0.5", "0.1", "0.01", "0.002")
#: Longer responses are cut here: for them there is the page.
MOST_TOKENS = 600


def show(found: Tokens, console: Console) -> None:
    """Print responses, those of the largest influence first.

    Texts are printed as data: neither markup nor control characters in them have an effect.
    """
    always = everywhere(found.samples)
    console.print(_legend())
    for note in found.notes:
        console.print(Text(visible(note, spaces=False), style="yellow"))
    for key, action in sorted(always):
        console.print(Text(f"{_key(found.samples[0], key)}: every token is {action}; not marked", style="dim"))
    for sample in sorted(found.samples, key=lambda one: -sum(one.influence())):
        console.print()
        console.print(_sample(sample, always, console.width))


def _legend() -> Text:
    legend = Text("p at most ")
    for (_, colour), label in zip(SHADES, LABELS, strict=True):
        legend.append(f" {label} ", _shade(colour)).append(" ")
    legend.append(" ")
    for action, mark in MARKS.items():
        legend.append(f" {mark}", "bold").append(f" {action}")
    return legend


def _sample(sample: Sample, always: set[tuple[str, str]], width: int) -> Group:
    done: dict[int, list[str]] = {}
    by_method: dict[str, Counter[str]] = {}
    for key, method in sorted(sample.methods.items()):
        for action, places in method.actions.items():
            if (key, action) not in always:
                by_method.setdefault(_key(sample, key), Counter())[action] += len(places)
                for place in places:
                    if action not in done.setdefault(place, []):
                        done[place].append(action)
    head = Text(f"rollout {sample.rollout}", "bold")
    if sample.optimizer_step is not None:
        head.append(f", optimizer step {sample.optimizer_step}")
    head.append(f"  response {visible(sample.response)}", "not bold")
    for name, value in (("reward", sample.reward), ("advantage", _one(sample)), ("influence", sum(sample.influence()))):
        if value is not None:
            head.append(f"  {name} {value:+.3g}" if name == "advantage" else f"  {name} {value:.3g}", "not bold")
    lines: list[Text] = [head]
    if sample.prompt:
        prompt = visible(sample.prompt.strip(), spaces=False).splitlines()
        lines.append(Text("\n".join(prompt[-4:]), "dim"))
    lines += _text(sample, done, width)
    acted = [f"{key} {action} {count}" for key, all_of in by_method.items() for action, count in all_of.items()]
    lines.append(Text(", ".join(acted) or "no method touched a token", "dim italic"))
    return Group(*lines)


def _text(sample: Sample, done: dict[int, list[str]], width: int) -> Iterator[Text]:
    """Lines of tokens, each followed by as many lines of marks as its tokens need."""
    row: list[tuple[str, int]] = []
    used = 0
    for place, token in enumerate(sample.tokens[:MOST_TOKENS]):
        shown = visible(token) if token else f"⟨{sample.ids[place] if sample.ids else 'no text'}⟩"
        length = cell_len(shown)
        if row and used + length > width:
            yield from _row(sample, done, row)
            row, used = [], 0
        row.append((shown, place))
        used += length
        if "\n" in token:
            yield from _row(sample, done, row)
            row, used = [], 0
    if row:
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
            marks.append((MARKS[actions[level]] if level < len(actions) else " ").ljust(cell_len(shown)))
        marks.rstrip()
        yield marks


def _style(sample: Sample, place: int, actions: list[str]) -> Style:
    surprisal = sample.surprisal[place] if sample.surprisal else None
    colours = [colour for edge, colour in SHADES if surprisal is not None and surprisal >= edge]
    return (_shade(colours[-1]) if colours else Style()) + Style(strike="dropped" in actions)


def _shade(colour: str) -> Style:
    return Style(color="black", bgcolor=colour)


def _key(sample: Sample, key: str) -> str:
    name = sample.methods[key].name
    return visible(name if name == key else f"{name} ({key})", spaces=False)


def _one(sample: Sample) -> float | None:
    known = {one for one in sample.advantages if one is not None}
    return known.pop() if len(known) == 1 else None
