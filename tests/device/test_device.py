"""Every path on a simulated accelerator, in a process of its own."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.device import simulated

HERE = Path(__file__).parent
OURS = ("objectives", "trainer", "waits")
WITHOUT_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
@pytest.mark.parametrize(
    ("files", "marks"),
    [
        (OURS, "not slow"),
        pytest.param(OURS, "slow", marks=pytest.mark.slow),
        pytest.param(("trl",), "not slow", marks=WITHOUT_TRL, id="trl"),
    ],
)
def test_on_the_simulated_device(files, marks):
    paths = [str(HERE / f"on_device_{file}.py") for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *paths]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RLSTAB_ON_DEVICE": "1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"(\d+) passed", ran.stdout), ran.stdout
    assert "skipped" not in ran.stdout
