"""Reports on runs of other trainers and trackers, and comparisons at equal cost."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstab.cli import main
from rlstab.errors import ReportError
from rlstab.look.find import read_logs
from rlstab.report.collapse import fate_of
from rlstab.report.comparison import compare, outcome_of
from rlstab.report.load import load_runs
from rlstab.report.results_file import export_results
from rlstab.report.run_reader import foreign
from rlstab.report.runs import LeftOut, Loaded, RunRecord
from tests.report.conftest import curves, place_run, record, write_run

STEPS = 40


def values(method: str, seed: int) -> list[float]:
    return curves(STEPS, seed, gain=0.3 if method == "b" else 0.1)["reward/mean"]


def trl(folder: Path, rewards: list[float], every: int = 1) -> None:
    """As transformers writes it: tokens since the start, seconds of each step, and an evaluation at the end."""
    history: list[dict[str, float]] = [
        {"step": step, "reward": reward, "num_tokens": 300.0 * step, "step_time": 2.0, "grad_norm": 0.5}
        for step, reward in enumerate(rewards, 1)
        if step % every == 0
    ]
    last = len(rewards)
    history += [{"step": last, "eval_reward": rewards[-1]}, {"step": last, "train_runtime": 60.0}]
    state = {"global_step": len(rewards), "max_steps": STEPS, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def verl(folder: Path, rewards: list[float]) -> None:
    lines = [
        {
            "step": step,
            "data": {
                "critic/score/mean": reward,
                "perf/total_num_tokens": 300.0,
                "timing_s/step": 2.0,
                **({"val-core/gsm8k/reward/mean@1": reward} if step == STEPS else {}),
            },
        }
        for step, reward in enumerate(rewards, 1)
    ]
    (folder / "log").mkdir()
    (folder / "log" / "verl.jsonl").write_text("\n".join(map(json.dumps, lines)))


def console(folder: Path, rewards: list[float]) -> None:
    """What verl prints, where it kept no file."""
    lines = [f"(pid=1) step:{step} - critic/score/mean:{reward}" for step, reward in enumerate(rewards, 1)]
    (folder.parent / "worker.log").write_text("\n".join(lines))


def wandb(folder: Path, rewards: list[float]) -> None:
    """As wandb writes it offline, once for each start; blocks end inside a record, and the end of the file is lost."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    for start, rows in ((0, rewards[:25]), (20, rewards[20:])):
        data = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
        for step, reward in enumerate(rows, start + 1):
            row = {"train/global_step": step, "train/reward": reward, "note": "x" * 2500}
            item = pb.Record()
            for name, value in row.items():
                item.history.item.add(nested_key=[name], value_json=json.dumps(value))
            rest, first = item.SerializeToString(), True
            while rest or first:
                left = 32768 - len(data) % 32768
                if left < 7:
                    data, left = data + bytes(left), 32768
                part, rest = rest[: left - 7], rest[left - 7 :]
                kind = (1 if not rest else 2) if first else (4 if not rest else 3)
                data += struct.pack("<IHB", 0, len(part), kind) + part
                first = False
        run = folder / "wandb" / f"offline-run-2026010{1 + start}_000000-a"
        run.mkdir(parents=True)
        (run / "run-a.wandb").write_bytes(data + struct.pack("<IHB", 0, 500, 1) + b"cut off")


def tensorboard(folder: Path, rewards: list[float]) -> None:
    writers = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")
    writer = writers.SummaryWriter(str(folder / "runs" / "now"))
    for step, reward in enumerate(rewards, 1):
        writer.add_scalar("train/reward", reward, step)
    writer.close()


def launched(folder: Path, write: Any, *, seed: int, method: str, status: str = "finished") -> None:
    """A run that a bench made by a command."""
    (folder / "out").mkdir(parents=True)
    place_run(folder, bench="own", setting="default", method=method, seed=seed, status=status, run_hash="abc")
    (folder / "config.yaml").write_text(f"objective: []\nsettings: {{lr: 0.1}}\nseed: {seed}\n")
    write(folder / "out", values(method, seed))


@pytest.mark.parametrize("write", [trl, verl, console, wandb, tensorboard])
def test_what_any_trainer_wrote_gives_the_statistics_of_its_curve(write: Any, tmp_path: Path) -> None:
    for method in "ab":
        for seed in range(3):
            launched(tmp_path / "own" / "runs" / "default" / method / f"seed-{seed}", write, seed=seed, method=method)
    # a trainer's own folders are not runs of rlstab
    (tmp_path / "own/runs/default/a/seed-0/out/config.yaml").write_text("model: x\n")
    loaded = load_runs(tmp_path / "own")
    assert (len(loaded.runs), loaded.left_out, {run.status for run in loaded.runs}) == (6, [], {"finished"})
    ours = [
        record({"reward/mean": values(run.method, run.seed)}, method=run.method, seed=run.seed) for run in loaded.runs
    ]
    expected = compare(Loaded(ours, [], []), metrics=["reward/area", "reward/last"], baseline="a").tables[0]
    table = compare(loaded, metrics=["reward/area", "reward/last"], baseline="a").tables[0]
    for cell in ("b", "reward/area"), ("b", "reward/last"):
        assert table.cells[cell].paired.difference.value == pytest.approx(expected.cells[cell].paired.difference.value)
        assert table.cells[cell].paired.verdict == expected.cells[cell].paired.verdict == "higher"
    if write in (trl, verl):
        assert table.costs == {"a": "300 tokens, 2 s", "b": "1.00\u00d7 tokens, 1.00\u00d7 time"}
        run = loaded.runs[0]
        assert outcome_of(run, "eval/mean") == pytest.approx(values(run.method, run.seed)[-1], rel=1e-5)


HELD_OUT = ["eval_accuracy", "train/eval_reward", "eval/gsm8k/avg@8", "val/accuracy", "val-core/gsm8k/acc/mean@4"]


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_report_reads_the_held_out_score_that_a_look_reads(name: str, tmp_path: Path) -> None:
    lines = [{"step": step, "reward": 0.5, **({name: step / 100} if step % 20 == 0 else {})} for step in range(41)]
    lines[40]["val-core/zebra/acc/mean@4"] = 9.0  # of several data sets the same one counts throughout
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert foreign(tmp_path, tmp_path / "none").evaluations == [
        {"rollout": step + 1, "eval/mean": step / 100} for step in (0, 20, 40)
    ]


def test_a_look_at_a_run_of_a_bench_knows_the_trainer_that_made_it(tmp_path: Path) -> None:
    launched(tmp_path / "seed-0", trl, seed=0, method="a")
    (log,) = read_logs(tmp_path / "seed-0")
    assert (log.writer, log.unit, log.rollouts) == ("TRL", "step", STEPS)


def test_a_run_that_was_stopped_failed_or_logged_nothing_is_told(tmp_path: Path) -> None:
    runs = tmp_path / "own" / "runs" / "default" / "a"
    for seed, status in enumerate(("finished", "running", "failed")):
        launched(runs / f"seed-{seed}", trl, seed=seed, method="a", status=status)
    launched(runs / "seed-3", lambda *_: None, seed=3, method="a")
    launched(runs / "seed-4", lambda *_: None, seed=4, method="a", status="failed")
    loaded = load_runs(tmp_path / "own")
    assert {run.seed: run.status for run in loaded.runs} == {
        **{0: "finished", 1: "unfinished", 2: "failed", 4: "failed"}
    }
    assert [Path(item.path).name for item in loaded.left_out] == ["seed-3"]


def test_a_log_with_a_line_for_some_steps_is_compared_without_a_note(tmp_path: Path) -> None:
    for seed in range(3):
        folder = tmp_path / "own" / "runs" / "default" / "a" / f"seed-{seed}"
        launched(folder, lambda out, rewards: trl(out, rewards, every=5), seed=seed, method="a")
    comparison = compare(load_runs(tmp_path))
    assert comparison.notes == ["own: eval/mean is missing in every finished run."] or comparison.notes == []


def test_plain_folders_are_runs_of_the_methods_that_are_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for index, method in enumerate("ab"):
        for seed in (1, 2, 3):
            folder = tmp_path / "runs" / f"{method}-{10 + index}-seed{seed}"
            folder.mkdir(parents=True)
            trl(folder, values(method, seed))
    for seed in (1, 2, 3):  # a run of rlstab is one too, with its own seed
        write_run(tmp_path / "runs" / f"ours-{seed}", seed=seed)
    (tmp_path / "runs" / "a-10-seed4").mkdir()
    trl(tmp_path / "runs" / "a-10-seed4", values("a", 4)[:20])  # of 40 steps
    (tmp_path / "runs" / "a-10-seed5").mkdir()  # nothing
    methods = ["--method", "one=runs/a-*", "--method", "two=runs/b-*", "--method", "ours=runs/ours-*"]
    assert main(["report", *methods, "--metric", "reward/area", "--baseline", "one"]) == 0
    assert "a-10-seed5" in capsys.readouterr().err.partition("left out:")[2]
    text = (tmp_path / "runs" / "report" / "report.md").read_text()
    assert "| two | 3 |" in text
    assert "a-10" not in text.partition("## Notes")[0].partition("## all")[2]
    loaded = load_runs(methods={"one": "runs/a-*", "ours": "runs/ours-*"})
    found = {(run.method, run.seed): run.status for run in loaded.runs}
    assert found == {
        **{("one", seed): "finished" for seed in (1, 2, 3)},
        ("one", 4): "unfinished",
        **{("ours", seed): "finished" for seed in (1, 2, 3)},
    }
    assert main(["report", *methods, "--metric", "reward/area", "--baseline", "one"]) == 0  # over its own report
    for wrong in ("one", "=x", "one=runs/none-*"):
        assert main(["report", "--method", wrong]) == 2


def costly(method: str, seed: int, tokens: float, reward: float, **facts: Any) -> RunRecord:
    """A run whose reward rises by ``reward`` at each rollout, a little more by seed, at this many tokens each."""
    reward *= 1 + 0.01 * seed
    run = record({"reward/mean": [reward * rollout for rollout in range(1, 61)]}, method=method, seed=seed, **facts)
    ends = np.arange(10, 61, 10)
    run.spent["tokens"] = (ends, tokens * ends.astype(float))
    run.evaluations.extend({"rollout": rollout, "eval/mean": reward * rollout} for rollout in (0, 20, 40, 60))
    return run


def test_methods_are_compared_at_equal_cost() -> None:
    """The expensive one learns twice as much from a rollout that costs three times as much."""
    some = [costly("cheap", seed, 100.0, 0.01) for seed in range(3)] + [
        costly("dear", seed, 300.0, 0.02, bench=None) for seed in range(3)
    ]
    loaded = Loaded(some, [], [])
    metrics = ["reward/area", "reward/last", "eval/mean"]
    by_rollouts, by_tokens = (
        compare(loaded, baseline="cheap", metrics=metrics, by=by).tables[0] for by in ("rollouts", "tokens")
    )
    told = {
        by: [cells["dear", name].values[0] for name in metrics]
        for by, cells in (("rollouts", by_rollouts.cells), ("tokens", by_tokens.cells))
    }
    assert told["rollouts"] == pytest.approx([0.02 * 30.5, 0.02 * 55.5, 0.02 * 60])
    assert told["tokens"] == pytest.approx([0.02 * 10.5, 0.02 * 15.5, 0.02 * 20])  # of 6000 tokens
    assert by_rollouts.cells["dear", "eval/mean"].paired.verdict == "higher"
    assert by_tokens.cells["dear", "eval/mean"].paired.verdict == "lower"
    assert by_tokens.costs == by_rollouts.costs == {"cheap": "100 tokens", "dear": "3.00\u00d7 tokens"}
    assert (by_rollouts.budget, by_tokens.budget) == ("", "at 6,000 sampled tokens for each run")
    assert by_tokens.runs["dear"][0].rollouts == 60  # curves are drawn of all of it


def test_means_over_a_whole_run_are_over_what_it_spent_and_evaluations_are_interpolated() -> None:
    run = costly("a", 0, 100.0, 0.01)
    run.spent["tokens"] = (run.spent["tokens"][0], np.array([100.0, 200.0, 300.0, 1300.0, 2300.0, 3300.0]))
    other = costly("b", 0, 80.0 / 3, 0.01)
    table = compare(
        Loaded([run, other], [], []), baseline="a", metrics=["reward/area", "eval/mean"], by="tokens"
    ).tables[0]
    means = 0.055, 0.155, 0.255, 0.355  # of bins that cost 100, 100, 100 and 1000
    assert table.cells["a", "reward/area"].values[0] == pytest.approx(np.average(means, weights=[1, 1, 1, 10]))
    assert table.cells["a", "eval/mean"].values[0] == pytest.approx(0.4 + 0.2 * (1600 - 1300) / 2000)


def test_what_says_no_cost_is_told_and_a_results_file_compares_the_same(tmp_path: Path) -> None:
    some = [costly(method, seed, 50.0 + 50 * (method == "b"), 0.01) for method in "ab" for seed in range(3)]
    lost = costly("b", 3, 1.0, 0.01)
    lost.spent.clear()
    loaded = Loaded([*some, lost, costly("a", 3, 50.0, 0.01)], [], [])
    comparison = compare(loaded, baseline="a", by="tokens")
    assert any("b seed 3" in note and "tokens" in note for note in comparison.notes)
    again = load_runs(export_results(loaded, tmp_path / "runs.jsonl"))
    cells, others = (compare(each, baseline="a", by="tokens").tables[0].cells for each in (loaded, again))
    assert {key: cell.values for key, cell in cells.items()} == {key: cell.values for key, cell in others.items()}
    with pytest.raises(ReportError, match="--by seconds"):
        compare(loaded, by="seconds")
    assert not isinstance(lost, LeftOut)


def test_a_log_of_nothing_but_nan_rewards_is_lost_and_stays_so_in_a_results_file(tmp_path: Path) -> None:
    (tmp_path / "grpo-0").mkdir()
    trl(tmp_path / "grpo-0", [float("nan")] * STEPS)
    loaded = load_runs(methods={"grpo": str(tmp_path / "grpo-*")})
    for reread in (loaded, load_runs(export_results(loaded, tmp_path / "x.jsonl"))):
        [run] = reread.runs
        assert "reward/mean" in run.not_finite
        assert fate_of(run).lost
