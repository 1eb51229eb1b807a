"""docs/troubleshooting.md: what the signs look like, what is behind them, which methods act on it, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rlstab.logs.metric_aliases import ALIASES, COMPLEMENTS, SUMS
from rlstab.look.diagnosis import CAUSES, TOGETHER
from rlstab.look.remedies import Figure, Remedy, remedies, table
from rlstab.signs import SIGNS

#: The comparisons of a section: methods with their figures.
Evidence = tuple[tuple[str, tuple[Figure, ...]], ...]

#: The beginning of the page. It is written by a command, like the pages of the methods.
HEAD = """<!-- Written by `python -m benchmarks evidence` from rlstab/look/remedies.yaml and benchmarks/results. -->

# Troubleshooting

What a run that goes wrong looks like in its metrics, what is usually behind it, and which methods act on that.
[`rlstab look`](how-to/diagnose.md) reads the log of TRL, verl or rlstab and says which of these came first. Figures are
differences from the baseline of a bench, as means over seeds with 95 % intervals, for a model of 0.34M parameters: they
say whether a method acts there, not how large the effect would be in your run. A section without figures has methods
that were not compared on such a run, which does not mean that they do not work.
"""


def page() -> str:
    """The whole page."""
    shown: dict[Evidence, str] = {}
    parts = [
        HEAD,
        *_symptoms(),
        *(line for remedy in remedies().values() for line in _cause(remedy, shown)),
        *_names(),
    ]
    return "\n".join(parts) + "\n"


def _symptoms() -> Iterator[str]:
    for remedy in remedies().values():
        yield f"- [{remedy.looks.removesuffix('.')}](#{_anchor(remedy.title)})"
    yield ""
    yield (
        f"Signs are judged over bins of ten steps, as in the report. What begins within {TOGETHER} steps of another "
        f"sign begins together with it, and what explains the others comes first."
    )
    yield ""


def _cause(remedy: Remedy, shown: dict[Evidence, str]) -> Iterator[str]:
    """One section; ``shown`` has the section of each comparison that is on the page, which is not printed again."""
    yield f"## {_capital(remedy.title)}"
    yield ""
    for sign in (SIGNS[name] for name, cause in CAUSES.items() if cause == remedy.cause):
        metrics = "" if all(name in sign.definition for name in sign.reads) else f" ({_quoted(sign.reads)})"
        yield f"- Sign: **{sign.title}**{metrics}: {sign.definition}."
    yield f"- Likely: {'; or '.join(remedy.likely)}."
    yield f"- **First:** {remedy.first}"
    for host, names in remedy.settings.items():
        yield f"- {host}: {_quoted(names)}"
    if against := _against(remedy):
        yield f"- Against it: {against}."
    if remedy.evidence in shown:
        yield f"- Figures: see [{shown[remedy.evidence]}](#{_anchor(shown[remedy.evidence])})."
    yield ""
    if remedy.evidence and remedy.evidence not in shown:
        shown[remedy.evidence] = remedy.title
        yield from _evidence(remedy)


def _against(remedy: Remedy) -> str:
    """The methods and stages that remedies.yaml names; the index of methods has the others by their source."""
    links = [f"[`{name}`](methods/{name}.md)" for name in table()[remedy.cause]["methods"]]
    links += [f"[`{name}`](stages/{name}.md)" for name in remedy.stages]
    if remedy.sources:
        links.append(f"[all under {' and '.join(remedy.sources)}](methods/index.md#what-each-is-against)")
    return ", ".join(links)


def _evidence(remedy: Remedy) -> Iterator[str]:
    def bench(row: tuple[str, Sequence[Figure]]) -> tuple[str, str, str, int, tuple[str, ...]]:
        first = row[1][0]
        return first.bench, first.setting, first.baseline, first.seeds, tuple(figure.outcome for figure in row[1])

    for (name, setting, baseline, seeds, outcomes), rows in groupby(remedy.evidence, bench):
        where = name if setting == "default" else f"{name}, {setting}"
        titles = [f"[{where}](results.md#{_anchor(name)}) against {baseline}, {seeds} seeds", *outcomes]
        yield f"| {' | '.join(titles)} |"
        yield "|---" * len(titles) + "|"
        for method, figures in rows:
            cells = [figure.told.removeprefix(f"{figure.outcome} ") for figure in figures]
            yield f"| {' | '.join([method, *cells])} |"
        yield ""


def _names() -> Iterator[str]:
    yield "## What the metrics are called"
    yield ""
    yield "Prefixes such as `train/` do not matter."
    yield ""
    yield "| rlstab | other trainers: the first that is there |"
    yield "|---|---|"
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
