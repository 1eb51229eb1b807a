import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlstab.errors import ReportError
from rlstab.report.comparison import compare
from rlstab.report.load import load_runs
from rlstab.report.results_file import export_results
from rlstab.report.runs import binned
from tests.report.conftest import CLIP, S2T, place_run, write_bench, write_run


def only(*paths: Path):
    loaded = load_runs(*paths)
    assert len(loaded.runs) == 1
    return loaded.runs[0], loaded


def test_a_bench_folder(bench: Path) -> None:
    loaded = load_runs(bench)
    assert len(loaded.runs) == 16
    assert loaded.left_out == []
    assert loaded.notes == []
    run = loaded.runs[0]
    assert (run.bench, run.setting, run.method, run.seed) == ("entropy", "default", "20_entropy", 0)
    assert run.baseline == "grpo"
    assert (run.status, run.rollouts, run.planned, run.cpu_seconds) == ("finished", 60, 60, 18.0)
    assert run.bench_command == "rlstab bench examples/entropy.yaml"
    assert [one["rollout"] for one in run.evaluations] == [0, 20, 40, 60]
    assert not [name for name in run.metrics if name.startswith(("eval/", "seconds/"))]
    assert run.seconds_by_phase == {"seconds/rollout": 0.25}


def test_a_plain_run_is_named_by_its_objective(tmp_path: Path) -> None:
    run, _ = only(write_run(tmp_path / "run", objective=[CLIP, S2T, S2T], seed=3))
    assert (run.bench, run.setting, run.method, run.seed) == (None, "default", "clip_higher+s2t_1+s2t_2", 3)
    assert run.objective == ["clip_higher", "s2t_1", "s2t_2"]


def test_a_folder_of_runs_is_searched(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / "many" / "deep" / f"run-{seed}", seed=seed)
    assert [run.seed for run in load_runs(tmp_path).runs] == [0, 1]


def test_bins_hold_means_of_ten_rollouts_and_the_largest(tmp_path: Path) -> None:
    norm = [1.0] * 10 + [2.0] * 5
    largest = [float(rollout) for rollout in range(1, 16)]
    changes = {"gradient/norm": norm, "gradient/largest_norm": largest, "optimizer_steps/refused": [0.0] * 15}
    run, _ = only(write_run(tmp_path / "run", rollouts=15, changes=changes))
    ends, values = binned(run, "gradient/norm")
    assert ends.tolist() == [10, 15]
    assert values.tolist() == [1.0, 2.0]
    assert run.largest["gradient/largest_norm"][1].tolist() == [10.0, 15.0]


def test_a_count_that_is_written_only_where_there_is_one_is_zero_elsewhere(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[15]["optimizer_steps/refused"] = 4
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, _ = only(folder)
    assert binned(run, "optimizer_steps/refused")[1].tolist() == [0.0, 0.4, 0.0, 0.0, 0.0, 0.0]


def test_an_unfinished_run_is_used_and_said(tmp_path: Path) -> None:
    run, loaded = only(write_run(tmp_path / "run", done=40))
    assert run.status == "unfinished"
    assert loaded.notes == ["default clip_higher seed 0: unfinished, 40 of 60 rollouts."]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole[:-25])
    run, loaded = only(folder)
    assert (run.rollouts, run.status) == (59, "unfinished")
    assert "default clip_higher seed 0: the last line of metrics.jsonl is cut off." in loaded.notes


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[5], lines[9], lines[12] = "{", '{"rollout": "x"}', "[" * 5000
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run, loaded = only(folder)
    assert loaded.notes == ["default clip_higher seed 0: 3 damaged lines of metrics.jsonl."]
    assert len(run.metrics["reward/mean"][0]) == 57


def test_nan_and_words_among_the_values_do_no_harm(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[11]["reward/mean"], lines[12]["reward/mean"], lines[13]["lr"] = float("nan"), "high", True
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run, _ = only(folder)
    ends, values = binned(run, "reward/mean")
    assert ends.tolist() == [10, 20, 30, 40, 50, 60]
    assert np.isfinite(values).all()
    assert "lr" not in run.metrics


def test_a_step_that_was_written_again_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"rollout": 60, "reward/mean": 0.987}) + "\n")
    run, _ = only(folder)
    assert run.metrics["reward/mean"][0].tolist() == list(range(1, 61))
    assert run.metrics["reward/mean"][1][-1] == 0.987


@pytest.mark.parametrize("text", [None, "{", "[1]", "\x00\xff"])
def test_a_missing_or_damaged_run_json_is_noted(tmp_path: Path, text: str | None) -> None:
    folder = write_run(tmp_path / "run")
    if text is None:
        (folder / "run.json").unlink()
    else:
        (folder / "run.json").write_bytes(text.encode("latin-1"))
    run, loaded = only(folder)
    assert run.about == {}
    assert run.status == "finished"
    assert len(loaded.notes) == 1
    assert "run.json" in loaded.notes[0]


@pytest.mark.parametrize("text", [None, "a: [", "- 1", "!!python/object:os.system {}"])
def test_without_a_configuration_a_plain_run_has_no_name(tmp_path: Path, text: str | None) -> None:
    folder = write_run(tmp_path / "b-run")
    write_run(tmp_path / "a-run")
    if text is None:
        (folder / "config.yaml").unlink()
    else:
        (folder / "config.yaml").write_text(text)
    _, loaded = only(tmp_path)
    assert [one.path for one in loaded.left_out] == [str(folder)]
    assert "neither config.yaml nor bench.json says what was trained" in loaded.left_out[0].why


def test_a_run_of_a_bench_that_failed_before_it_began_is_kept(bench: Path) -> None:
    error = "Traceback\nrlstab.errors.NonFinite: 20 optimizer steps in a row"
    folder = bench / "runs" / "default" / "grpo" / "seed-9"
    place_run(folder, bench="entropy", setting="default", method="grpo", seed=9, status="failed", error=error)
    loaded = load_runs(bench)
    failed = [run for run in loaded.runs if run.status == "failed"]
    assert [(run.seed, run.rollouts) for run in failed] == [(9, 0)]
    assert any("failed after 0 rollouts: rlstab.errors.NonFinite" in note for note in loaded.notes)


def test_a_run_of_a_bench_that_has_only_begun_is_left_out(bench: Path) -> None:
    place_run(bench / "runs/default/grpo/seed-9", setting="default", method="grpo", seed=9, status="running")
    loaded = load_runs(bench)
    assert len(loaded.runs) == 16
    assert "no record of a rollout" in loaded.left_out[0].why


def test_of_one_run_in_two_places_the_first_by_path_is_kept(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "a")
    run, loaded = only(tmp_path / "b", tmp_path / "a")
    assert run.path == str(tmp_path / "a")
    assert loaded.left_out[0].path == str(tmp_path / "b")
    said = f"this run (default clip_higher seed 0) is also in {tmp_path / 'a'}; the first by path is kept"
    assert loaded.left_out[0].why == said


def named(*paths: Path) -> list[tuple[str | None, str, str, int]]:
    loaded = load_runs(*paths)
    assert loaded.left_out == []
    return [(run.bench, run.setting, run.method, run.seed) for run in loaded.runs]


def test_runs_of_two_folders_are_named_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    for lr in (1e-4, 4e-4):
        for seed in (0, 1):
            write_run(tmp_path / f"{lr}-{seed}", lr=lr, seed=seed, about={"run_id": f"{lr}{seed}"})
    write_run(tmp_path / "later", lr=4e-4, seed=2, about={"run_id": "5"})
    wanted = [(None, "lr=1e-4", "clip_higher", seed) for seed in (0, 1)]
    wanted += [(None, "lr=4e-4", "clip_higher", seed) for seed in (0, 1, 2)]
    assert named(tmp_path) == wanted
    loaded = load_runs(tmp_path)
    assert named(export_results(loaded, tmp_path / "x.jsonl")) == wanted
    both = load_runs(tmp_path, tmp_path / "x.jsonl")
    assert [(run.bench, run.setting, run.method, run.seed) for run in both.runs] == wanted
    assert both.left_out[0].why.startswith("5 runs are also in ")
    (sweep,) = compare(loaded).sweeps
    assert (sweep.bench, sweep.key, sweep.values) == ("", "optimisation.lr", [1e-4, 4e-4])


def test_settings_of_a_method_are_named_with_it(tmp_path: Path) -> None:
    for most in (0.002, 0.01):
        write_run(tmp_path / str(most), objective=[CLIP, {**S2T, "max_prob": most}], about={"run_id": str(most)})
    assert named(tmp_path) == [
        (None, "default", "clip_higher+s2t (max_prob=0.002)", 0),
        (None, "default", "clip_higher+s2t (max_prob=0.01)", 0),
    ]


IN_ORDER, GRPO = {"name": "in_order", "shuffle": True}, {"name": "grpo", "std": True, "epsilon": 1e-4, "ddof": 1}


def test_runs_that_differ_in_stages_alone_are_named_by_those(tmp_path: Path) -> None:
    overlong = {"name": "overlong", "buffer": 4, "penalty": 1.0}
    for place, stages in {
        "a": [IN_ORDER, GRPO],
        "b": [IN_ORDER, overlong, GRPO],
        "c": [{"name": "goldilocks", "pool": 64}, overlong, {"name": "opo"}],
    }.items():
        write_run(tmp_path / place, stages=stages, about={"run_id": place})
    assert [method for _, _, method, _ in named(tmp_path)] == [
        "clip_higher (stages=goldilocks + overlong + opo)",
        "clip_higher (stages=in_order + grpo)",
        "clip_higher (stages=in_order + overlong + grpo)",
    ]
    assert [method for _, _, method, _ in named(tmp_path / "a", tmp_path / "b")] == [
        "clip_higher (stages=none)",
        "clip_higher (stages=overlong)",
    ]
    report = compare(load_runs(tmp_path / "a", tmp_path / "b"))
    assert [table.methods for table in report.tables] == [
        ["clip_higher (stages=none)", "clip_higher (stages=overlong)"]
    ]
    assert report.sweeps == []


def test_settings_of_a_stage_that_all_have_are_named_by_themselves(tmp_path: Path) -> None:
    for pool in (64, 256):
        stages = [{"name": "goldilocks", "pool": pool, "discount": 0.98}, GRPO]
        write_run(tmp_path / str(pool), stages=stages, about={"run_id": str(pool)})
    assert [method for _, _, method, _ in named(tmp_path)] == ["clip_higher (pool=256)", "clip_higher (pool=64)"]


def test_a_run_of_before_there_were_stages_is_told_by_what_its_advantage_was(tmp_path: Path) -> None:
    write_run(tmp_path / "new", stages=[IN_ORDER, {"name": "opo"}], about={"run_id": "new"})
    old = write_run(tmp_path / "old", about={"run_id": "old"})
    found = yaml.safe_load((old / "config.yaml").read_text())
    found["advantage"] = {"estimator": "grpo", "std": True, "epsilon": 1e-4, "ddof": 1}
    (old / "config.yaml").write_text(yaml.safe_dump(found))
    assert [method for _, _, method, _ in named(tmp_path)] == ["clip_higher (stages=grpo)", "clip_higher (stages=opo)"]


def test_runs_that_differ_in_nothing_are_named_by_their_folders(tmp_path: Path) -> None:
    for place in ("a/run", "b/run"):
        write_run(tmp_path / place, about={"run_id": place})
    assert named(tmp_path / "a", tmp_path / "b") == [(None, one, "clip_higher", 0) for one in ("a/run", "b/run")]


def test_runs_that_differ_in_length_alone_are_one_method_while_their_seeds_tell_them_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, rollouts=70)
    assert named(tmp_path) == [(None, "default", "clip_higher", seed) for seed in (0, 1)]
    write_run(tmp_path / "c", seed=0, rollouts=70, about={"run_id": "c"})
    assert (None, "rollouts=70", "clip_higher", 0) in named(tmp_path)


def test_benches_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for place in ("old", "new"):
        write_bench(tmp_path / place, name="entropy", seeds=1)
        for folder in (tmp_path / place).rglob("run.json"):
            folder.write_text(json.dumps({"run_id": str(folder)}))
    found = named(tmp_path)
    assert len(found) == 8
    assert {bench for bench, *_ in found} == {"entropy (new)", "entropy (old)"}
    file = export_results(load_runs(tmp_path / "old"), tmp_path / "x.jsonl")
    assert {bench for bench, *_ in named(tmp_path / "new", file)} == {"entropy (new)", "entropy (x.jsonl)"}


def test_a_path_named_twice_is_read_once(bench: Path) -> None:
    loaded = load_runs(bench, bench / "runs")
    assert len(loaded.runs) == 16
    assert loaded.left_out == []


def test_settings_of_several_benches_are_kept_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_bench(tmp_path / name, name=name, seeds=1)
    assert len(load_runs(tmp_path).runs) == 8


def test_mixed_versions_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, about={"rlstab": "0.2.0", "torch": "2.14.0"})
    notes = load_runs(tmp_path).notes
    assert notes == [
        "Versions of rlstab are mixed: 0.1.0 (1 run), 0.2.0 (1 run).",
        "Versions of torch are mixed: 2.13.0 (1 run), 2.14.0 (1 run).",
    ]


def test_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "again").symlink_to(tmp_path)
    only(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_nothing_usable_is_an_error_that_says_why(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="no such file or folder" if name == "nothing" else "holds no run"):
        load_runs(tmp_path / name)
    with pytest.raises(ReportError, match="no runs were named"):
        load_runs()


@pytest.mark.parametrize("rollout", ["9" * 24, "9" * 5000, "-1", "true", "1.5"])
def test_a_rollout_that_no_run_reaches_is_damage(tmp_path: Path, rollout: str) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"rollout": {rollout}, "reward/mean": 0.9}}\n')
    run, _ = only(folder)
    assert run.rollouts == 60
    assert run.remarks == ("1 damaged line of metrics.jsonl",)


def test_a_value_beyond_all_floats_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'{{"rollout": 60, "reward/mean": {"9" * 400}}}\n')
    run, _ = only(folder)
    assert np.isfinite(run.metrics["reward/mean"][1]).all()


def test_a_run_without_a_seed_says_so(bench: Path) -> None:
    folder = bench / "runs/default/grpo/seed-0"
    place_run(folder, bench="entropy", setting="default", method="grpo", seed="zero")
    assert load_runs(folder).runs[0].remarks == ()  # config.yaml has it too
    (folder / "config.yaml").unlink()
    run, loaded = only(folder)
    assert run.seed == 0
    assert any("no file says its seed; taken for seed 0" in note for note in loaded.notes)


def test_runs_that_have_not_begun_are_counted(bench: Path) -> None:
    names = {"settings": {"default": {}}, "methods": {"grpo": {}, "s2t": {}}, "seeds": list(range(10))}
    (bench / "bench.yaml").write_text(yaml.safe_dump(names))
    loaded = load_runs(bench)
    assert loaded.not_begun == 12
    assert loaded.notes == ["entropy: 12 of the 20 runs that its bench.yaml names have not begun."]


@pytest.mark.parametrize(
    "text",
    ["\x00", "[1, 2]", "methods: 3", "settings: {a: {}}\nmethods: {b: {}}\nseeds: 5", "a: &a [*a]"],
)
def test_a_damaged_bench_file_is_passed_over(bench: Path, text: str) -> None:
    (bench / "bench.yaml").write_text(text)
    assert (load_runs(bench).not_begun, len(load_runs(bench).runs)) == (0, 16)


def test_a_bench_file_that_names_too_many_runs_is_passed_over(bench: Path) -> None:
    many = {"settings": list(range(200)), "methods": list(range(200)), "seeds": list(range(200))}
    (bench / "bench.yaml").write_text(yaml.safe_dump(many))
    assert load_runs(bench).not_begun == 0


def test_doubles_of_one_source_are_told_together(bench: Path, tmp_path: Path) -> None:
    file = export_results(load_runs(bench), tmp_path / "x.jsonl")
    loaded = load_runs(bench, file)
    [one] = loaded.left_out
    assert len(loaded.runs) == 16
    assert one.path == str(file)
    assert one.why.startswith(f"16 runs are also in {bench}/runs/default; the first by path are kept: ")
    assert "entropy default grpo seeds 0-3; entropy default s2t seeds 0-3" in one.why


def test_line_two_comes_before_line_ten(bench: Path, tmp_path: Path) -> None:
    file = export_results(load_runs(bench), tmp_path / "x.jsonl")
    first = json.loads(file.read_text().splitlines()[0])
    lines = [json.dumps({**first, "seed": seed}) for seed in (1, 2, 3, 4, 5, 6, 7, 8, 9, 2)]
    file.write_text("\n".join(lines) + "\n")
    loaded = load_runs(file)
    assert [one.path for one in loaded.left_out] == [f"{file}:10"]
