"""docs/atlas.md, made of rows.yaml: ``python -m tests.atlas.page`` writes it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).parents[2] / "docs/atlas.md"
HEAD = """<!-- Written by `python -m tests.atlas.page` from tests/atlas/rows.yaml. -->

# Atlas of trainers' errors

Errors of released trainers that change the gradient without a word in the log. Each number but those marked *read* was
measured in the code of the release that the row names, on a CPU; `nox -s atlas` measures again.
[`rlstab look`](how-to/look.md) compares the loss of a dump with what the trainer says it is, and
[`assert_cut_free`](how-to/test-your-loss.md) finds what depends on the micro-batches without a run.

| trainer | where | what happens | in numbers | how it shows | what to do |
|---|---|---|---|---|---|
"""
FOOT = """
Found another? Add a row to `tests/atlas/rows.yaml`, with a function in `measures.py` that gives its number, and run
`python -m tests.atlas.page`.
"""


@cache
def rows() -> list[dict[str, Any]]:
    """All errors, in the order of the page."""
    found: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "rows.yaml").read_text(encoding="utf-8"))
    return found


def lines() -> Iterator[str]:
    """A line of the table for each error."""
    for row in rows():
        releases = [
            row["trainer"],
            row.get("release", ""),
            f"(until {row['until']})" if "until" in row else "",
            "" if "release" in row else "*read*",
        ]
        upstream = f" ([upstream]({row['thread']}))" if "thread" in row else ""
        number = row["number"].format(row.get("expected"))
        cells = [" ".join(filter(None, releases)), row["where"], row["does"], f"{number}{upstream}"]
        yield f"| {' | '.join([*cells, row['shown'], row['remedy']])} |"


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(lines()) + "\n" + FOOT


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
