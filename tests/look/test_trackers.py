"""Logs as the packages of four trackers write them: while they are written, after a kill, and without their end.

``nox -s trackers`` installs the packages; elsewhere the tests of a package that is missing are skipped.
"""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstab.bins import Run
from rlstab.cli import main
from rlstab.errors import ReportError
from rlstab.look.find import find, read_logs
from rlstab.look.look import follow

LOG = Path(__file__).parents[1] / "diagnose" / "data" / "truncation.jsonl"
#: What each package is asked to do, with ``rows`` of numbers by step, in the folder that it stands in. All of it is
#: local; each then goes on as a run that trains does, until it is killed.
WRITERS = {
    "trackio": """
import trackio
trackio.init(project="grpo", name="run-a", embed=False)
for step, row in rows: trackio.log(row, step=step)
""",
    "mlflow": """
import mlflow
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("grpo")
mlflow.start_run(run_name="run-a")
for step, row in rows: mlflow.log_metrics(row, step=step)
""",
    "wandb": """
import wandb
run = wandb.init(mode="offline", project="grpo", name="run-a")
for step, row in rows: run.log(row, step=step)
""",
    "tensorboard": """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("runs")
for step, row in rows:
    for name, value in row.items(): writer.add_scalar(name, value, step)
writer.flush()
""",
}
AROUND = """
import json, sys, time
rows = [(line.pop("rollout"), {{name: float(value) for name, value in line.items()}}) for line in json.load(sys.stdin)]
{}
time.sleep(2)  # threads write
print("written", flush=True)
time.sleep(600)
"""
ENVIRONMENT = {
    **{"TRACKIO_DIR": ".", "TRACKIO_SHOW_LINK": "0", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": "."},
    **{"GRADIO_ANALYTICS_ENABLED": "False", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
    **{"HF_HUB_OFFLINE": "1", "HOME": ".", "OMP_NUM_THREADS": "1"},
}


@pytest.fixture(params=WRITERS)
def tracker(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if find_spec(name) is None:
        assert not os.environ.get("RLSTAB_REQUIRE_TRACKERS"), f"{name} is missing"
        pytest.skip(f"{name} is not installed: nox -s trackers")
    return name


def lines() -> list[dict[str, float]]:
    every = [json.loads(line) for line in LOG.read_text().splitlines()]
    return [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in every]


def rewards(log: Run) -> list[float]:
    return [float(value) for value in log.metrics["reward/mean"][1]]


@pytest.mark.slow
def test_what_a_tracker_writes_is_read_while_it_writes_after_a_kill_and_without_its_end(
    tracker: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = [row["reward/mean"] for row in lines()]
    with subprocess.Popen(
        [sys.executable, "-c", AROUND.format(WRITERS[tracker])],
        **{"cwd": tmp_path, "env": {**os.environ, **ENVIRONMENT}, "text": True},
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(json.dumps(lines()))
        writer.stdin.close()
        try:
            assert any(line.strip().endswith("written") for line in writer.stdout)
            seen = list[float]()
            for _ in range(600):  # the rest is still in its memory, or on its way to the file
                if len(seen) > 0.8 * len(expected):
                    break
                time.sleep(0.1)
                (run,) = find(tmp_path)
                assert run.log is not None
                seen = rewards(run.log)
                assert seen == pytest.approx(expected[: len(seen)], rel=1e-6)
                assert not any("again" in remark for remark in run.log.remarks)
            assert len(seen) > 0.8 * len(expected)
        finally:
            writer.kill()
    (run,) = find(tmp_path)
    assert run.log is not None
    seen, before = rewards(run.log), seen
    assert seen[: len(before)] == before
    assert main(["look", str(tmp_path), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["cause"] == "truncation"
    file = max(path for path in tmp_path.rglob("*") if path.suffix in (".db", ".wandb") or "tfevents" in path.name)
    assert rewards(read_logs(file)[0]) == seen  # by its own path too
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 40, 0):
        for other in file.parent.glob(f"{file.name}-*"):  # what SQLite would repair it from
            other.unlink()
        file.write_bytes(whole[:size])
        said, left = "", list[float]()
        try:
            left = [reward for run in find(tmp_path) if run.log is not None for reward in rewards(run.log)]
        except ReportError as error:
            said = str(error)
        assert len(said.splitlines()) == (not left)
        assert left == seen[: len(left)]
        assert file.stat().st_size == size  # nothing was repaired or written


#: The start of a file of wandb, and the head of a whole record: checksum, length, kind.
HEAD = b":W&B" + bytes(3)


def wandb_file(folder: Path, run: str, start: str, rewards: Mapping[int, float]) -> Path:
    """What one start of a run leaves, in wandb's own records."""
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    data = HEAD
    for step, reward in rewards.items():
        row = record()
        row.history.step.num = step
        for name, value in {"train/global_step": step, "train/reward": reward}.items():
            item = row.history.item.add()
            item.key, item.value_json = name, json.dumps(value)
        frame = row.SerializeToString()
        data += struct.pack("<IHB", 0, len(frame), 1) + frame
    file = folder / "wandb" / f"offline-run-{start}-{run}" / f"run-{run}.wandb"
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    return file


def test_runs_of_wandb_in_one_folder_are_told_apart_and_a_resumed_one_is_joined(tmp_path: Path) -> None:
    wandb_file(tmp_path, "aaa", "20260101_100000", dict.fromkeys(range(1, 31), 0.1))
    wandb_file(tmp_path, "bbb", "20260101_110000", dict.fromkeys(range(1, 21), 0.5))
    newest = wandb_file(tmp_path, "aaa", "20260101_120000", dict.fromkeys(range(21, 41), 0.9))
    resumed, other = read_logs(tmp_path)
    assert resumed.path == str(newest.parent)
    assert rewards(resumed) == [0.1] * 20 + [0.9] * 20
    assert "logs step 21 again" in resumed.remarks[0]
    assert (rewards(other), other.remarks) == ([0.5] * 20, ())
    assert [run.path for run in find(tmp_path)] == [newest.parent, Path(other.path)]
    with pytest.raises(ReportError, match="2 runs are logged there"):
        follow(tmp_path, print)


@pytest.mark.parametrize("run", ["aaa", "bbb"])
def test_the_starts_of_one_run_of_wandb_are_one_run(run: str, tmp_path: Path) -> None:
    wandb_file(tmp_path, run, "20260101_100000", dict.fromkeys(range(1, 31), 0.1))
    wandb_file(tmp_path, run, "20260101_110000", dict.fromkeys(range(31, 41), 0.5))
    (log,) = read_logs(tmp_path)
    assert (log.path, rewards(log), log.remarks) == (str(tmp_path), [0.1] * 30 + [0.5] * 10, ())
