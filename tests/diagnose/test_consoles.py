"""What trainers print, as it reaches a file: through tee and SLURM, in notebooks, and copied from a terminal."""

import io
import json
import pprint
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlstab.bins import Run
from rlstab.errors import ReportError
from rlstab.look.find import find, read_logs
from rlstab.look.look import look
from tests.diagnose.formats import TRL, renamed, rows

#: Steps of the runs here.
STEPS = 60


def records(every: int = 1) -> list[tuple[int, dict[str, float]]]:
    """Steps of a run under TRL's names, with the epoch, as its trainer logs them."""
    lines = [row for row in rows("healthy") if 0 < row["rollout"] <= STEPS and row["rollout"] % every == 0]
    return [(row["rollout"], {**renamed(row, TRL), "epoch": row["rollout"] / 100}) for row in lines]


def as_text(values: dict[str, Any]) -> str:
    """A line of ProgressCallback since transformers 5."""
    return str({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()})


def bar(step: int, description: str = "") -> str:
    return f"\r{description}{100 * step // STEPS:3d}%|{'█' * (step // 6):10}| {step}/{STEPS} [00:10<01:00,  1.02s/it]"


def transformers(every: int, *, buffered: bool = False) -> str:
    """Progress bar and lines, in their order or with all lines after a bar that was not buffered."""
    lines = {step: as_text(values) + "\n" for step, values in records(every)}
    parts = ["Loading checkpoint shards: 100%|##########| 2/2 [00:00<00:00, 8.66it/s]\n", bar(0)]
    for step in range(1, STEPS + 1):
        parts += [bar(step), "" if buffered else f"\r{' ' * 60}\r{lines[step]}{bar(step)}" if step in lines else ""]
    ends = [*(lines.values() if buffered else ()), "{'train_runtime': '100.1', 'train_loss': '0.01', 'epoch': '0.6'}\n"]
    return "".join([*parts, "\n", *ends])


def read(text: str, folder: Path, name: str = "run.log") -> Run:
    (folder / name).write_text(text, encoding="utf-8")
    (log,) = read_logs(folder / name)
    return log


def check(log: Run, every: int = 1, metric: str = "reward/mean", name: str = "reward", unit: float = 1e-3) -> None:
    """The curve is that of the records."""
    steps, values = log.metrics[metric]
    assert steps.tolist() == [step for step, _ in records(every)]
    assert values.tolist() == pytest.approx([record[name] for _, record in records(every)], rel=unit, abs=unit)


@pytest.mark.parametrize("every", [1, 3])
def test_the_progress_bar_gives_the_steps_of_transformers(every: int, tmp_path: Path) -> None:
    log = read(transformers(every), tmp_path)
    check(log, every)
    assert (log.writer, log.remarks, log.metrics.keys() >= {"tokens/entropy", "gradient/norm"}) == ("TRL", (), True)


def test_lines_that_were_buffered_are_counted_by_the_end_of_the_progress_bar(tmp_path: Path) -> None:
    log = read(transformers(3, buffered=True), tmp_path)
    check(log, 3)
    assert log.remarks == ("its lines have no step: each counts as 3 steps, by the progress bar",)


@pytest.mark.parametrize(
    "setting", ["logging_steps=3,\n", "'logging_steps': 3, ", "--logging_steps 3 ", "logging_steps: 3\n"]
)
def test_logging_steps_are_read_where_a_script_printed_them(setting: str, tmp_path: Path) -> None:
    log = read(setting + "".join(f"{values}\n" for _, values in records(3)), tmp_path)
    check(log, 3)
    assert log.remarks == ("its lines have no step: each counts as 3 steps, by logging_steps",)


def prefixed(lines: Iterable[str]) -> str:
    return "".join(f"3: [rank0]: {line}\n" for line in lines)


def copied(lines: Iterable[str]) -> str:
    """From a terminal of 80 columns."""
    return "".join("\n".join(line[start : start + 80] for start in range(0, len(line), 80)) + "\n" for line in lines)


@pytest.mark.parametrize("form", ["\n".join, prefixed, copied], ids=["plain", "srun", "terminal"])
def test_without_a_bar_each_line_is_a_step_and_the_log_says_so(
    form: Callable[[list[str]], str], tmp_path: Path
) -> None:
    log = read(form([as_text(values) for _, values in records()]), tmp_path)
    check(log)
    assert log.remarks == ("its lines have no step: each counts as 1 step, since logging_steps is unknown",)


def test_a_resumed_run_goes_back_to_its_epoch(tmp_path: Path) -> None:
    lines = [str(values) for _, values in records()]
    log = read("\n".join([*lines[:40], *lines[29:]]), tmp_path)
    check(log)
    assert "logs step 30 again" in log.remarks[1]


def swift() -> str:
    """ms-swift: the step is in the line."""
    lines = ({**values, "global_step/max_steps": f"{step}/{STEPS}", "memory(GiB)": 20.1} for step, values in records())
    return "".join(f"{bar(step, 'Train: ')}\r{as_text(line)}\n" for step, line in enumerate(lines, 1))


def openrlhf() -> str:
    text = ""
    for step, values in records():
        status = {
            "policy_loss": 0.1,
            "reward": values["reward"],
            "response_length": values["completions/mean_length"],
            "actor_grad_norm": values["grad_norm"],
            "entropy_loss": values["entropy"],
            "rollout/truncated_rate": values["completions/clipped_ratio"],
        }
        head = "\x1b[36m(PPOTrainer pid=4242)\x1b[0m INFO 08-13 19:25:45 ppo_trainer.py:547] ✨ "
        text += f"{head}Global step {step}: {status}\n"
        text += f"{head}Evaluation completed in 0:01:00, global_step {step}, eval_metrics: {{'eval_math_pass1': 0.5}}\n"
    return text


def skyrl() -> str:
    text = ""
    for step, values in records():
        metrics = {
            "reward/avg_raw_reward": f"{values['reward']:.4f}",
            "reward/avg_pass_at_8": "0.9000",
            "policy/grad_norm": f"{values['grad_norm']:.4f}",
            "policy/policy_entropy": f"{values['entropy']:.4f}",
            "generate/avg_num_tokens": f"{values['completions/mean_length']:.4f}",
            "eval/all/avg_score": "0.5000",
            "trainer/epoch": 0,
        }
        lines = f"2026-08-21 18:02:38 | INFO | tracking:log:189 - Step {step}: \n{pprint.pformat(metrics)}".split("\n")
        text += "".join(f"\x1b[36m(skyrl_entrypoint pid=77)\x1b[0m {line}\n" for line in lines)
    return text


def slime() -> str:
    return "".join(
        f"[2026-01-01 12:00:00] rollout.py:88 - rollout {step - 1}: {{'rollout/raw_reward': {values['reward']}}}\n"
        f"model.py:1 - step {step - 1}: {{'train/grad_norm': {values['grad_norm']}, 'train/entropy_loss': "
        f"{values['entropy']}, 'train/loss': tensor(0.1, device='cuda:0')}}\n"
        for step, values in records()
    )


def loop() -> str:
    """A loop of one's own."""
    return "".join(
        f"[12:00] Step {step}/{STEPS} | Loss: 1e-3 | Reward: {values['reward']} | grad_norm={values['grad_norm']} | "
        f"entropy = {values['entropy']}\n"
        for step, values in records()
    )


def verl() -> str:
    """As an issue shows it, a metric a line."""
    return "".join(
        f"step:{step}\n - actor/entropy:{values['entropy']}\n - critic/score/mean:{values['reward']}\n"
        f" - actor/grad_norm:np.float64({values['grad_norm']})\n"
        for step, values in records()
    )


@pytest.mark.parametrize(
    ("form", "writer"),
    [(swift, "TRL"), (openrlhf, "OpenRLHF"), (skyrl, "SkyRL"), (slime, "slime"), (verl, "verl"), (loop, "a console")],
    ids=lambda form: getattr(form, "__name__", None),
)
def test_the_console_of_a_trainer(form: Callable[[], str], writer: str, tmp_path: Path) -> None:
    log = read(form(), tmp_path)
    for metric, name in (("reward/mean", "reward"), ("tokens/entropy", "entropy"), ("gradient/norm", "grad_norm")):
        check(log, metric=metric, name=name)
    assert (log.writer, log.rollouts) == (writer, STEPS)
    assert {"reward/avg_pass_at_8", "reward/avg_raw_reward"}.isdisjoint(log.metrics)
    if form in (openrlhf, skyrl):
        assert {record["eval/mean"] for record in log.evaluations} == {0.5}


def state(values: dict[str, Any]) -> dict[str, Any]:
    return {"log_history": [{**line, "step": step} for step, line in records()], **values}


@pytest.mark.parametrize("name", ["trainer_state.json", "history.txt", "state", "run_3.json"])
def test_a_trainer_state_is_known_under_any_name(name: str, tmp_path: Path) -> None:
    log = read(json.dumps(state({"max_steps": 100})), tmp_path, name)
    check(log)
    assert (log.writer, log.remarks) == ("TRL", ())


def test_records_are_found_inside_other_json_and_in_a_file_that_was_cut_off(tmp_path: Path) -> None:
    inside = {"seeds": [1, 2], "runs": {"a": {"history": state({})["log_history"]}}, "few": [{"step": 1, "reward": 1}]}
    check(read(json.dumps(inside), tmp_path, "results.json"))
    cut = json.dumps(state({}))
    log = read(cut[: cut.index('"step": 41')], tmp_path, "trainer_state.json")
    assert (log.rollouts, log.remarks) == (40, ("it is not whole JSON, and is read as text",))


def table(between: str, head: str = "", tail: str = "") -> str:
    names = ["Step", "Training Loss", "reward", "completions / mean_length"]
    lines = [
        [str(step), "0.1", str(values["reward"]), str(values["completions/mean_length"])] for step, values in records()
    ]
    return "".join(f"{head}{between.join(line)}{tail}\n" for line in (names, *lines))


def notebook(output: dict[str, Any]) -> str:
    cells = [{"cell_type": "code", "source": ["print('Step,reward')"], "outputs": [output]}]
    return json.dumps({"cells": cells, "nbformat": 4})


HTML = f'<table class="dataframe">\n<thead>\n{table("</td> <td>", "<tr>  <td>", "</td></tr>")}</thead></table>'
PRINTED = [f"{values}\n" for _, values in records()]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (notebook({"output_type": "display_data", "data": {"text/html": HTML.splitlines(keepends=True)}}), "a.ipynb"),
        (notebook({"output_type": "stream", "text": PRINTED}), "b.ipynb"),
        ("It does this:\n\n" + table("\t") + "Why?\n", "issue.md"),
        (table(" | ", "| ", " |"), "table.md"),
        (table(","), "history"),
    ],
    ids=["html", "stream", "copied", "markdown", "csv"],
)
def test_notebooks_and_tables_that_were_copied(text: str, name: str, tmp_path: Path) -> None:
    log = read(text, tmp_path, name)
    check(log)
    check(log, metric="response/length", name="completions/mean_length")


@pytest.mark.parametrize(
    "text",
    [
        "".join(json.dumps({"reward": 1.0, "token_ids": [1, 2], "prompt": "p"}) + "\n" for _ in range(9)),
        json.dumps({"run": {"reward": 0.5, "loss": 0.1}, "step": 3}),
        "{'learning_rate': 1e-6, 'beta': 0.0}\nnothing\n",
    ],
    ids=["tokens", "summary", "settings"],
)
def test_other_data_is_no_log(text: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no line in it has a step and a known metric"):
        read(text, tmp_path, "a.txt")


def test_pasted_text_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlstab.console import Terminal

    monkeypatch.chdir(tmp_path)

    def paste(text: str) -> None:
        stdin = SimpleNamespace(buffer=io.BytesIO(text.encode("utf-16")), isatty=lambda: True)
        monkeypatch.setattr(sys, "stdin", stdin)

    paste(skyrl())
    (run,) = find(Path("-"))
    check(run.log)
    assert "Ctrl-D" in capsys.readouterr().err
    paste(transformers(1))
    assert look(["-"], console=Terminal()) == 0
    assert (tmp_path / "look.html").exists()
    with pytest.raises(ReportError, match="--follow reads one log"):
        look(["-"], follows=True, console=Terminal())


def test_each_table_of_a_notebook_is_a_run(tmp_path: Path) -> None:
    text = notebook({"output_type": "display_data", "data": {"text/html": HTML + HTML}})
    (tmp_path / "a.ipynb").write_text(text)
    first, second = read_logs(tmp_path / "a.ipynb")
    check(first)
    check(second)
    assert (first.path, second.path) == (f"{tmp_path / 'a.ipynb'}: table 1", f"{tmp_path / 'a.ipynb'}: table 2")
