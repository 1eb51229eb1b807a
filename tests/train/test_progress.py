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


def lines(rollouts: int, seconds: float, done: int = 0) -> list[str]:
    """What a file gets of a run whose rollouts take so long."""
    console, now = Console(file=io.StringIO(), width=40, force_terminal=False), [0.0]
    with Progress(console, rollouts, done, shown=True, clock=lambda: now[0]) as progress:
        for rollout in range(done + 1, rollouts + 1):
            now[0] += seconds
            progress.show(rollout, {"reward/mean": 0.25, "gradient/norm": 0.5, "eval/mean": 0.125})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_file_gets_a_line_per_interval() -> None:
    found = lines(100, 7.0)
    assert found[0] == ("rollout 1/100 reward 0.250 grad 0.500 held-out 0.125, 0:11:33 left; one line every 30 s")
    assert [int(one.split()[1].split("/")[0]) for one in found] == [1, *range(6, 100, 5), 100]
    assert found[-1] == "rollout 100/100 reward 0.250 grad 0.500 held-out 0.125, 0:00:00 left"


def test_a_slow_run_gets_a_line_for_each_rollout_and_a_fast_one_two() -> None:
    assert len(lines(5, 3600.0)) == 5
    assert lines(5, 3600.0, done=2)[0].startswith("rollout 3/5 reward 0.250 grad 0.500 held-out 0.125, 2:00:00 left")
    assert len(lines(1000, 0.001)) == 2


def test_other_ranks_write_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with Progress(console, 2, 0, shown=False) as progress:
        progress.show(1, {"reward/mean": 0.25})
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
