"""``rlstab runs``: what ran, its state, and the best value."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlstab.cli import main
from rlstab.report.listing import running
from tests.report.conftest import place_run, write_bench, write_run


def shown(capsys: pytest.CaptureFixture[str], *paths: Path | str) -> list[str]:
    capsys.readouterr()
    assert main(["runs", *map(str, paths)]) == 0
    return [re.sub(r" {2,}", "  ", line).rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)


def held(folder: Path, process: int, host: str | None = None) -> None:
    (folder / ".lock").write_text(f"{process} {host or socket.gethostname()}\n")


def gone() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_runs_are_listed_in_their_state_with_their_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = [0.1] * 20 + [0.5] * 10 + [0.2] * 30
    write_run(tmp_path / "runs" / "a", changes={"reward/mean": reward})
    held(write_run(tmp_path / "runs" / "b", done=35, evaluate=False, seed=3, changes={"reward/mean": reward}), gone())
    held(write_run(tmp_path / "runs" / "c", done=40, lr=1e-3, changes={"reward/mean": reward}), os.getpid())
    folder = write_run(tmp_path / "runs" / "d", done=10)
    place_run(folder, bench="entropy", setting="fast", method="s2t", seed=1, status="failed", error="a\nNonFinite: NaN")
    (tmp_path / "runs" / "e").mkdir()
    (tmp_path / "runs" / "e" / "metrics.jsonl").write_text("")
    assert shown(capsys) == [
        "runs/a  finished, 60 rollouts",
        "clip_higher on countdown with countdown-tiny, lr 2e-4, seed 0  held out 0.200 after 40",
        "runs/b  stopped after 35 of 60",
        "clip_higher on countdown with countdown-tiny, lr 2e-4, seed 3  reward 0.500, mean of 10 rollouts until 30",
        f"runs/c  running, 40 of 60 (process {os.getpid()})",
        "clip_higher on countdown with countdown-tiny, lr 0.001, seed 0  held out 0.200 after 40",
        "runs/d  failed after 10 of 60: NonFinite: NaN",
        "entropy fast s2t on countdown with countdown-tiny, lr 2e-4, seed 1  held out 0.150 after 0",
        "left out: runs/e: neither config.yaml nor bench.json says what was trained: config.yaml is missing; "
        "run.json is missing",
        "4 runs",
    ]


def test_every_run_is_listed_also_copies_and_those_of_one_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x", "y"):
        write_run(tmp_path / name)
    write_bench(tmp_path / "bench", name="entropy", seeds=1)
    found = shown(capsys, tmp_path, tmp_path / "x")
    assert found[-1] == "6 runs"
    assert sum(" finished, " in line for line in found) == 6


def test_nothing_to_list_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 2
    assert capsys.readouterr().err.startswith("ReportError: runs: no such file or folder.")
    assert main(["runs", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x y\n", "0 host\n", "-1 HOST\n", "9999999999 HOST\n", "1 elsewhere\n", "\udcff"])
def test_a_lock_that_says_nothing_is_no_process(text: str, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(text.replace("HOST", socket.gethostname()), errors="surrogateescape")
    assert running(tmp_path) is None
    held(tmp_path, os.getpid())
    assert running(tmp_path) == os.getpid()


def test_names_cannot_act_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs" / "[red]a\x1b[31m")
    place_run(folder, bench="x", setting="default", method="[bold]\x1b]0;hi\x07", seed=1, status="finished")
    text = "\n".join(shown(capsys))
    assert "\x1b" not in text
    assert "[red]a" in text
    assert "[bold]" in text
