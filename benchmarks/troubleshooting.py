"""docs/troubleshooting.md: what the signs look like, what is behind them, which methods act on it, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rlstab.logs.metric_aliases import ALIASES, COMPLEMENTS, SUMS
from rlstab.look.diagnosis import CAUSES, TOGETHER
from rlstab.look.remedies import Figure, Remedy, remedies
from rlstab.signs import SIGNS

#: The beginning of the page. It is written by a command, like the pages of the methods.
HEAD = """<!-- Written by `python -m benchmarks evidence` from rlstab/look/remedies.yaml and benchmarks/results. -->

# Troubleshooting

What a run that goes wrong looks like in its metrics, what is usually behind it, which methods act on that, and what was
measured here. [`rlstab look`](how-to/diagnose.md) reads the log of TRL, verl or rlstab and says which of these came
first; this page is written from the same table. Figures are differences from the baseline of a bench, as means over
seeds with 95 % intervals, on tasks for a model of 0.34M parameters. They say whether a method acts there, not how large
the effect would be in your run. A method without a figure has not been measured here, which does not mean that it does
not work.
"""


def page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        *_symptoms(),
        *(line for remedy in remedies().values() for line in _cause(remedy)),
        *_signs(),
        *_names(),
    ]
    return "\n".join(parts) + "\n"


def _symptoms() -> Iterator[str]:
    yield "| what you see | section |"
    yield "| --- | --- |"
    for remedy in remedies().values():
        yield f"| {remedy.looks} | [{remedy.title}](#{_anchor(remedy.title)}) |"
    yield ""


def _cause(remedy: Remedy) -> Iterator[str]:
    yield f"## {_capital(remedy.title)}"
    yield ""
    shows = [
        f"{SIGNS[sign].title} ({_quoted(SIGNS[sign].reads)})" for sign, cause in CAUSES.items() if cause == remedy.cause
    ]
    yield f"Signs: {'; '.join(shows)}."
    yield ""
    yield f"Likely: {'; or '.join(remedy.likely)}."
    yield ""
    yield f"**First:** {remedy.first}"
    yield ""
    for host, names in remedy.settings.items():
        yield f"- {host}: {_quoted(names)}"
    yield ""
    if remedy.sources:
        yield f"[Sources of instability](concepts/instabilities.md): {', '.join(remedy.sources)}."
        yield ""
    links = [f"[`{name}`](methods/{name}.md)" for name in remedy.methods]
    links += [f"[`{name}`](stages/{name}.md)" for name in remedy.stages]
    yield f"Against it: {', '.join(links)}."
    yield ""
    if remedy.evidence:
        yield from _evidence(remedy)
    else:
        yield "No evidence here: none of these methods has been compared on a run of this kind."
        yield ""


def _evidence(remedy: Remedy) -> Iterator[str]:
    def bench(row: tuple[str, Sequence[Figure]]) -> tuple[str, str, str, int]:
        first = row[1][0]
        return first.bench, first.setting, first.baseline, first.seeds

    for (name, setting, baseline, seeds), rows in groupby(remedy.evidence, bench):
        where = name if setting == "default" else f"{name}, {setting}"
        yield f"| [{where}](results.md#{_anchor(name)}) | against {baseline}, {seeds} seeds |"
        yield "| --- | --- |"
        for method, figures in rows:
            yield f"| {method} | {'; '.join(figure.told for figure in figures)} |"
        yield ""


def _signs() -> Iterator[str]:
    yield "## When a sign is there"
    yield ""
    yield (
        f"Over bins of ten steps, as in the report. What begins within {TOGETHER} steps of another sign begins "
        f"together with it, and what explains the others comes first."
    )
    yield ""
    yield "| sign | definition |"
    yield "| --- | --- |"
    for name in SIGNS:
        yield f"| {SIGNS[name].title} | {SIGNS[name].definition} |"
    yield ""


def _names() -> Iterator[str]:
    yield "## What the metrics are called"
    yield ""
    yield "Prefixes such as `train/` do not matter."
    yield ""
    yield "| rlstab | elsewhere, the first that is there |"
    yield "| --- | --- |"
    for ours, foreign in ALIASES.items():
        names = [f"1 - `{name}`" if name in COMPLEMENTS else f"`{name}`" for name in foreign]
        shown = f"`{ours}`" + (f" ({' + '.join(f'`{part}`' for part in SUMS[ours])})" if ours in SUMS else "")
        yield f"| {shown} | {', '.join(names)} |"


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _anchor(heading: str) -> str:
    """As GitHub makes it: letters, digits, hyphens and underscores stay."""
    kept = "".join(
        character for character in heading.lower().replace(" ", "-") if character.isalnum() or character in "-_"
    )
    return kept


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
