"""Tests on the simulated device in a process of their own, whose other tests see none."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.train.forks import forkserver, print_to

HERE = Path(__file__).parent


def run_tests(files: list[str], marks: str, log: Path) -> None:
    """In a fork: run the tests of these files of this folder that have these marks."""
    print_to(log)
    os.environ["RLSTAB_ON_DEVICE"] = "1"
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--assert=plain", "-m", marks, *files]))


def assert_pass(files: list[str], marks: str, log: Path) -> None:
    """The tests passed, there were some, and none was skipped."""
    ran = forkserver().Process(target=run_tests, args=([str(HERE / file) for file in files], marks, log))
    ran.start()
    ran.join()
    said = log.read_text()
    assert ran.exitcode == 0, said
    assert re.search(r"(\d+) passed", said) is not None, said
    assert "skipped" not in said
