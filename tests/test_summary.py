"""The last lines of a run, and the bar before them, on terminals of several widths."""

import io
import math

import pytest
from rich.console import Console

from rlstab.summary import start_and_end, summary
from rlstab.train.tracking import ProgressBar
from tests.train.runs import printed


def records(count: int, **metrics: tuple[float, float]) -> list[dict[str, float]]:
    """Metrics that move evenly from one value to another."""
    named = {name.replace("__", "/"): ends for name, ends in metrics.items()}
    steps = [step / max(1, count - 1) for step in range(count)]
    return [
        {"rollout": index, **{name: start + share * (end - start) for name, (start, end) in named.items()}}
        for index, share in enumerate(steps, 1)
    ]


def test_start_and_end_are_means_over_a_tenth() -> None:
    assert start_and_end([1.0]) == (1.0, 1.0)
    assert start_and_end([0.0, 2.0, *[9.0] * 16, 4.0, 6.0]) == (1.0, 5.0)


def test_three_lines_say_what_rose_what_fell_and_what_stood_out() -> None:
    run = records(4, eval__mean=(0.156, 0.256), eval__greedy=(0.324, 0.316), response__length=(100.0, 100.5))
    rose, fell, signs = summary(run)
    assert (rose, fell) == ("rose: eval/mean 0.156 to 0.256", "fell: eval/greedy 0.324 to 0.316")
    assert signs == "stood out: the run is too short for any sign"
    still = summary(records(200, reward__mean=(0.5, 0.5)))
    assert still == ["rose: nothing", "fell: nothing", "stood out: nothing"]
    broken = [{**record, "reward/mean": 0.5 if record["rollout"] <= 100 else 0.01} for record in records(200)]
    assert summary(broken)[1] == "fell: reward/mean 0.500 to 0.0100"
    assert "reward fall (from rollout " in summary(broken)[2]


@pytest.mark.parametrize("metric", ["eval/mean", "reward/mean"])
def test_a_value_that_is_not_finite_neither_rose_nor_fell(metric: str) -> None:
    assert summary([{"rollout": 1, metric: 0.5}, {"rollout": 2, metric: math.nan}])[:2] == [
        "rose: nothing",
        "fell: nothing",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("total", [180, 100_000])
def test_the_bar_keeps_count_and_reward_on_every_terminal(width: int, total: int) -> None:
    values = {"reward/mean": 0.25, "eval/mean": 0.3, "tokens/entropy": 0.2, "gradient/norm": 1.0, "tokens/kept": 1.0}
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bar = ProgressBar(console, total, 0, shown=True)
    bar.show(60, values)
    plain = Console(file=io.StringIO(), width=width)
    plain.print(bar.make_tasks_table(bar.tasks))
    (line,) = printed(plain).splitlines()
    assert f"60/{total}" in line
    assert "reward 0.250" in line
    assert "…" not in line
    assert width < 80 or "held-out 0.300" in line
    assert width < 120 or "grad 1.000" in line
