"""Every path on a simulated accelerator, in a process of its own, whose other tests see none."""

import multiprocessing
import os
import re
import sys
from pathlib import Path

import pytest

from tests.device import simulated
from tests.train.forks import print_to

HERE = Path(__file__).parent


def run_tests(marks: str, log: Path) -> None:
    """In a fork: run the tests of this folder that have these marks."""
    print_to(log)
    os.environ["RLSTAB_ON_DEVICE"] = "1"
    files = map(str, sorted(HERE.glob("on_device_*.py")))
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--assert=plain", "-m", marks, *files]))


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_the_simulated_device(marks: str, tmp_path: Path) -> None:
    forks, log = multiprocessing.get_context("forkserver"), tmp_path / "log"
    forks.set_forkserver_preload(["tests.train.ranks"])
    ran = forks.Process(target=run_tests, args=(marks, log))
    ran.start()
    ran.join()
    said = log.read_text()
    counted = re.search(r"(\d+) passed", said)
    assert ran.exitcode == 0, said
    assert counted is not None, said
    assert "skipped" not in said
