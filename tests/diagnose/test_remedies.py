"""The table of remedies, its figures, and the page that is made of both."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import evidence as made
from benchmarks.diagnose import RUNS
from benchmarks.troubleshooting import page
from rlstab.config import RunConfig
from rlstab.diagnose import remedies
from rlstab.report.formatting import MINUS
from rlstab.stages import STAGES
from rlstab.zoo import METHODS
from tests.test_docs import keys

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8") == page(), "python -m benchmarks evidence"


def test_methods_stages_and_settings_exist() -> None:
    known = keys(RunConfig)
    for one in remedies.remedies().values():
        assert set(one.methods) <= set(METHODS.names())
        assert set(one.stages) <= set(STAGES.names())
        assert {name.rpartition(".")[2] for name in one.settings["rlstab"]} <= known | {"answer_pattern", "stop"}
        assert one.settings.keys() == {"rlstab", "TRL", "verl"}
        assert len(set(one.methods)) == len(one.methods)


def test_every_comparison_that_is_named_has_its_figures() -> None:
    for cause, data in remedies.table().items():
        for comparison in data["evidence"]:
            found = {(one.method, one.outcome) for one in remedies.figures()[remedies.key(comparison)]}
            wanted = {(method, outcome) for method in comparison["methods"] for outcome in comparison["outcomes"]}
            assert wanted <= found, cause
            assert (ROOT / "examples" / f"bench_{comparison['file']}.yaml").is_file()
            for one in remedies.figures()[remedies.key(comparison)]:
                text = (ROOT / one.page).read_text(encoding="utf-8")
                assert f"\n### {one.bench}\n" in text


@pytest.mark.parametrize("told", [("laconic", "response/length"), ("laconic", "eval/mean")])
def test_figures_are_those_of_the_results(told: tuple[str, str]) -> None:
    method, outcome = told
    (comparison,) = remedies.table()["truncation"]["evidence"]
    again = {(one.method, one.outcome): one for one in made.figures(comparison)}[method, outcome]
    (kept,) = [
        one for one in remedies.figures()[remedies.key(comparison)] if (one.method, one.outcome) == (method, outcome)
    ]
    assert dataclasses.replace(again, difference=0, low=0, high=0) == dataclasses.replace(
        kept, difference=0, low=0, high=0
    )
    for name in ("difference", "low", "high"):
        assert math.isclose(getattr(again, name), getattr(kept, name), rel_tol=1e-3)


@pytest.mark.slow
def test_every_figure_is_that_of_the_results() -> None:
    assert json.loads(made.text()) == json.loads(remedies.EVIDENCE.read_text(encoding="utf-8"))


def test_a_figure_is_told_by_its_verdict() -> None:
    figure = remedies.Figure(
        "b", "default", "m", "base", "eval/mean", "", 3, -0.046, -0.076, -0.016, "lower", "chain", "c", "p"
    )
    assert figure.told == "eval/mean lower by 0.046 [0.016, 0.076]"
    assert dataclasses.replace(figure, verdict="no visible difference").told == (
        f"eval/mean no visible difference ({MINUS}0.046 [{MINUS}0.076, {MINUS}0.016])"
    )
    assert dataclasses.replace(figure, verdict="identical").told == "eval/mean identical"


def test_the_table_of_how_often_it_is_right_is_that_of_the_results() -> None:
    lines = (ROOT / "benchmarks" / "results" / "diagnose.jsonl").read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines]
    assert {one["seed"] for one in results}.isdisjoint({0, 100})  # seen while it was written
    text = (ROOT / "docs" / "how-to" / "diagnose.md").read_text(encoding="utf-8")
    told = re.findall(r"(?m)^\| `(\w+)` \| .* \| (\d+) of (\d+) \| .* \|$", text)
    assert [name for name, _, _ in told] == list(RUNS)
    for name, right, runs in told:
        named = [one["cause"] for one in results if one["run"] == name]
        wanted = None if name.startswith("healthy") else name
        assert (named.count(wanted), len(named)) == (int(right), int(runs))
