"""Runs and results that were written under older names: ``step`` was a rollout, ``base`` the baseline of a bench.

``written_before`` is one run of a bench with two methods, as rlstab wrote it then.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlstab.cli import main
from rlstab.report.comparison import compare
from rlstab.report.load import load_runs
from rlstab.report.markdown import markdown
from rlstab.report.results_file import export_results
from rlstab.report.token_traces import read_tokens

BENCH = Path(__file__).parent / "written_before"
RUN = BENCH / "runs" / "default" / "stare" / "seed-0"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_a_folder_is_read_under_the_names_of_now() -> None:
    [run] = load_runs(BENCH).runs
    assert (run.baseline, run.status, run.rollouts, run.planned) == ("grpo", "finished", 4, 4)
    assert [one["rollout"] for one in run.evaluations] == [0, 2, 4]
    assert all("step" not in one for one in run.evaluations)
    rollouts, skipped = run.metrics["optimizer_steps/skipped"]
    assert (rollouts.tolist(), skipped.tolist()) == ([1, 2, 3, 4], [2, 0, 2, 2])
    assert not {name for name in run.metrics if name.startswith(("step", "rollout"))}
    assert run.config["optimisation"]["warmup_optimizer_steps"] == 2
    assert run.config["objective"][1]["increment"] == 0.01
    assert run.remarks == ()


def test_it_is_exported_under_the_names_of_now(tmp_path: Path) -> None:
    file = export_results(load_runs(BENCH), tmp_path / "x.jsonl")
    line = json.loads(file.read_text())
    assert (line["format"], line["baseline"], line["curves"]["rollout"]) == (2, "grpo", [4])
    assert line["curves"]["optimizer_steps/skipped"] == [1.5]
    assert not {"base", "step", "steps/skipped"} & (line.keys() | line["curves"].keys() | line["evaluations"][0].keys())
    assert load_runs(file).runs[0].config == load_runs(BENCH).runs[0].config


def test_its_trace_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert {one.rollout for one in read_tokens(RUN).samples} == {2}
    assert main(["view", str(RUN), "--terminal", "--rollout", "2"]) == 0
    assert "rollout 2, optimizer step 4  response 4" in capsys.readouterr().out
    assert main(["view", str(RUN), "--terminal", "--rollout", "3"]) == 2
    assert "rollout 3 was not traced. Give one of 2." in capsys.readouterr().err


@pytest.mark.parametrize(("name", "baseline"), [("stability", "grpo")])
def test_committed_results_are_read(name: str, baseline: str) -> None:
    loaded = load_runs(RESULTS / f"{name}.jsonl")
    assert loaded.left_out == []
    assert {run.baseline for run in loaded.runs} == {baseline}
    assert all(run.status == "finished" and run.rollouts == run.planned for run in loaded.runs)
    assert any("optimizer_steps/skipped" in run.metrics for run in loaded.runs)
    assert not {name for run in loaded.runs for name in run.metrics if name.startswith("step")}


def test_committed_results_are_told_by_their_rollouts() -> None:
    assert "rollouts 120" in markdown(compare(load_runs(RESULTS / "stability.jsonl")))
