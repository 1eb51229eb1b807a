"""docs/troubleshooting.md: what the signs look like, what is behind them, which methods act on it, and the evidence."""

from collections.abc import Iterator
from itertools import groupby

from rlstab.console import capital
from rlstab.logs.log import ALIASES, COMPLEMENTS, SUMS
from rlstab.look.diagnosis import TOGETHER
from rlstab.look.remedies import CAUSES, Remedy, remedies, table
from rlstab.signs import SIGNS

#: The beginning of the page. It is written by a command, like the pages of the methods.
HEAD = """<!-- Written by `python -m benchmarks evidence` from rlstab/look/remedies.yaml and benchmarks/results. -->

# Troubleshooting

What a run that goes wrong looks like in its metrics, what is usually behind it, and which methods act on that.
[`rlstab look`](how-to/diagnose.md) reads the log of TRL, verl or rlstab and says which of these came first, with the
figures of the methods that were compared: differences from the baseline, with 95 % intervals, for a model of 0.34M
parameters. They say whether a method acts there, not how large the effect would be in your run. Other methods have not
been compared on such a run, which does not mean that they do not work.
"""


def page() -> str:
    """The whole page."""
    parts = [
        HEAD,
        *_symptoms(),
        *(line for remedy in remedies().values() for line in _cause(remedy)),
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


def _cause(remedy: Remedy) -> Iterator[str]:
    yield f"## {capital(remedy.title)}"
    yield ""
    for sign in (SIGNS[name] for name, cause in CAUSES.items() if cause == remedy.cause):
        metrics = "" if all(name in sign.definition for name in sign.reads) else f" ({_quoted(sign.reads)})"
        yield f"- Sign: **{sign.title}**{metrics}: {sign.definition}."
    yield f"- Likely: {'; '.join(remedy.likely)}."
    yield f"- **First:** {remedy.first}"
    yield f"- Settings: {'; '.join(f'{host} {_quoted(names)}' for host, names in remedy.settings.items())}."
    if against := _against(remedy):
        yield f"- Against it: {against}."
    if remedy.evidence:
        yield f"- Compared: {_compared(remedy)}."
    yield ""


def _against(remedy: Remedy) -> str:
    """The methods and stages that remedies.yaml names; the index of methods has the others by their source."""
    links = [f"[`{name}`](methods/{name}.md)" for name in table()[remedy.cause]["methods"]]
    links += [f"[`{name}`](stages/{name}.md)" for name in remedy.stages]
    if remedy.sources:
        links.append(f"[all under {' and '.join(remedy.sources)}](methods/index.md#what-each-is-against)")
    return ", ".join(links)


def _compared(remedy: Remedy) -> str:
    """The comparisons of a section, with a link to the results of each."""
    rows = [(name, figures[0].bench, figures[0].setting) for name, figures in remedy.evidence]
    told = []
    for (bench, setting), methods in groupby(rows, lambda row: row[1:]):
        where = bench if setting == "default" else f"{bench}, {setting}"
        told.append(f"[{where}](results.md#{_anchor(bench)}) ({_quoted(tuple(name for name, *_ in methods))})")
    return "; ".join(told)


def _names() -> Iterator[str]:
    yield "## What the metrics are called"
    yield ""
    yield "Prefixes such as `train/` do not matter."
    yield ""
    yield "| rlstab | other trainers: the first that is present |"
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
