"""Kills at random and aimed moments, of starts, saves, continued runs and replaced ones: all resume bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("kills", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_after_any_kill_a_run_continues_bit_for_bit(kills: int) -> None:
    command = [sys.executable, "-m", "tests.train.kills", str(kills), "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    print(ran.stdout)
    found = json.loads(ran.stdout)
    assert found["failures"] == []
    assert found["aimed"] + found["random"] >= kills
    assert found["aimed"] >= kills // 3
    assert found["random"] >= kills // 10
    assert found["terminated"] >= 1
    assert found["calls"] > 50, "the calls at which kills are aimed"
