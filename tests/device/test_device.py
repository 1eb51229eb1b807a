"""Every path on a simulated accelerator, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import simulated

HERE = Path(__file__).parent


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("on_device_*.py") if "trl" not in path.name))
def test_on_the_simulated_device(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RLSTAB_ON_DEVICE": "1"})
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert passed is not None, ran.stdout
    assert "skipped" not in ran.stdout
