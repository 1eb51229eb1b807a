"""What a person sees while a run goes on, and when it ends."""

from __future__ import annotations

import io

from rich.console import Console

from rlstab.train.progress import Progress, summary_table


def test_refused_optimizer_steps_are_shown_while_a_run_goes_on() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(console, 10, 0, shown=True) as progress:
        progress.show(3, {"reward/mean": 0.25, "optimizer_steps/refused": 2})
    assert isinstance(console.file, io.StringIO)
    assert "reward 0.250" in console.file.getvalue()
    assert "refused 2" in console.file.getvalue()


def test_counts_of_optimizer_steps_are_summed_at_the_end() -> None:
    records = [
        {"rollout": 1, "reward/mean": 0.5, "optimizer_steps/skipped": 2},
        {"rollout": 2, "reward/mean": 0.5, "optimizer_steps/skipped": 1},
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(records))
    assert isinstance(console.file, io.StringIO)
    rows = {
        line.split("│")[1].strip(): line.split("│")[3].strip()
        for line in console.file.getvalue().splitlines()
        if "│" in line
    }
    assert rows["optimizer_steps/skipped"] == "3"
    assert rows["rollouts"] == "2"
    assert "rollout" not in rows
