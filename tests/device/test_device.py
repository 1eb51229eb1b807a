"""Every path on a simulated accelerator, in a process of its own, whose other tests see none."""

import multiprocessing
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.device import simulated
from tests.train.forks import print_to

HERE = Path(__file__).parent


OURS = ("objectives", "trainer", "waits")
WITHOUT_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


def run_tests(names: tuple[str, ...], marks: str, log: Path) -> None:
    """In a fork: run the tests of these files that have these marks."""
    print_to(log)
    os.environ["RLSTAB_ON_DEVICE"] = "1"
    files = [str(HERE / f"on_device_{name}.py") for name in names]
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--assert=plain", "-m", marks, *files]))


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
@pytest.mark.parametrize(
    ("files", "marks"),
    [
        (OURS, "not slow"),
        pytest.param(OURS, "slow", marks=pytest.mark.slow),
        pytest.param(("trl",), "not slow", marks=WITHOUT_TRL, id="trl"),
    ],
)
def test_on_the_simulated_device(files: tuple[str, ...], marks: str, tmp_path: Path) -> None:
    forks, log = multiprocessing.get_context("forkserver"), tmp_path / "log"
    forks.set_forkserver_preload(["tests.train.ranks"])
    ran = forks.Process(target=run_tests, args=(files, marks, log))
    ran.start()
    ran.join()
    said = log.read_text()
    counted = re.search(r"(\d+) passed", said)
    assert ran.exitcode == 0, said
    assert counted is not None, said
    assert "skipped" not in said
