"""Every path on a simulated accelerator, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import simulated

HERE = Path(__file__).parent


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_the_simulated_device(marks):
    paths = sorted(map(str, HERE.glob("on_device_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *paths]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RLSTAB_ON_DEVICE": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"(\d+) passed", ran.stdout), ran.stdout
    assert "skipped" not in ran.stdout
