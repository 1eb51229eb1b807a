"""What a run had spent by when: the axes beside rollouts."""

from __future__ import annotations

import json
from pathlib import Path

from rlstab.report.comparison import compare
from rlstab.report.load import load_runs
from rlstab.report.page import contents, data
from rlstab.report.results_file import export_results
from rlstab.report.runs import RunRecord
from tests.report.conftest import write_run


def edited(folder: Path, change: dict[int, dict[str, float | None]]) -> RunRecord:
    """The run after some of its records were changed; None removes an entry."""
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for one in records:
        for name, value in change.get(one["rollout"], {}).items():
            one.pop(name, None) if value is None else one.update({name: value})
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    (run,) = load_runs(folder).runs
    return run


def test_seconds_of_rollouts_and_tokens_add_up(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rollouts=25, changes={"response/tokens": [100.0] * 25})
    # the pause before a resume is in no record, and an evaluation is none of a rollout's seconds
    run = edited(folder, {5: {"seconds/rollout": 10.0}, 20: {"seconds/evaluate": 500.0}})
    ends, seconds = run.spent["seconds"]
    assert ends.tolist() == [10, 20, 25]
    assert seconds.tolist() == [0.25 * 9 + 10, 0.25 * 19 + 10, 0.25 * 24 + 10]
    assert run.spent["tokens"][1].tolist() == [1000, 2000, 2500]


def test_what_some_rollout_did_not_record_is_not_guessed(tmp_path: Path) -> None:
    run = edited(write_run(tmp_path / "run", rollouts=25), {7: {"seconds/rollout": None}})
    assert run.spent == {}
    found = contents(compare(load_runs(tmp_path / "run")))
    assert found["spent"] == []
    assert found["how_spent"] == ""


def test_a_results_file_keeps_it(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"run-{seed}", rollouts=25, seed=seed, changes={"response/tokens": [100.0] * 25})
    loaded = load_runs(tmp_path)
    again = load_runs(export_results(loaded, tmp_path / "all.jsonl"))
    for one, other in zip(loaded.runs, again.runs, strict=True):
        assert {unit: curve[1].tolist() for unit, curve in one.spent.items()} == {
            unit: curve[1].tolist() for unit, curve in other.spent.items()
        }
    shown = data(compare(again))
    assert shown == data(compare(loaded))
    assert shown["clocks"]["s0"]["m0"]["1"] == {
        "rollout": [0, 10, 20, 25],
        "seconds": [0, 2.5, 5, 6.25],
        "tokens": [0, 1000, 2000, 2500],
    }
    assert [one["unit"] for one in contents(compare(again))["spent"]] == ["tokens", "seconds"]
