"""Every path on a simulated accelerator, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import simulated

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("on_device_*.py"))


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
@pytest.mark.parametrize(
    ("file", "marks"),
    [*((file, "not slow") for file in FILES), pytest.param("on_device_trainer.py", "slow", marks=pytest.mark.slow)],
)
def test_on_the_simulated_device(file, marks):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, str(HERE / file)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RLSTAB_ON_DEVICE": "1"})
    counted = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    assert counted is not None, ran.stdout
    assert "skipped" not in ran.stdout
