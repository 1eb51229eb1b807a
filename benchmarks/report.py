"""All goals, from the results that are kept: prints them, and writes the tables of docs/performance.md.

    python -m benchmarks report

A value is that of the newest run that has both sides of its ratio, and of its worst shape and dtype. Where an earlier
run has one too, a change for the worse by more than 15 % is marked.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.goals import SMALL, Found, Goal, evaluate, load
from benchmarks.protocol import RESULTS, ROOT, Record, read

PAGE = ROOT / "docs" / "performance.md"
REGRESSION = 0.15
WORDS = {"aim": "aim reached", "must": "must reached", "missed": "**missed**", "unmeasured": "not measured"}
Row = tuple[str, ...]


def goal_rows(goals: list[Goal], records: list[Record]) -> list[Row]:
    """Cells of the table of goals."""
    counted = [record for record in records if record.get("preset") not in SMALL]
    rows = []
    for goal in goals:
        now, before = evaluate(goal, counted), evaluate(goal, counted, back=1)
        verdict = WORDS[goal.judge(now.value if now else None)]
        sign = "≥" if goal.better == "higher" else "≤"
        rows.append(
            (
                goal.row,
                goal.says,
                f"{sign} {goal.limits.must:g}",
                f"{sign} {goal.limits.aim:g}",
                _measured(now),
                _change(goal, now, before),
                f"{verdict}: {goal.unmeasured}" if goal.unmeasured else verdict,
            )
        )
    return rows


def _measured(value: Found | None) -> str:
    if value is None:
        return "-"
    if len(value.values) < 2:
        return f"{value.value:.3g}"
    low, high = min(value.values.values()), max(value.values.values())
    return f"{value.value:.3g} ({value.where}; all: {low:.3g} to {high:.3g})"


def _change(goal: Goal, now: Found | None, before: Found | None) -> str:
    """The earlier value of the same comparison, marked where the new one is worse by more than 15 %."""
    if now is None or before is None or now.where not in before.values:
        return ""
    old = before.values[now.where]
    worse = (old / now.value if goal.better == "higher" else now.value / old) - 1
    return f"{old:.3g}{' **regression**' if worse > REGRESSION else ''}"


def prompt_rows(records: list[Record]) -> list[Row]:
    """Of the newest run over each model and shape, what shared prompts save."""
    newest = {
        (record["model"], *record["shape"]): record
        for record in records
        if record["benchmark"] == "prompts" and record["case"] == "shared prompts"
    }
    rows = []
    for (model, groups, group, prompt, response), record in newest.items():
        times = record["ratio_to"]["whole rows"]
        rows.append((model, f"{groups} x {group}", f"{prompt} + {response}", f"{record['tokens']:.0%}", f"{times:.2f}"))
    return rows


def markdown(titles: Row, rows: Iterable[Row]) -> str:
    """A table."""
    head, *body = ("| " + " | ".join(line) + " |" for line in (titles, *rows))
    return "\n".join([head, "|---" * len(titles) + "|", *body])


def fill(page: str, name: str, text: str, by: str = "report") -> str:
    """The page with what stands between two comments replaced; ``by`` is the command that does it.

    Raises:
        ValueError: the page has no such section.
    """
    start, end = f"<!-- {name}: written by `python -m benchmarks {by}` -->", f"<!-- end of {name} -->"
    if start not in page or end not in page:
        raise ValueError(f"the page has no place for '{name}': expected the lines {start} and {end}.")
    before, _, rest = page.partition(start)
    return f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def write(page: Path, goals: list[Goal], records: list[Record]) -> None:
    """The generated parts of the page."""
    text = page.read_text(encoding="utf-8")
    rows = [
        (row, says, f"{must}, {aim.split()[-1]}", measured, verdict.removesuffix(" reached"))
        for row, says, must, aim, measured, _, verdict in goal_rows(goals, records)
    ]
    text = fill(text, "goals", markdown(("row", "goal", "must, aim", "measured", "reached"), rows))
    titles = ("model", "groups x responses", "prompt + response, tokens", "tokens forwarded", "times faster")
    text = fill(text, "prompts", markdown(titles, prompt_rows(records)))
    page.write_text(text, encoding="utf-8")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--page", type=Path, default=PAGE)
    options = arguments.parse_args()
    goals, records = load(), read(options.results)
    drawn = Table("row", "goal", "must", "aim", "measured", "before", "verdict")
    for row in goal_rows(goals, records):
        drawn.add_row(*map(escape, row))
    Console().print(drawn)
    write(options.page, goals, records)


if __name__ == "__main__":
    main()
