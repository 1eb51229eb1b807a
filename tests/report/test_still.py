"""Figures that stand in the page without its script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from rlstab.report import still
from rlstab.report.comparison import compare
from rlstab.report.contents import contents
from rlstab.report.model import Loaded, RunRecord
from rlstab.report.opening import curve_of, opening
from rlstab.report.palette import Look
from rlstab.report.records import load_runs
from tests.report.conftest import curves, record

LOOKS = {"grpo": Look(0, 0, 0), "stare": Look(2, 1, 1)}


def runs(values: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[RunRecord]]:
    return {
        method: [record({"reward/mean": one}, method=method, seed=seed) for seed, one in enumerate(some)]
        for method, some in values.items()
    }


def ends(svg: str) -> list[tuple[float, float]]:
    """First and last height of each curve, in the drawing's units; down is more."""
    found = []
    for path in re.findall(r'class="curve"[^>]* d="M([^"]+)"', svg):
        points = [tuple(map(float, one.split())) for one in path.split("L")]
        found.append((points[0][1], points[-1][1]))
    return found


def test_a_curve_goes_where_its_mean_goes() -> None:
    up, down = np.linspace(0.2, 0.6, 60).tolist(), np.linspace(0.6, 0.2, 60).tolist()
    svg = still.curve(runs({"grpo": [up, [one + 0.1 for one in up]], "stare": [down]}), LOOKS, "reward/mean")
    assert svg is not None
    tree = ElementTree.fromstring(svg)
    assert [one.get("style") for one in tree.iter("g")] == ["color:var(--m0)", "color:var(--m2)"]
    (first, last), (other_first, other_last) = ends(svg)
    assert first > last
    assert other_first < other_last
    assert svg.count('class="band"') == 1  # one seed has no spread
    assert svg.count("stroke-dasharray") == 1
    texts = [one.text for one in tree.iter("text")]
    assert texts[-1] == "rollout"
    assert {"0", "20", "40", "60"} <= set(texts)


def test_what_is_not_there_is_not_drawn() -> None:
    some = runs({"grpo": [[0.0] * 20]})
    assert still.curve(some, LOOKS, "tokens/entropy") is None
    assert still.curve(some, LOOKS, "reward/mean", log=True) is None
    assert still.trajectory(some, LOOKS) is None
    for values in ([0.0] * 20, [0.5], [np.nan] * 10 + [0.3] * 10):
        assert still.curve(runs({"grpo": [values]}), LOOKS, "reward/mean") is not None


@pytest.mark.parametrize("high", [1.0001, 3.0, 1e6])
def test_a_logarithmic_axis_has_ticks_whatever_it_spans(high: float) -> None:
    svg = still.curve(runs({"grpo": [np.geomspace(1, high, 60).tolist()]}), LOOKS, "reward/mean", log=True)
    assert svg is not None
    assert svg.count('class="grid"') >= 2
    numbers = [float(one) for one in re.findall(r"[ML ](-?[0-9.]+)", "".join(re.findall(r' d="([^"]+)"', svg)))]
    assert all(0 <= one <= 460 for one in numbers)


def test_every_figure_of_the_page_has_one(bench: Path, sweep: Path) -> None:
    found = contents(compare(load_runs(bench)))
    assert {"first", "trajectory", "reward/mean", "gradient/norm", "stare/gate"} <= found["stills"].keys()
    assert all(len(one) == 1 for one in found["stills"].values() if one)
    both = contents(compare(load_runs(bench, sweep)))
    # a drawing for each setting, named
    assert [one["setting"] for one in both["stills"]["first"]] == [one["name"] for one in both["settings"]]
    assert "sweep 0" in both["stills"]


def test_the_page_opens_with_the_curve_of_the_main_outcome_or_the_sweep(bench: Path, sweep: Path) -> None:
    assert opening(compare(load_runs(bench))).metric == "eval/mean"
    assert opening(compare(load_runs(sweep))).sweep == 0
    assert opening(compare(load_runs(bench, sweep))).sweep is None
    assert opening(compare(load_runs(bench), metrics=["reward/best"])).metric == "reward/mean"
    comparison = compare(load_runs(bench), metrics=["tokens/entropy/area"])
    assert curve_of(comparison, "tokens/entropy/area") == "tokens/entropy"


def test_few_evaluations_show_less_than_the_training_curve() -> None:
    evaluations = [{"rollout": rollout, "eval/mean": 0.5, "eval/entropy": 0.2} for rollout in (0, 60)]
    some = [record(curves(60, seed), seed=seed, evaluations=evaluations) for seed in range(3)]
    comparison = compare(Loaded(some, [], []))
    assert opening(comparison).metric == "reward/mean"
    assert curve_of(comparison, "eval/entropy") == "tokens/entropy"


def test_a_page_of_many_settings_holds_stills_of_the_first(
    monkeypatch: pytest.MonkeyPatch, bench: Path, sweep: Path
) -> None:
    monkeypatch.setattr("rlstab.report.contents.MOST_STILLS", 2)
    found = contents(compare(load_runs(bench, sweep)))
    assert (found["still_settings"], len(found["settings"])) == (2, 4)
    assert len(found["stills"]["first"]) == 2
