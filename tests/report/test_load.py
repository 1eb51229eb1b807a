"""Run folders, benches and results files in whatever state they are: read, named, or left out with the reason."""

import json
import os
import re
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from rlstab.bins import binned
from rlstab.cli import main
from rlstab.errors import ReportError
from rlstab.report.comparison import Comparison, compare
from rlstab.report.listing import running
from rlstab.report.load import load_runs
from rlstab.report.output import write_text
from rlstab.report.results_file import export_results
from rlstab.report.runs import Loaded, RunRecord
from rlstab.train.run_folder import RunFolder
from tests.report.conftest import CLIP, OBJECTIVES, S2T, place_run, write_bench, write_run
from tests.train.runs import small


def only(*paths: Path) -> tuple[RunRecord, Loaded]:
    loaded = load_runs(*paths)
    assert len(loaded.runs) == 1
    return loaded.runs[0], loaded


def edit(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> RunRecord:
    """The run after some of its records were changed."""
    file = folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    change(records)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return only(folder)[0]


def test_a_bench_folder(bench: Path) -> None:
    loaded = load_runs(bench, bench / "runs")  # a path named twice is read once
    assert (len(loaded.runs), loaded.left_out, loaded.notes, loaded.not_begun) == (16, [], [], 0)
    run = loaded.runs[0]
    assert (run.bench, run.setting, run.method, run.seed) == ("entropy", "default", "20_entropy", 0)
    assert (run.status, run.rollouts, run.planned, run.cpu_seconds) == ("finished", 60, 60, 18.0)
    assert (run.baseline, run.bench_command) == ("grpo", "rlstab bench examples/entropy.yaml")
    assert [record["rollout"] for record in run.evaluations] == [0, 20, 40, 60]
    assert not [name for name in run.metrics if name.startswith(("eval/", "seconds/"))]
    with pytest.raises(ReportError, match="no runs were named"):
        load_runs()


def test_runs_that_have_not_begun_are_counted_and_one_that_failed_at_once_is_kept(bench: Path) -> None:
    place, error = {"bench": "entropy", "setting": "default", "method": "grpo"}, "Traceback\nNonFinite: 20 steps"
    place_run(bench / "runs/default/grpo/seed-9", seed=9, status="running", **place)
    place_run(bench / "runs/default/grpo/seed-8", seed=8, status="failed", error=error, **place)
    names = {"settings": {"default": {}}, "methods": {"grpo": {}, "later": {}}, "seeds": [0, 9]}
    (bench / "bench.yaml").write_text(yaml.safe_dump(names))
    loaded = load_runs(bench)
    assert (loaded.not_begun, len(loaded.runs)) == (2, 17)
    assert "no record of a rollout" in loaded.left_out[0].why
    assert [(run.seed, run.rollouts) for run in loaded.runs if run.status == "failed"] == [(8, 0)]
    assert "entropy default grpo seed 8: failed after 0 rollouts: NonFinite: 20 steps" in loaded.notes
    many = {key: list(range(200)) for key in ("settings", "methods", "seeds")}
    (bench / "bench.yaml").write_text(yaml.safe_dump(many))
    assert load_runs(bench).not_begun == 0


def test_a_plain_run_is_named_by_its_objective_and_mixed_versions_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "many" / "deep" / "run", objective=[CLIP, S2T, S2T], seed=3)
    (tmp_path / "again").symlink_to(tmp_path)  # links do not lead in circles
    run, _ = only(tmp_path)
    assert (run.bench, run.setting, run.method, run.seed) == (None, "default", "clip_higher+s2t_1+s2t_2", 3)
    write_run(tmp_path / "b", seed=1, about={"rlstab": "0.2.0"})
    assert load_runs(tmp_path).notes == ["Versions of rlstab are mixed: 0.1.0 (1 run), 0.2.0 (1 run)."]


def test_bins_hold_means_of_ten_rollouts_the_largest_and_what_was_spent(tmp_path: Path) -> None:
    norms = {"gradient/norm": [1.0] * 10 + [2.0] * 5, "gradient/largest_norm": [*map(float, range(1, 16))]}
    folder = write_run(tmp_path / "run", rollouts=15, changes={**norms, "response/tokens": [100.0] * 15})

    def change(records: list[dict[str, Any]]) -> None:
        records[12]["optimizer_steps/refused"] = 4  # a count is written only where there was something to count
        records[5]["seconds/rollout"] = 10.0
        records[13]["seconds/evaluate"] = 500.0  # not seconds of a rollout

    run = edit(folder, change)
    ends, values = binned(run, "gradient/norm")
    assert (ends.tolist(), values.tolist()) == ([10, 15], [1.0, 2.0])
    assert run.largest["gradient/largest_norm"][1].tolist() == [10.0, 15.0]
    assert binned(run, "optimizer_steps/refused")[1].tolist() == [0.0, 0.8]
    ends, seconds = run.spent["seconds"]
    assert (ends.tolist(), seconds.tolist()) == ([10, 15], [0.25 * 9 + 10, 0.25 * 14 + 10])
    assert run.spent["tokens"][1].tolist() == [1000, 1500]
    assert edit(folder, lambda records: records[7].pop("seconds/rollout")).spent.keys() == {"tokens"}


def test_what_a_kill_or_a_bad_disk_left_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    title = "default clip_higher seed 0"
    file.write_text("\n".join(lines)[:-25])
    run, loaded = only(folder)
    assert (run.rollouts, run.status) == (59, "unfinished")
    assert loaded.notes == [
        f"{title}: unfinished, 59 of 60 rollouts.",
        f"{title}: the last line of metrics.jsonl is cut off.",
    ]
    damage = ["{", '{"rollout": "x"}', "[" * 5000, *(f'{{"rollout": {n}}}' for n in ("9" * 24, "9" * 5000, -1, "true"))]
    file.write_text("\n".join([*lines, *damage]) + "\n")
    run, loaded = only(folder)
    assert loaded.notes == [f"{title}: {len(damage)} damaged lines of metrics.jsonl."]
    assert run.rollouts == 60
    # a rollout that was written again counts once; text counts as missing, and what is beyond all floats as infinite
    odd = '{"rollout": 60, "reward/mean": 0.987, "lr": true, "a": NaN, "b": "high", "c": 9' + "9" * 400 + "}\n"
    file.write_text("\n".join(lines) + "\n" + odd)
    run, _ = only(folder)
    assert run.metrics["reward/mean"][0].tolist() == list(range(1, 61))
    assert run.metrics["reward/mean"][1][-1] == 0.987
    assert not {"lr", "b"} & run.metrics.keys()
    assert np.isposinf(run.metrics["c"][1]).all()
    assert all(np.isfinite(binned(run, name)[1]).all() for name in run.metrics)


def test_a_run_without_its_other_files(bench: Path, tmp_path: Path) -> None:
    for text in (None, b"{", b"[1]", b"\x00\xff"):
        folder = write_run(tmp_path / f"run-{text!r}")
        (folder / "run.json").unlink() if text is None else (folder / "run.json").write_bytes(text)
        run, loaded = only(folder)
        assert (run.about, run.status, len(loaded.notes)) == ({}, "finished", 1)
        assert "run.json" in loaded.notes[0]
    (folder / "config.yaml").unlink()
    with pytest.raises(ReportError, match=r"neither config\.yaml nor bench\.json"):
        load_runs(folder)
    folder = bench / "runs/default/grpo/seed-0"
    (folder / "config.yaml").unlink()
    place_run(folder, bench="entropy", setting="default", method="grpo", seed="zero")
    run, loaded = only(folder)
    assert run.seed == 0
    assert any("no file says its seed" in note for note in loaded.notes)


def named(*paths: Path) -> list[tuple[str | None, str, str, int]]:
    loaded = load_runs(*paths)
    assert loaded.left_out == []
    return [(run.bench, run.setting, run.method, run.seed) for run in loaded.runs]


def test_copies_of_a_run_are_left_out_and_told_together(bench: Path, tmp_path: Path) -> None:
    for name in "ba":
        write_run(tmp_path / name, about={"run_id": "x"})
    run, loaded = only(tmp_path / "b", tmp_path / "a")
    [copies] = loaded.left_out
    assert (run.path, copies.path) == (str(tmp_path / "a"), str(tmp_path / "b"))
    for folder in bench.rglob("run.json"):
        folder.write_text(json.dumps({"run_id": str(folder)}))
    file = export_results(load_runs(bench), tmp_path / "x.jsonl")
    loaded = load_runs(bench, file)
    [copies] = loaded.left_out
    assert (len(loaded.runs), copies.path) == (16, str(file))
    assert copies.why.startswith(f"16 runs read twice: entropy default 20_entropy seed 0 in {file}:1 is also in")
    # line 2 comes before line 10
    line = file.read_text().splitlines()[0]
    file.write_text(f"\n{line}\n" + "\n" * 8 + f"{line}\n")
    assert [run.path for run in load_runs(file).runs] == [f"{file}:2"]


def test_runs_of_two_folders_are_named_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    wanted = [("lr=1e-4", 0), ("lr=1e-4", 1), ("lr=4e-4", 0), ("lr=4e-4", 1), ("lr=4e-4", 2)]
    for setting, seed in wanted:
        folder = tmp_path / f"{setting}-{seed}"
        write_run(folder, lr=float(setting[3:]), seed=seed, about={"run_id": folder.name})
    loaded = load_runs(tmp_path)
    for paths in (tmp_path, export_results(loaded, tmp_path.with_suffix(".jsonl"))):
        assert named(paths) == [(None, setting, "clip_higher", seed) for setting, seed in wanted]
    (swept,) = compare(loaded).sweeps
    assert (swept.bench, swept.key, swept.values) == ("", "optimisation.lr", [1e-4, 4e-4])


IN_ORDER, GRPO = {"name": "in_order", "shuffle": True}, {"name": "grpo", "std": True, "epsilon": 1e-4, "ddof": 1}
OVERLONG, OPO = {"name": "overlong", "buffer": 4, "penalty": 1.0}, {"name": "opo"}
POOLS = [{"name": "goldilocks", "pool": pool} for pool in (64, 256)]
#: Options of two runs, and what their settings and methods are called, of clip_higher where nothing else stands.
NAMES: list[tuple[list[dict[str, Any]], list[tuple[str, str]]]] = [
    (  # a setting of a method
        [{"objective": [CLIP, {**S2T, "max_prob": most}]} for most in (0.002, 0.01)],
        [("default", "+s2t (max_prob=0.002)"), ("default", "+s2t (max_prob=0.01)")],
    ),
    (  # stages that not all have
        [{"stages": [IN_ORDER, GRPO]}, {"stages": [IN_ORDER, OVERLONG, GRPO]}],
        [("default", " (stages=none)"), ("default", " (stages=overlong)")],
    ),
    (
        [{"stages": [IN_ORDER, GRPO]}, {"stages": [POOLS[0], OVERLONG, OPO]}],
        [("default", " (stages=goldilocks + overlong + opo)"), ("default", " (stages=in_order + grpo)")],
    ),
    (  # a setting of a stage
        [{"stages": [stage, GRPO]} for stage in POOLS],
        [("default", " (pool=256)"), ("default", " (pool=64)")],
    ),
    ([{}, {}], [("0", ""), ("1", "")]),  # nothing: their folders
    ([{"seed": 0}, {"seed": 1, "rollouts": 70}], [("rollouts=60", ""), ("rollouts=70", "")]),  # their length counts
]


def test_runs_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    for number, (runs, wanted) in enumerate(NAMES):
        for place, options in enumerate(runs):
            write_run(tmp_path / str(number) / str(place), about={"run_id": str(place)}, **options)
        names = [(setting, f"clip_higher{method}") for setting, method in wanted]
        assert [(setting, method) for _, setting, method, _ in named(tmp_path / str(number))] == names


def test_benches_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for place in ("old", "new"):
        write_bench(tmp_path / place, methods={"grpo": {}}, seeds=2)
    assert [bench for bench, *_ in named(tmp_path)] == ["entropy (new)"] * 2 + ["entropy (old)"] * 2
    file = export_results(load_runs(tmp_path / "old"), tmp_path / "x.jsonl")
    assert {bench for bench, *_ in named(tmp_path / "new", file)} == {"entropy (new)", "entropy (x.jsonl)"}


def statistics(comparison: Comparison) -> Any:
    tables = [replace(table, runs={}) for table in comparison.tables]
    return comparison.outcomes, tables, comparison.idle, comparison.sweeps


@pytest.mark.parametrize("folder", ["bench", "sweep"])
def test_a_results_file_gives_equal_statistics(folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(folder)
    if folder == "bench":  # a partial last bin, a missing metric, a run that failed, counts
        place = {"bench": "entropy", "setting": "default", "seed": 7}
        write_run(path / "runs/default/grpo/seed-7", objective=OBJECTIVES["grpo"], seed=7, done=57, evaluate=False)
        place_run(path / "runs/default/grpo/seed-7", method="grpo", **place)
        refused = {"optimizer_steps/refused": [1.0] * 60}
        write_run(path / "runs/default/s2t/seed-7", objective=OBJECTIVES["s2t"], seed=7, done=33, changes=refused)
        error = "rlstab.errors.NonFinite: refused"
        place_run(path / "runs/default/s2t/seed-7", method="s2t", status="failed", error=error, **place)
    loaded = load_runs(path)
    file = export_results(loaded, tmp_path / "results" / "x.jsonl")
    again = load_runs(file)
    assert statistics(compare(again)) == statistics(compare(loaded))
    assert again.notes == loaded.notes
    spent, read = (
        [(unit, curve[1].tolist()) for run in some.runs for unit, curve in run.spent.items()]
        for some in (loaded, again)
    )
    assert spent == read
    # and once more from what was read
    assert export_results(again, tmp_path / "y.jsonl").read_text() == file.read_text()


def test_numbers_have_six_digits_and_no_place_on_the_machine_is_exported(bench: Path, tmp_path: Path) -> None:
    write_run(bench / "own", about={"rewards": {"task": "task", "own": "/home/me/own.py:f (sha256 12...)"}})
    lines = export_results(load_runs(bench), tmp_path / "x.jsonl").read_text().splitlines()
    assert len(lines) == 17
    assert not [line for line in lines if "/home/me" in line]
    assert len([line for line in lines if '"own": "own.py:f (sha256 12...)"' in line]) == 1
    line = json.loads(lines[0], parse_constant=lambda text: pytest.fail(text))
    assert (line["curves"]["width"], line["curves"]["rollout"]) == (10, [10, 20, 30, 40, 50, 60])
    for value in line["curves"]["reward/mean"] + line["largest"]["gradient/largest_norm"]:
        assert value == float(f"{value:.6g}")


def test_damaged_lines_are_left_out_and_those_damaged_alike_are_told_once(bench: Path, tmp_path: Path) -> None:
    file = export_results(load_runs(bench), tmp_path / "x.jsonl")
    first, *rest = file.read_text().splitlines()
    damages: list[tuple[dict[str, Any] | str, str]] = [
        (first[:200], "Invalid JSON"),
        ("\x00\xff", "Invalid JSON"),
        ("3", "not a line of a results file"),
        ({"format": 99}, "format"),
        ({"status": "great"}, "status"),
        ({"seed": "0"}, "seed"),
        ({"curves": {"width": 10, "rollout": [10, 10]}}, "curves"),
        ({"curves": {"width": 10, "rollout": [10**30]}}, "curves"),
        ({"curves": {"width": 10, "rollout": [10], "reward/mean": [1.0, 2.0]}}, "2 values for 1 rollouts"),
        ({"curves": {"width": 10, "rollout": [10], "reward/mean": ["x"]}}, "curves.reward/mean.0"),
        ({"evaluations": [{"rollout": 0, "eval/mean": "high"}]}, "evaluations.0.eval/mean"),
        ({"largest": None}, "largest"),
    ]
    lines = [
        damage if isinstance(damage, str) else json.dumps({**json.loads(first), **damage}) for damage, _ in damages
    ]
    file.write_text("\n".join([*lines, *rest]) + "\n")
    loaded = load_runs(file)
    told = {item.path: item.why for item in loaded.left_out}
    assert (len(loaded.runs), len(told)) == (15, len(damages))
    for number, (_, why) in enumerate(damages, 1):
        assert why in told[f"{file}:{number}"]
    file.write_text("\n".join(["\x00", "\x00", *rest, "\x00", "{}"]) + "\n")
    assert [item.path for item in load_runs(file).left_out] == [f"{file}:1-2, 18", f"{file}:19"]


ESC = "\\u001b[31m\\u202e\\u0007"

#: By name: a file of the run, its content, and whether the run can still be used.
BAD: dict[str, tuple[str, str, bool]] = {
    "cyclic objective": ("config.yaml", "objective: &a [*a]\n", False),
    "number as a method": ("config.yaml", "objective: [5]\n", False),
    "word as an objective": ("config.yaml", "objective: s2t\n", False),
    "list as a name": ("config.yaml", "objective: [{name: [1, {a: b}]}]\n", True),
    "lone surrogate": ("config.yaml", 'objective: [{name: "a\\ud800b"}]\n', True),
    "escape as a name": ("config.yaml", f'objective: [{{name: "{ESC}"}}]\n', True),
    "no numbers": ("config.yaml", "objective: [{name: s2t}]\noptimisation: {rollouts: .nan, lr: .inf}\n", True),
    "hash that is NaN": ("run.json", '{"run_hash": NaN, "objective_hash": Infinity}', True),
    "hash that is a list": ("run.json", '{"run_hash": [1], "run_id": [2], "objective_hash": {"a": NaN}}', True),
    "surrogates in run.json": ("run.json", '{"device": "\\ud800", "rlstab": {"\\ud800": NaN}}', True),
    "escape in run.json": ("run.json", f'{{"device": "{ESC}", "command": "{ESC}", "rlstab": "{ESC}"}}', True),
    "escape as an error": (
        "bench.json",
        f'{{"method": "m{ESC}", "seed": 1, "setting": "{ESC}", "bench": "{ESC}", "status": "failed", '
        f'"error": "{ESC}\\ud800", "command": "{ESC}\\ud800", "cpu_seconds": NaN, "seconds": 1e999}}',
        True,
    ),
    "wrong types in bench.json": ("bench.json", '{"method": ["m"], "seed": true, "setting": 5, "status": []}', True),
    "surrogates as metrics": ("metrics.jsonl", '{"rollout": 1, "\\ud800": 3, "eval/\\ud800": 3, "a": NaN}\n', True),
    "escape as a metric": ("metrics.jsonl", f'{{"rollout": 1, "{ESC}": 3, "eval/{ESC}": 4, "s2t/{ESC}": 1}}\n', True),
}
#: By name: a file that is something else.
ODD = {
    f"{what} for {file}": (what, file)
    for what in ("device", "pipe", "folder")
    for file in ("config.yaml", "run.json", "bench.json", "metrics.jsonl")
}


def spoil(folder: Path, name: str) -> None:
    write_run(folder, seed=len(name))
    if name in BAD:
        file, text, _ = BAD[name]
        (folder / file).write_text(text, encoding="utf-8")
        return
    what, file = ODD[name]
    path = folder / file
    path.unlink(missing_ok=True)
    make = {"device": lambda: path.symlink_to("/dev/zero"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    make[what]()


def acts(text: str) -> set[str]:
    """Characters that would steer a terminal, or hide in a page."""
    return {character for character in text if unicodedata.category(character) in ("Cc", "Cf", "Cs")} - {"\n"}


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font:UserWarning")
def test_a_bad_folder_acts_on_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, page, kept = tmp_path / "runs", tmp_path / "report.md", tmp_path / "kept.jsonl"
    for seed in range(3):
        write_run(runs / f"good-{seed}", seed=seed)
    for number, name in enumerate([*BAD, *ODD]):
        spoil(runs / f"bad-{number}[b]\x1b[31m", name)
    loaded = load_runs(runs)
    read, left_out = ({Path(item.path).name for item in items} for items in (loaded.runs, loaded.left_out))
    assert {f"good-{seed}" for seed in range(3)} <= read
    for number, name in enumerate([*BAD, *ODD]):
        usable = BAD[name][2] if name in BAD else ODD[name][1] in ("run.json", "bench.json")
        folder = f"bad-{number}[b]\x1b[31m"
        assert (folder in read, folder in left_out) == (usable, not usable), name
    assert main(["report", str(runs), "--markdown", str(page), "--export", str(kept)]) == 0
    said = capsys.readouterr()
    assert acts(said.out + said.err) == acts(page.read_text(encoding="utf-8")) == set()
    assert "␛[31m" in said.err.replace("\n", "")
    told = [line for line in said.err.splitlines() if line.startswith("left out:")]
    assert ["[b]" in line for line in told] == [True] * len(left_out)  # a name is not markup
    assert main(["report", str(kept), "--markdown", str(tmp_path / "again.md")]) == 0
    assert acts((tmp_path / "again.md").read_text(encoding="utf-8")) == set()
    assert main(["look", str(runs), "--json"]) == 0
    assert acts(capsys.readouterr().err) == set()


def test_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 2
    assert capsys.readouterr().err.startswith("ReportError: runs: no such file or folder.")
    changes = {"reward/mean": [0.1] * 20 + [0.5] * 10 + [0.2] * 30}
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    runs = tmp_path / "runs"
    write_run(runs / "a", changes=changes)
    holder = RunFolder(small(tmp_path / "held"), {}, print, resume=False, overwrite=False)
    held = (tmp_path / "held" / ".lock").read_text()
    holder.close()
    write_run(runs / "b", done=35, evaluate=False, seed=3, changes=changes)
    (runs / "b" / ".lock").write_text(held.replace(str(os.getpid()), str(gone.pid)))
    write_run(runs / "c", done=40, lr=1e-3, changes=changes)
    (runs / "c" / ".lock").write_text(held)
    place = {"bench": "entropy", "setting": "[b]", "method": "s2t\x1b", "seed": 1}
    place_run(write_run(runs / "d", done=10), status="failed", error="a\nNonFinite: NaN", **place)
    (runs / "e").mkdir()
    (runs / "e" / "metrics.jsonl").write_text("")
    (runs / "f").mkdir()
    wrong = [f"process {number} on {socket.gethostname()}" for number in (0, -1, 10**10)]
    for lock in (*wrong, f"process {os.getpid()} on elsewhere", "x", "", "\udcff"):
        (runs / "f" / ".lock").write_text(lock, errors="surrogateescape")
        assert running(runs / "f") is None
    with monkeypatch.context() as patch:
        patch.setattr("rlstab.report.listing.read_text", Mock(side_effect=PermissionError))
        assert running(runs / "c") is None  # a lock that this user may not read
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", Mock(side_effect=PermissionError))
        assert running(runs / "c") == os.getpid()  # a process of another user
    assert main(["runs"]) == 0
    assert [re.sub(r" {2,}", "  ", line).rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "runs/a  finished, 60 rollouts",
        "clip_higher on countdown with countdown-tiny, lr 2e-4, seed 0  held out 0.200 after 40",
        "runs/b  stopped after 35 of 60",
        "clip_higher on countdown with countdown-tiny, lr 2e-4, seed 3  reward 0.500, mean of 10 rollouts until 30",
        f"runs/c  running, 40 of 60 (process {os.getpid()})",
        "clip_higher on countdown with countdown-tiny, lr 0.001, seed 0  held out 0.200 after 40",
        "runs/d  failed after 10 of 60: NonFinite: NaN",
        "entropy [b] s2t␛ on countdown with countdown-tiny, lr 2e-4, seed 1  held out 0.150 after 0",
        "left out: runs/e: neither config.yaml nor bench.json says what was trained: config.yaml is missing; "
        "run.json is missing",
        "4 runs",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "a\0b": "embedded null byte",
        "a\ud800b": "surrogates not allowed",
        "file/x": "its folder is a file or a broken link",
        "dangling/x": "its folder is a file or a broken link",
        "n" * 300: "file name too long",
        "dangling": "no such file or directory",
        "loop": "too many levels of symbolic links",
        ".": "is a directory",
    }.items(),
)
def test_a_path_that_cannot_be_written_is_named_with_its_option(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("missing/deep")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ReportError) as raised:
        write_text(tmp_path / name, "", "--export")
    assert f"{tmp_path / name}: cannot be written: " in str(raised.value)
    assert str(raised.value).endswith(f"{reason}. Give another path by --export.")
