"""Resuming: a run that was killed goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rlstab
from rlstab.config import dump_run
from rlstab.core.saved_state import dump_state
from rlstab.train import checkpoint, durable
from tests.train.runs import go, small, weights, without_times

STACK = [{"preset": "recommended"}, {"name": "adaptive_entropy", "increment": 0.001, "target_entropy": 0.5}]
LONG: dict[str, Any] = {
    "optimisation__rollouts": 8,
    "optimisation__mini_batches": 2,
    "tracking__checkpoint_every": 2,
    "evaluation__every": 4,
    "evaluation__prompts": 4,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    go(small(out, STACK, **LONG))
    return out


def assert_same(one: Path, other: Path) -> None:
    left, right = weights(one), weights(other)
    assert all(torch.equal(left[name], right[name]) for name in left | right)
    assert without_times(one) == without_times(other)
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()


@pytest.mark.parametrize("lines", [5, *(pytest.param(one, marks=pytest.mark.slow) for one in (3, 8))])
def test_a_run_killed_at_any_moment_continues_bit_for_bit(lines: int, tmp_path: Path, uninterrupted: Path) -> None:
    out = tmp_path / "run"
    file = tmp_path / "run.yaml"
    file.write_text(dump_run(small(out, STACK, **LONG)))
    command = [sys.executable, "-m", "rlstab.cli", "train", str(file), "--resume"]
    metrics = out / "metrics.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= lines:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    # on a busy machine it may have finished before the signal came; it must not have failed
    assert process.wait() in (-signal.SIGKILL, 0), process.stderr.read().decode()
    process.stderr.close()
    go(small(out, STACK, **LONG), resume=True)
    assert_same(out, uninterrupted)


def test_a_kill_during_a_save_leaves_the_checkpoint_before_it(
    tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(path: Path) -> None:
        if "rollout-000004" in str(path):
            raise Killed

    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(durable, "flush", killed)
        with pytest.raises(Killed):
            go(small(out, STACK, **LONG))
    assert [one.name for one in checkpoint.checkpoints(out / "checkpoints")] == ["rollout-000002"]
    go(small(out, STACK, **LONG), resume=True)
    assert_same(out, uninterrupted)
    assert not list((out / "checkpoints").glob(".writing-*"))


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run = small(tmp_path / "run", optimisation__rollouts=2)
    go(run)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    go(run, resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_resume_may_lengthen_a_run(tmp_path: Path) -> None:
    go(small(tmp_path / "run", optimisation__rollouts=2))
    assert len(go(small(tmp_path / "run", optimisation__rollouts=4), resume=True).records) == 4
    go(small(tmp_path / "whole", optimisation__rollouts=4))
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")


def test_a_changed_setting_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=1))
    with pytest.raises(rlstab.errors.CheckpointError) as caught:
        go(small(out, optimisation__rollouts=1, optimisation__lr=0.5), resume=True)
    assert str(caught.value) == (
        f"{out} was started with optimisation.lr = 0.001, the configuration says 0.5. A run continues as it began. "
        f"Resume with {out / 'config.yaml'}, or start over in another tracking.out."
    )


def test_a_checkpoint_of_another_objective_is_an_error(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = small(out, optimisation__rollouts=1)
    go(run)
    record = checkpoint.checkpoints(out / "checkpoints")[-1] / checkpoint.INDEX
    hash_of_this = rewritten(record, objective="000000000000")["objective"]
    with pytest.raises(rlstab.errors.CheckpointError) as caught:
        go(run, resume=True)
    assert str(caught.value) == (
        f"{record.parent} belongs to the objective 000000000000, the configuration describes {hash_of_this}. A "
        f"checkpoint holds the state of its own objective. Resume with the config.yaml of that run, or start over in "
        f"another tracking.out."
    )


def rewritten(record: Path, **changes: Any) -> dict[str, Any]:
    """What a checkpoint's index held before it was changed as if it had been written so."""
    before = json.loads(record.read_text())
    after = {key: value for key, value in {**before, **changes}.items() if key != "sha256"}
    record.write_text(json.dumps({**after, "sha256": checkpoint._sum(after)}))
    return dict(before)


def test_a_state_with_tensors_survives() -> None:
    state = {"a": {"gate": True, "w/x": torch.arange(3.0)}, "b": {}, "n": 2, "x": 0.1, "m": {"tensor": "state/0"}}
    plain, tensors = dump_state(dict.fromkeys(("state", "standing"), state))
    plain = json.loads(json.dumps(plain))
    record = {"format": 4, "rollout": 1, "optimizer_steps": 1, "objective": "", **plain["state"]}
    found = checkpoint._checkpoint({**record, "tensors": plain["tensors"]}, tensors)
    tensor = state["a"].pop("w/x")  # type: ignore[attr-defined]
    for back in (dict(found.state), dict(found.standing or {})):
        assert torch.equal(back["a"].pop("w/x"), tensor)
        assert back == state


def test_a_run_of_before_there_were_stages_continues_bit_for_bit(tmp_path: Path, uninterrupted: Path) -> None:
    out = tmp_path / "run"
    go(small(out, STACK, **{**LONG, "optimisation__rollouts": 4}))
    advantage = {"estimator": "grpo", "std": True, "epsilon": 1e-4, "ddof": 1}
    for one in checkpoint.checkpoints(out / "checkpoints"):
        now = json.loads((one / checkpoint.INDEX).read_text())
        assert (now["format"], now["tensors"]) == (4, [])
        settings = {key: value for key, value in now["run"]["settings"].items() if key != "stages"}
        run = {**now["run"], "settings": {**settings, "advantage": advantage}}
        old = {key: value for key, value in now.items() if key not in ("sha256", "standing")}
        old = {**old, "format": 3, "run": run}
        (one / checkpoint.INDEX).write_text(json.dumps({**old, "sha256": checkpoint._sum(old)}))
    go(small(out, STACK, **LONG), resume=True)
    assert_same(out, uninterrupted)


def test_a_run_continues_that_began_before_some_settings_were_there(tmp_path: Path) -> None:
    def run(**task: Any) -> Any:
        return small(tmp_path / "run", task={"name": "chain", **task}, rollout__max_new_tokens=2)

    go(run())
    config = tmp_path / "run" / "config.yaml"
    before = [line for line in config.read_text().splitlines(True) if "fragile" not in line and "modulus" not in line]
    config.write_text("".join(before))
    assert len(go(run(), resume=True).records) == 3
    config.write_text("".join(before))
    with pytest.raises(rlstab.errors.CheckpointError, match=r"was started with task\.fragile = 0\.0, .* says 0\.5\."):
        go(run(fragile=0.5), resume=True)
