"""Logs as others leave them: whole, damaged, hostile, of the wrong kind."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstab.bins import Run
from rlstab.cli import main
from rlstab.logs.log import Rows
from rlstab.logs.source import log_files
from rlstab.logs.watch import Watch
from rlstab.look.diagnosis import diagnose
from rlstab.look.find import find, read_logs
from rlstab.signs import SIGNS
from tests.diagnose.formats import DATA, TRL, rows, trainer_state, verl_lines, wandb_chart, wandb_history, written

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["look", *map(str, arguments), "--out", str(tmp_path / "look.html")])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def read(path: Path) -> Run:
    (log,) = read_logs(path)
    return log


def test_every_writer_gives_the_same_curves(tmp_path: Path) -> None:
    ours, *logs = (read(written("learning_rate", form, tmp_path)) for form in ("rlstab", "TRL", "verl", "wandb"))
    both = ("reward/mean", "tokens/entropy", "gradient/norm", "response/ended", "response/length", "ratio/clipped")
    for log, curve in itertools.product(logs, (*both, "lr")):
        np.testing.assert_allclose(log.metrics[curve], ours.metrics[curve])
    assert logs[1].names["response/ended"] == "response_length/clip_ratio"
    assert logs[2].names["reward/mean"] == "train/reward"


def test_the_newest_checkpoint_of_an_output_folder_counts(tmp_path: Path) -> None:
    for step in (20, 100, 60):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(trainer_state(rows("healthy")[:step]), encoding="utf-8")
    assert read(tmp_path).path.endswith("checkpoint-100/trainer_state.json")
    (tmp_path / "trainer_state.json").write_text(trainer_state(rows("healthy")[:30]), encoding="utf-8")
    assert read(tmp_path).path.endswith("checkpoint-100/trainer_state.json")
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"log_history": [')  # killed while it was saved
    (tmp_path / "checkpoint-200").symlink_to(DATA / "trl_1_16", target_is_directory=True)
    log = read(tmp_path)
    assert (Path(log.path).parent.name, len(log.remarks)) == ("checkpoint-60", 2)
    for step in (20, 100, 60):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert read(tmp_path).rollouts == 30


def test_runs_of_rlstab_below_a_folder_come_before_the_log_of_another_trainer_in_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "seed-0"
    run.mkdir(parents=True)
    (tmp_path / "trainer_state.json").write_text(trainer_state(rows("healthy")[:30]), encoding="utf-8")
    assert read(tmp_path).writer == "TRL"
    (run / "metrics.jsonl").write_text((DATA / "healthy.jsonl").read_text())
    (run / "config.yaml").write_text("objective: [{name: clip_higher}]\n")
    log = read(tmp_path)
    assert (log.path, log.writer, log.unit) == (str(run), "rlstab", "rollout")


def test_what_a_real_trainer_state_of_trl_holds(tmp_path: Path) -> None:
    """Written by GRPOTrainer of TRL 1.16 on the chain model; a reward that pays for short answers, in 16 tokens."""
    log = read(DATA / "trl_1_16" / "trainer_state.json")
    assert log.rollouts == 40
    names = {ours: name for name, (ours, _) in [*TRL.items()][:7]}
    names |= {"reward/shorter": "rewards/shorter/mean", "ratio/clipped": "clip_ratio/region_mean"}
    assert log.names == names | {"optimizer_steps/refused": "grad_norm"}
    diagnosis = diagnose(log)  # the reward rises, so what was there from the first line is an observation
    assert diagnosis.first is None
    assert [(sign.name, sign.step) for sign in diagnosis.observations] == [("truncation", 1)]


def test_a_chart_holds_several_runs(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv"
    path.write_text(wandb_chart("entropy", {"a - b": rows("healthy"), "c": rows("entropy_collapse")}), encoding="utf-8")
    logs = read_logs(path)
    assert [log.path for log in logs] == [f"{path}: a - b", f"{path}: c"]
    assert [diagnose(log).verdict() for log in logs] == ["nothing found", "no harm; entropy floor"]
    assert list(logs[0].metrics) == ["tokens/entropy"]


def test_a_token_export_becomes_rows(tmp_path: Path) -> None:
    folder = tmp_path / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    line = {
        "step": 3,
        "token_ids": [5, 6, 7, 8],
        "loss_mask": [False, True, True, True],
        "advantages": [0.0, 1.0, 1.0, 1.0],
        "entropy": [0.0, 0.1, 0.2, 0.3],
        "rank": 0,
        "micro_step": 0,
        "rl_weights": [0.0, 1.0, 1.0, 1.0],
        "trainer_logprobs": [0.0, -1.0, -1.0, -1.0],
        "inference_logprobs": [0.0, -2.0, -1.0, -1.0],
        "is_masked": [False, True, False, False],
    }
    (folder / "rank_0.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    means = {"tokens/entropy": 0.2, "ratio/clipped": 1 / 3, "sampler/gap": 1 / 3, "response/length": 3.0}
    means["mismatch/k3"] = (math.e - 2) / 3
    (found,) = find(tmp_path)
    assert found.log is not None
    assert {name: values.item() for name, (_, values) in found.log.metrics.items()} == pytest.approx(means)


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, command: Command) -> None:
    lines = verl_lines(rows("entropy_collapse")).splitlines()
    lines[3:3] = ['{"step": 4, "da', "[1, 2]", '{"data": {"reward": 1}}', "9" * 5000, "[" * 100_000]
    path = tmp_path / "verl.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    code, out, err = command(path)
    assert (code, err) == (0, "")
    assert "Nothing hurt this run: the reward rose from" in out
    assert "step 24: entropy floor" in out
    assert "left out 5 damaged lines: 4-8" in out
    history = json.loads(trainer_state(rows("entropy_collapse")))
    history["log_history"][3:3] = ["x", {"reward": 1.0}]
    (tmp_path / "state.json").write_text(json.dumps(history), encoding="utf-8")
    assert read(tmp_path / "state.json").remarks == ("log_history: left out 2 records without a step",)
    table = wandb_history(rows("healthy")).splitlines()
    table[2:2] = ["x,y", ",", '"a']
    (tmp_path / "t.csv").write_text("\n".join(table), encoding="utf-8")
    assert read(tmp_path / "t.csv").remarks


def test_a_log_of_few_lines_says_what_it_cannot_show() -> None:
    diagnosis = diagnose(Rows({step: {"reward": 0.5} for step in range(1, 5)}).run())
    assert diagnosis.first is None
    reasons = {sign.name: sign.text for sign in diagnosis.unseen}
    assert reasons["reward_fall"] == "reward/mean has 4 values; 6 are needed"
    assert reasons["entropy_floor"] == "no tokens/entropy"
    assert diagnosis.verdict() == "nothing found, because nothing could be judged"


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path, command: Command) -> None:
    chart = wandb_chart("reward", {"\x1b[2J[red]a\u202e": rows("healthy")})
    path = tmp_path / "chart.csv"
    path.write_text(chart, encoding="utf-8")
    code, out, _ = command(path)
    assert code == 0
    assert "␛[2J[red]a⟨U+202E⟩" in out
    assert "\x1b" not in out
    _, out, _ = command("--json", path)
    assert out.isascii()
    assert json.loads(out)[0]["run"].endswith("\x1b[2J[red]a\u202e")


def test_json_has_everything(command: Command) -> None:
    names = ("learning_rate", "entropy_collapse", "healthy")
    _, out, err = command("--json", *(DATA / f"{name}.jsonl" for name in names))
    broken, observed, healthy = json.loads(out + err)  # some programs read both streams as one
    assert (broken["cause"], broken["step"], broken["unit"]) == ("learning_rate", 4, "rollout")
    assert broken["harm"] == {"sign": "reward_fall", "step": 4}
    assert [sign["sign"] for sign in broken["signs"]] == ["reward_fall", "difficulty", "zero_std_groups"]
    assert "clip_higher" in {each["method"] for each in broken["evidence"]}
    assert (observed["cause"], observed["harm"], observed["methods"]) == (None, None, [])
    assert observed["observations"][0] == {"sign": "entropy_floor", "cause": "entropy_collapse", "step": 24}
    assert (healthy["cause"], healthy["step"], healthy["signs"], healthy["evidence"]) == (None, None, [], [])
    assert healthy["outcome"].startswith("the reward rose from 0.1")
    assert len(healthy["looked_at"]) + len(healthy["unseen"]) == len(SIGNS)


def test_several_runs_have_a_line_each(command: Command) -> None:
    _, out, _ = command(*(DATA / f"{name}.jsonl" for name in ("healthy", "staleness", "mismatch", "truncation")))
    assert ["first, at rollout" in line for line in out.splitlines()[:4]] == [False, True, False, True]
    assert "4 runs: " in out


#: Ways in which trackers write a step, and a value; each line stands for the first one.
STEPS_AS: list[Callable[[int], dict[str, Any]]] = [
    lambda step: {"step": step},
    lambda step: {"step": float(step)},
    lambda step: {"step": f"{step}"},
    lambda step: {"global_step": f"{step}.0"},
    lambda step: {"global_step/max_steps": f"{step}/60"},
]


def test_numbers_and_steps_are_read_as_json_and_tables_write_them(tmp_path: Path) -> None:
    norms: list[object] = [0.3, "0.3", "3e-1", "NaN", math.nan, "Infinity", "-inf", 1e308, "1e999", None, 10**400]
    for number, head in enumerate(STEPS_AS):
        values = [{**head(step), "reward": 0.5, "grad_norm": norms[step % 11]} for step in range(1, 56)]
        lines = "".join(json.dumps(row) + "\n" for row in values)
        history = json.dumps({"log_history": values})
        columns = ",".join(values[0]) + "\n"
        cells = "".join(",".join("NaN" if x is None else str(x) for x in row.values()) + "\n" for row in values)
        for name, text in {"a.jsonl": lines, "a.json": lines, "trainer_state.json": history}.items():
            (tmp_path / name).write_text(text, encoding=("utf-8", "utf-8-sig", "utf-16")[number % 3])
        (tmp_path / "a.csv").write_text(columns + cells, encoding="utf-8-sig")
        (tmp_path / "b.csv").write_text((columns + cells).replace(",", ";"), encoding="utf-16")
        for name in ("a.jsonl", "a.json", "trainer_state.json", "a.csv", "b.csv"):
            log = read(tmp_path / name)
            assert (log.rollouts, log.remarks) == (55, ()), (number, name)
            assert log.metrics["gradient/norm"][1].tolist() == pytest.approx([0.3] * 15), (number, name)
            assert log.metrics["optimizer_steps/refused"][1].sum() == 40


@pytest.mark.parametrize("loss", ["loss", "train/loss", "actor/pg_loss", "policy_loss", "loss/mean"])
def test_a_loss_that_is_not_finite_is_told_without_a_norm(loss: str, tmp_path: Path) -> None:
    bad = {11: "nan", 12: None, 13: "-Infinity"}
    rows = [{"step": step, "reward": 0.5, loss: bad.get(step, 0.1)} for step in range(1, 41)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    refused = read(tmp_path / "log.jsonl").metrics["optimizer_steps/refused"]
    assert refused[0][refused[1] > 0].tolist() == [11, 12, 13]


def test_the_folder_that_wandb_links_to_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "wandb" / "offline-run-a" / "run-a.wandb"
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-a")
    assert log_files(tmp_path)["wandb"] == [file]


NOT_FINITE = {"json": "-Infinity", "null": "null", "text": '"nan"', "infinite": "Infinity"}


@pytest.mark.parametrize("form", [*NOT_FINITE, "csv", "TRL", "verl's console"])
def test_a_value_that_is_not_finite_is_told(form: str, tmp_path: Path) -> None:
    """Of a metric that some lines have; a score of few evaluations is null between them, which tells nothing."""
    rows = [
        (step, 0.01 * step, f"{1 / step}" if step < 31 else NOT_FINITE.get(form, "-Infinity")) for step in range(1, 61)
    ]
    if form == "csv":
        text = "Step,reward,entropy\n" + "".join(f"{step},{reward},{entropy}\n" for step, reward, entropy in rows)
    elif form == "verl's console":
        lines = (
            f"step:{step} - critic/score/mean:{reward} - actor/entropy:{entropy}\n" for step, reward, entropy in rows
        )
        text = "".join(lines)
    else:
        scores = [0.5, *["null"] * 8]
        lines = (
            f'{{"step": {step}, "reward": {reward}, "entropy": {entropy}, "eval_reward": {scores[step % 9]}}}'
            for step, reward, entropy in rows
        )
        text = f'{{"log_history": [{", ".join(lines)}]}}' if form == "TRL" else "\n".join(lines)
    path = tmp_path / {"csv": "log.csv", "TRL": "trainer_state.json"}.get(form, "log.jsonl")
    path.write_text(text)
    remarks = diagnose(read(path)).remarks
    assert [remark for remark in remarks if "NaN, Inf or null" in remark] == [
        "left out values that are NaN, Inf or null: tokens/entropy in 30 lines from step 31 on"
    ]
    assert len(remarks) == 1


def test_a_run_that_is_watched_is_at_each_line_the_run_of_the_lines_so_far() -> None:
    """Also after a late score of an older step, a value in a second line of a step, and a resume from a checkpoint."""
    lines: list[tuple[int, dict[str, Any]]] = [(step, {"reward": step / 10, "loss": 0.1}) for step in range(9)]
    lines += [(4, {"eval_reward": 0.4}), (2, {"eval_reward": 0.2}), (8, {"grad_norm": "NaN"}), (9, {"reward": None})]
    lines += [(step, {"reward": 0.7, "clip_ratio": 0.1}) for step in range(6, 12)]
    watch = Watch()
    for count, (step, values) in enumerate(lines, 1):
        watch.log(step, values)
        watched, fresh = watch.rows.run(watched=True), Rows()
        for line in lines[:count]:
            fresh.log(*line)
        run = Rows(dict(fresh)).run()
        assert (watched.names, watched.evaluations, watched.not_finite) == (run.names, run.evaluations, run.not_finite)
        assert watched.metrics.keys() == run.metrics.keys()
        for name, curve in run.metrics.items():
            np.testing.assert_array_equal(watched.metrics[name], curve)
    assert watched.metrics["reward/mean"][0].tolist() == list(range(1, 13))  # counted from 1
    assert [score["rollout"] for score in watched.evaluations] == [3, 5]


def test_of_several_held_out_scores_the_one_with_the_most_rows_counts_throughout(tmp_path: Path) -> None:
    often, seldom = "val-core/math/acc/mean@4", "val-core/aime/acc/mean@4"
    lines = [{"step": step, "reward": 0.5, **({often: step / 100} if step % 5 == 0 else {})} for step in range(1, 41)]
    for step in (10, 12):  # sorts first, and is the only score of step 12
        lines[step - 1][seldom] = 9.0
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    log = read(path)
    assert (log.names["eval/mean"], dict(zip(*log.metrics["eval/mean"], strict=True))) == (
        often,
        {step: step / 100 for step in range(5, 41, 5)},
    )
    watch = Watch()  # reads each line once, and ends with the same scores
    for line in lines:
        watch.log(int(line["step"]), line)
    np.testing.assert_array_equal(watch.rows.run().metrics["eval/mean"], log.metrics["eval/mean"])
    lines[39][seldom] = lines[34][seldom] = lines[29][seldom] = lines[24][seldom] = lines[19][seldom] = 8.0
    lines[14][seldom] = 8.0  # as often as the other: by name
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read(path).names["eval/mean"] == seldom


def console(step: int, reward: float, head: str = "") -> str:
    told = {"actor/entropy": 0.5, "critic/score/mean": f"np.float64({reward})", "actor/grad_norm": "nan", "x": "[1]"}
    return f"{head}step:{step} - " + " - ".join(f"{name}:{value}" for name, value in told.items()) + "\n"


def test_the_console_of_verl(tmp_path: Path) -> None:
    heads = ["", "(TaskRunner pid=42) ", "\x1b[36m(TaskRunner pid=42)\x1b[0m ", "Training:  3%| | 3/60 [00:02]\r"]
    text = "".join(f"noise {step}\n" + console(step, 0.5, heads[step % 4]) for step in range(1, 61))
    path = tmp_path / "train.log"
    path.write_text("{'config': 1}\n" + text.replace("step:20 - ", "stxp"), encoding="utf-8")
    log = read(path)
    assert (log.writer, log.rollouts, log.remarks) == ("verl", 60, ("no line for step 20",))
    assert log.metrics["reward/mean"][1].tolist() == [0.5] * 59
    assert log.metrics["optimizer_steps/refused"][1].sum() == 59


def test_what_was_given_up_when_a_run_was_resumed_is_left_out(tmp_path: Path) -> None:
    def line(step: int, **values: float) -> str:
        return json.dumps({"step": step, **values}) + "\n"

    first = [line(step, reward=0.1, lr=1.0) for step in range(1, 101)]
    late = line(100, **{"eval/reward": 1.0, "lr": 1.0})  # an evaluation of an older step is not another branch
    second = [line(step, reward=0.9) for step in range(71, 81)]
    third = [line(step, reward=0.7) for step in range(76, 79)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join([*first, line(101, reward=0.1), late, *second, *third]), encoding="utf-8")
    log = read(path)
    assert log.metrics["reward/mean"][1].tolist() == [0.1] * 70 + [0.9] * 5 + [0.7] * 3
    (remark,) = log.remarks
    assert "71-101" in remark
    path.write_text("".join([*first, line(101, reward=0.1), late]), encoding="utf-8")
    assert (read(path).rollouts, read(path).remarks) == (101, ())


def test_lines_that_are_missing_are_told_by_their_steps(tmp_path: Path) -> None:
    lines = verl_lines(rows("healthy")).splitlines()
    del lines[20:23], lines[40]
    lines[10] = "\x00garbled"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read(path).remarks == ("left out 1 damaged line: 11", "no line for step 11, 21-23, 44")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("objective: [{name: clip_higher}]\nseed: 0\n")
    (run / "run.json").write_text("{}")
    own = [json.dumps({"rollout": step, "reward/mean": 0.5}) for step in (0, *range(2, 50), *range(60, 70))]
    (run / "metrics.jsonl").write_text("\n".join(own) + "\n")
    assert read(run).remarks[0] == "metrics.jsonl lacks rollout 1, 50-59"
