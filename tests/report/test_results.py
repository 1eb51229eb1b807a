"""Results files hold what every statistic needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlstab.errors import ReportError
from rlstab.report.comparison import Comparison, compare
from rlstab.report.load import load_runs
from rlstab.report.results_file import export_results
from tests.report.conftest import place_run, write_run


def statistics(one: Comparison) -> dict[str, Any]:
    return {
        "outcomes": one.outcomes,
        "tables": [(t.bench, t.setting, t.baseline, t.methods, t.cells, t.collapses, t.notes) for t in one.tables],
        "idle": one.idle,
        "sweeps": one.sweeps,
    }


@pytest.mark.parametrize("folder", ["bench", "sweep"])
def test_a_results_file_gives_equal_statistics(folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(folder)
    if folder == "bench":  # a partial last bin, a missing metric, a run that failed, counts
        write_run(path / "runs/default/grpo/seed-7", seed=7, rollouts=57, evaluate=False)
        place_run(path / "runs/default/grpo/seed-7", bench="entropy", setting="default", method="grpo", seed=7)
        write_run(path / "runs/default/s2t/seed-7", seed=7, done=33, changes={"optimizer_steps/refused": [1.0] * 60})
        error = "rlstab.errors.NonFinite: refused"
        place = {"bench": "entropy", "setting": "default", "method": "s2t", "seed": 7}
        place_run(path / "runs/default/s2t/seed-7", status="failed", error=error, **place)
    loaded = load_runs(path)
    file = export_results(loaded, tmp_path / "results" / "x.jsonl")
    again = load_runs(file)
    assert statistics(compare(again)) == statistics(compare(loaded))
    assert again.notes == loaded.notes
    # and once more from what was read
    assert export_results(again, tmp_path / "y.jsonl").read_text() == file.read_text()


def test_numbers_have_six_digits_and_no_nan(bench: Path, tmp_path: Path) -> None:
    lines = export_results(load_runs(bench), tmp_path / "x.jsonl").read_text().splitlines()
    assert len(lines) == 16
    line = json.loads(lines[0], parse_constant=lambda text: pytest.fail(text))
    assert line["curves"]["width"] == 10
    assert line["curves"]["rollout"] == [10, 20, 30, 40, 50, 60]
    for value in line["curves"]["reward/mean"] + line["largest"]["gradient/largest_norm"]:
        assert value == float(f"{value:.6g}")
    assert set(line) >= {"format", "bench", "setting", "method", "seed", "status", "error", "run_hash", "config"}


def broken(**changes: Any):
    return lambda line: json.dumps({**line, **changes})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda line: json.dumps(line)[:200], "Invalid JSON"),
        (lambda line: "3", "not a line of a results file"),
        (lambda line: "{}", "format: Field required"),
        (broken(format=99), "format: Input should be 1"),
        (broken(status="great"), "status: Input should be"),
        (broken(seed="0"), "seed: Input should be a valid integer"),
        (broken(curves={"width": 10, "rollout": [10, 10]}), "does not rise"),
        (broken(curves={"width": 10, "rollout": [10**30]}), "beyond 1000000000 rollouts"),
        (broken(curves={"width": 10, "rollout": [10], "reward/mean": [1.0, 2.0]}), "2 values for 1 rollouts"),
        (broken(curves={"width": 10, "rollout": [10], "reward/mean": ["x"]}), "curves.reward/mean.0"),
        (broken(evaluations=3), "evaluations: Input should be a valid array"),
        (broken(evaluations=[{"rollout": 0, "eval/mean": "high"}]), "evaluations.0.eval/mean"),
        (broken(largest=None), "largest"),
        (broken(seconds="long"), "seconds"),
    ],
)
def test_damaged_lines_are_left_out(damage: Any, why: str, bench: Path, tmp_path: Path) -> None:
    file = export_results(load_runs(bench), tmp_path / "x.jsonl")
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([damage(json.loads(first)), *rest]) + "\n")
    loaded = load_runs(file)
    assert len(loaded.runs) == 15
    assert loaded.left_out[0].path == f"{file}:1"
    assert why in loaded.left_out[0].why


def test_a_file_of_something_else_is_no_results_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(ReportError, match="empty"):
        load_runs(tmp_path / "x.jsonl")


def test_a_place_that_cannot_be_written_is_an_error(bench: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        export_results(load_runs(bench), tmp_path / "file" / "x.jsonl")


def test_lines_damaged_alike_are_told_once(bench: Path, tmp_path: Path) -> None:
    file = export_results(load_runs(bench), tmp_path / "x.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join(["\x00\xff", "\x00", *lines[2:], "\x00", "{}"]) + "\n")
    found = {one.path: one.why for one in load_runs(file).left_out}
    assert list(found) == [f"{file}:1-2, 17", f"{file}:18"]
    assert found[f"{file}:1-2, 17"].startswith("not a line of a results file: Invalid JSON")


def test_no_folder_of_the_machine_is_exported(tmp_path: Path) -> None:
    about = {"rewards": {"task": "task", "own": "/home/me/own.py:f (sha256 12...)"}}
    write_run(tmp_path / "a", rollouts=20, about=about)
    text = export_results(load_runs(tmp_path), tmp_path / "x.jsonl").read_text()
    assert "/home/me" not in text
    assert json.loads(text)["about"]["rewards"] == {"task": "task", "own": "own.py:f (sha256 12...)"}
