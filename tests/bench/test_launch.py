"""Benches of commands: what is filled in, what is refused, runs that are stopped, continue, fail and are repeated."""

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlstab.bench import run as running
from rlstab.bench.file import load_bench
from rlstab.bench.plan import dry_run, plan_of
from rlstab.bench.run import run_bench
from rlstab.config import load_objective
from rlstab.errors import ConfigError
from tests.bench.test_file import loaded, mistakes
from tests.bench.test_run import console

#: A typical trainer: 20 steps, a state after each, and it continues from the state that it finds.
TRAINER = """
import json, os, pathlib, signal, sys, time
objective, seed, out, lr, *more = sys.argv[1:]
out = pathlib.Path(out)
state = out / "trainer_state.json"
history = json.loads(state.read_text())["log_history"] if state.exists() else []
(out / "starts").open("a").write(f"{len(history)}\\n")
print(json.dumps(sys.argv[1:]), flush=True)
for step in range(len(history) + 1, 21):
    history.append({"step": step, "reward": 0.2 + float(lr) * step + 0.01 * int(seed), "num_tokens": 500.0 * step})
    state.write_text(json.dumps({"global_step": step, "max_steps": 20, "log_history": history}))
    if step == 7 and more[0] == "kill" and not (out / "killed").exists():
        (out / "killed").write_text("")
        os.kill(os.getpid(), 9)
    if step == 7 and more[0] == "hang" and not (out / "pid").exists():
        (out / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    if step == 7 and more[0] == "fail":
        sys.exit("no memory is left")
"""


def of_commands(folder: Path, *, how: str = "end", more: str = "", **changes: Any) -> dict[str, Any]:
    """A bench of two methods and two seeds; ``how`` says what becomes of a run at step 7."""
    (folder / "train.py").write_text(TRAINER)
    program = shlex.join([sys.executable, str(folder / "train.py")])
    data = {
        "name": "own",
        "out": str(folder / "own"),
        "command": f"{program} {{objective}} {{seed}} {{out}} {{lr}} {{how}} {more}",
        "methods": {"grpo": {"objective": "clip_higher", "set": {"lr": 1e-3}}, "s2t": {"set": {"lr": 2e-3}}},
        "settings": {"default": {"how": how}},
        "seeds": 2,
    }
    data["methods"]["s2t"]["objective"] = [{"name": "clip_higher"}, {"name": "s2t", "max_prob": 0.01}]
    return data | changes


def starts(run: Any) -> list[int]:
    """At which step each start of a run began."""
    return list(map(int, (run.folder / "out" / "starts").read_text().split()))


def test_everything_is_filled_in_and_a_value_stays_one_argument(tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text('{"rate": {lr}, "text": "{note}", "kept": "{{lr}}", "empty": {}}')
    note = "a b; $HOME 'c' {seed}"
    more = '{note} "x {{lr}} {note}" ${A:b} {method}/{setting} --config={config} \\\n --last'
    file = of_commands(tmp_path, more=more, config=str(tmp_path / "given.json"), seeds=[7])
    file["settings"] = {"slow": {"how": "end", "note": note}}
    bench = load_bench(file)
    assert (bench.workers, [run.name for run in bench.runs]) == (1, ["slow/grpo/seed-7", "slow/s2t/seed-7"])
    assert run_bench(bench, console=console()) == 0
    run = bench.runs[1]
    objective, seed, out, lr, *rest = json.loads((run.folder / "worker.log").read_text())
    assert (seed, lr, out) == ("7", "0.002", str(run.folder / "out"))
    assert rest == [
        *("end", note, f"x {{lr}} {note}", "${A:b}", "s2t/slow"),
        *(f"--config={run.folder}/given/given.json", "--last"),
    ]
    assert [method.name for method in load_objective(objective).members] == ["clip_higher", "s2t"]
    assert (run.folder / "given" / "given.json").read_text() == (
        f'{{"rate": 0.002, "text": "{note}", "kept": "{{lr}}", "empty": {{}}}}'
    )
    assert load_bench(bench.resolved).runs[0].hash == bench.runs[0].hash


COMMAND = "name: x\ncommand: train {objective} {seed} {out} {lr}\nmethods: {a: {objective: s2t, set: {lr: 1}}}\n"
#: A file, and the line and key that its error names.
MISTAKES = [
    (COMMAND.replace("{lr}", "{rl}"), "b.yaml:2: command"),
    (COMMAND.replace("{lr}", "{lr} {config}"), "b.yaml:2: command"),
    (COMMAND.replace("{lr}", "'{lr}"), "b.yaml:2: command"),
    (COMMAND.replace("train", "A=1 train"), "b.yaml:2: command"),
    (COMMAND.replace("{seed}", ""), "b.yaml:2: command"),
    (COMMAND.replace("{out}", ""), "b.yaml:2: command"),
    (COMMAND.replace("{objective}", ""), "b.yaml:3: objective"),
    (COMMAND.replace("{lr}", ""), "b.yaml:3: lr"),
    (COMMAND.replace("{lr: 1}", "{}"), "b.yaml:2: command"),
    (f"{COMMAND}settings:\n  one: {{out: 2}}\n", "b.yaml:5: settings.one.out"),
    (f"{COMMAND}settings:\n  one: {{unused: 2}}\n", "b.yaml:5: unused"),
    (f"{COMMAND}base: {{}}\n", "b.yaml:4: base"),
    (f"{COMMAND}config: gone.yaml\n".replace("{lr}", "{lr} {config}"), "b.yaml:4: config"),
    (COMMAND.replace("objective: s2t", "objective: s3t"), "b.yaml:3: objective.name"),
    (COMMAND.replace("}}\n", ", scale: {other: 2.0}}}\n"), "b.yaml:3: methods.a.scale.other"),
    ("name: x\nconfig: c.yaml\nbase: {}\nmethods: {a: s2t}\n", "b.yaml:2: config"),
    ("name: x\nmethods: {a: s2t}\n", "b.yaml:1"),
]


def test_a_mistake_is_pointed_at(tmp_path: Path) -> None:
    for text, place in MISTAKES:
        assert f"{place}: " in mistakes(tmp_path, text)


def test_a_placeholder_of_the_file_that_is_filled_in_has_its_line_there(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: {lr}\nb: {unknown}\n")
    assert "c.yaml:2: {unknown}" in mistakes(tmp_path, f"{COMMAND}config: c.yaml\n".replace("{lr}", "{lr} {config}"))


def test_a_stack_is_taken_apart_and_methods_may_differ_in_values_alone(tmp_path: Path) -> None:
    text = "name: x\ncommand: train {objective} {seed} {out}\nstack: [clip_higher, s2t]\nablate: leave_one_out\n"
    assert [run.method for run in loaded(tmp_path, text).runs[:3]] == ["all", "all-minus-clip_higher", "all-minus-s2t"]
    text = "name: x\ncommand: train {seed} {out} {loss}\nmethods: {a: {set: {loss: grpo}}, b: {set: {loss: dapo}}}\n"
    assert [run.settings["settings"] for run in loaded(tmp_path, text).runs[:2]] == [{"loss": "grpo"}, {"loss": "dapo"}]


def test_runs_are_finished_skipped_and_made_again_where_the_file_has_changed(tmp_path: Path) -> None:
    file, screen = of_commands(tmp_path), console()
    bench = load_bench(file)
    for _ in range(2):
        assert run_bench(bench, console=console()) == 0
    assert [starts(run) for run in bench.runs] == [[0]] * 4
    record = json.loads((bench.runs[0].folder / "bench.json").read_text())
    assert (record["status"], record["seconds"] > 0, record["cpu_seconds"] > 0) == ("finished", True, True)
    changed = load_bench(file | {"methods": {**file["methods"], "grpo": {"objective": "s2t", "set": {"lr": 1e-3}}}})
    dry_run(changed, console=screen)
    assert "default/grpo/seed-0" in screen.file.getvalue().partition("need --overwrite")[2]
    with pytest.raises(ConfigError, match="other settings"):
        run_bench(changed, console=console())
    assert run_bench(changed, overwrite=True, console=console()) == 0
    # from its start, and what was there is kept
    assert starts(changed.runs[0]) == [0]
    assert (changed.runs[0].folder / "out-before-1" / "starts").is_file()
    assert not (changed.runs[1].folder / "out-before-1").exists()


def test_a_program_that_is_not_there_ends_the_bench_before_its_first_run(tmp_path: Path) -> None:
    file = of_commands(tmp_path)
    bench = load_bench(file | {"command": "no-such-program " + file["command"]})
    with pytest.raises(ConfigError, match="no-such-program"):
        run_bench(bench, console=console())
    assert not bench.runs[0].folder.exists()


@pytest.mark.parametrize(("how", "told"), [("fail", ["no memory is left", "code 1"]), ("kill", ["SIGKILL"])])
def test_a_run_that_ended_badly_says_why_and_goes_on_in_its_folder(how: str, told: list[str], tmp_path: Path) -> None:
    bench = load_bench(of_commands(tmp_path, how=how, seeds=1, workers=2))
    assert run_bench(bench, console=console()) == 1
    for run in bench.runs:
        record = json.loads((run.folder / "bench.json").read_text())
        assert record["status"] == "failed"
        assert all(text in record["error"] for text in told)
    assert run_bench(bench, console=console()) == 1  # kept until it is asked for
    assert run_bench(bench, retry=True, console=console()) == 0
    assert [starts(run) for run in bench.runs] == [[0, 7]] * 2


def test_ctrl_c_ends_the_command_and_the_bench_goes_on_with_it(tmp_path: Path, monkeypatch: Any) -> None:
    bench = load_bench(of_commands(tmp_path, how="hang", seeds=1))
    pid = bench.runs[0].folder / "out" / "pid"

    def interrupt(*_: object) -> None:
        if pid.is_file() and pid.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(running.Screen, "look", interrupt)
    monkeypatch.setattr(running, "POLL", 0.05)
    assert run_bench(bench, only=["default/grpo"], console=console()) == running.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    monkeypatch.undo()
    assert [run.name for run in plan_of(bench.runs)["resumed"]] == ["default/grpo/seed-0"]
    assert run_bench(bench, only=["default/grpo"], console=console()) == 0
    assert starts(bench.runs[0]) == [0, 7]


def test_printed_commands_make_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = load_bench(of_commands(tmp_path, how="hang", seeds=1))
    assert run_bench(bench, launcher="print", console=console()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    pid = bench.runs[0].folder / "out" / "pid"
    for _ in range(2):  # stopped by SIGTERM, and started again
        process = running.subprocess.Popen(shlex.split(lines[0]))
        while not pid.is_file() or not pid.read_text():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() in (-signal.SIGTERM, 0)
    running.subprocess.run(shlex.split(lines[0]), check=True)
    assert starts(bench.runs[0])[:2] == [0, 7]
    assert len(plan_of(bench.runs)["finished"]) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit's executor of this machine
def test_a_job_that_is_killed_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    """By submitit's executor of this machine: one job is stopped as before a preemption, after which all finish."""
    pytest.importorskip("submitit", reason="submitit is not installed: pip install -e '.[slurm]'")
    import threading

    slurm = {"cluster": "local", "timeout_min": 5}
    bench = load_bench(of_commands(tmp_path, how="hang", seeds=1, slurm=slurm))
    stopped: list[int] = []

    def preempt() -> None:
        for run in bench.runs:
            pid = run.folder / "out" / "pid"
            while not pid.is_file() or not pid.read_text():
                time.sleep(0.05)
            worker = _parent(int(pid.read_text()))
            os.kill(_parent(worker), signal.SIGUSR2)  # the process of the job
            stopped.append(worker)

    thread = threading.Thread(target=preempt)
    thread.start()
    assert run_bench(bench, launcher="slurm", console=console()) == 0
    thread.join()
    assert len(stopped) == len(bench.runs) == 2
    assert [starts(run) for run in bench.runs] == [[0, 7]] * 2
    with pytest.raises(ConfigError, match=r"tmie.* Valid arguments"):
        run_bench(load_bench(of_commands(tmp_path, how="hang", seeds=1, slurm=slurm | {"tmie": 3})), launcher="slurm")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit's executor of this machine
def test_a_job_whose_rewards_become_nan_is_a_run_that_its_method_lost(tmp_path: Path) -> None:
    """Its process ends well, and so does the bench; by submitit's executor of this machine."""
    pytest.importorskip("submitit", reason="submitit is not installed: pip install -e '.[slurm]'")
    from rlstab.report.comparison import compare
    from rlstab.report.findings import findings
    from rlstab.report.load import load_runs

    file = of_commands(tmp_path, seeds=3, workers=2, slurm={"cluster": "local", "timeout_min": 5})
    text = TRAINER.replace("21)", "41)").replace('"max_steps": 20', '"max_steps": 40')
    reward = "float('nan') if step > 25 and (float(lr), seed) == (0.002, '1') else 0.2"
    (tmp_path / "train.py").write_text(text.replace('"reward": 0.2', f'"entropy": 0.3, "reward": {reward}'))
    bench = load_bench(file)
    assert run_bench(bench, launcher="slurm", console=console()) == 0
    comparison = compare(load_runs(bench.out))
    assert findings(comparison)[0].startswith("s2t lost 1 of 3 runs, grpo 0 of 3: p = 1, three seeds cannot tell")
    assert comparison.checks == ["38 % of the rewards of s2t, seed 1, are NaN or Inf; these runs count as lost."]
