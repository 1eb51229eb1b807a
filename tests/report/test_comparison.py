from pathlib import Path

import pytest

from rlstab.errors import ReportError
from rlstab.report.comparison import compare
from rlstab.report.load import load_runs
from tests.report.conftest import place_run, write_bench, write_run


def test_the_base_comes_first_and_is_compared_with_nobody(bench: Path) -> None:
    [table] = compare(load_runs(bench)).tables
    assert (table.bench, table.setting, table.baseline) == ("entropy", "default", "grpo")
    assert table.methods == ["grpo", "20_entropy", "s2t", "stare"]
    assert table.title == "entropy"
    assert table.cells["grpo", "eval/mean"].paired is None
    assert table.notes == []


def test_what_was_made_different_is_found_and_what_was_not_is_not(bench: Path) -> None:
    [table] = compare(load_runs(bench)).tables
    verdicts = {name: table.cells[name, "eval/entropy"].paired.verdict for name in table.methods[1:]}
    assert verdicts == {"20_entropy": "higher", "s2t": "identical", "stare": "higher"}
    assert table.cells["20_entropy", "reward/area"].paired.verdict == "lower"
    assert table.collapses["grpo"].runs == 4
    assert table.collapses["grpo"].collapsed == 0


def test_idle_methods_are_called_out(bench: Path) -> None:
    texts = {(one.method, one.text) for one in compare(load_runs(bench)).idle}
    assert ("s2t", "clip_higher never acted: on-policy, the ratio is 1") in texts
    assert ("stare", "stare never acted: its gate never opened, the mean entropy stayed at or above 0.3 nats") in texts
    assert not any("s2t never" in text for _, text in texts)


def test_another_baseline(bench: Path) -> None:
    [table] = compare(load_runs(bench), baseline="stare").tables
    assert table.methods[0] == table.baseline == "stare"
    with pytest.raises(ReportError, match=r"--baseline star: no run has this method\. Did you mean 'stare'"):
        compare(load_runs(bench), baseline="star")


def test_a_baseline_that_one_bench_lacks_compares_nothing_there(bench: Path, sweep: Path) -> None:
    tables = compare(load_runs(bench, sweep), baseline="stare").tables
    assert [table.baseline for table in tables] == ["stare", None, None, None]
    assert tables[1].cells["s2t", "eval/mean"].paired is None
    assert "has no run of stare, so nothing is compared there" in tables[1].notes[0]


def test_the_base_of_a_bench_may_be_missing(tmp_path: Path) -> None:
    write_bench(tmp_path / "b", baseline="dapo")
    [table] = compare(load_runs(tmp_path / "b")).tables
    assert table.baseline == "grpo"
    assert "its baseline dapo has no run; grpo is used instead" in table.notes[0]


def test_what_is_missing_is_left_out_and_named(bench: Path) -> None:
    runs = bench / "runs" / "default"
    write_run(runs / "stare" / "seed-8", seed=8, evaluate=False)
    place_run(runs / "stare" / "seed-8", bench="entropy", setting="default", method="stare", seed=8)
    write_run(runs / "s2t" / "seed-9", seed=9, done=20)
    place_run(runs / "s2t" / "seed-9", bench="entropy", setting="default", method="s2t", seed=9, status="running")
    comparison = compare(load_runs(bench))
    [table] = comparison.tables
    assert table.cells["stare", "eval/mean"].paired.seeds == (0, 1, 2, 3)
    assert table.cells["stare", "reward/area"].paired.unpaired == (8,)
    assert sorted(table.cells["s2t", "eval/mean"].values) == [0, 1, 2, 3]
    notes = "\n".join(comparison.notes)
    assert "leave out s2t seed 9 (unfinished)" in notes
    assert "eval/mean, eval/pass@4, eval/greedy, eval/entropy are missing in stare seed 8" in notes
    assert "only one of method and grpo finished these seeds: stare 8." in notes
    assert table.collapses["s2t"].runs == 5


def test_plain_runs_compare_too(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", objective=[{"name": "token_mean"}])
    [table] = compare(load_runs(tmp_path)).tables
    assert (table.title, table.methods) == ("default", ["clip_higher", "token_mean"])
    assert table.cells["token_mean", "eval/mean"].paired.verdict == "identical"


def test_swept_settings_stand_in_the_order_of_their_values(tmp_path: Path) -> None:
    settings = {"lr_1.5e-4": 1.5e-4, "lr_1e-4": 1e-4, "lr_5e-5": 5e-5}
    write_bench(tmp_path / "b", methods={"grpo": {}}, settings=settings, seeds=1)
    assert [table.setting for table in compare(load_runs(tmp_path)).tables] == ["lr_5e-5", "lr_1e-4", "lr_1.5e-4"]
