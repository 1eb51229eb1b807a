"""What several files of tests start once."""

import sys
from pathlib import Path

import pytest

from tests.train import ranks  # noqa: F401  # before the server is forked
from tests.train.forks import Forks, start_server
from tests.train.runs import go, long

if sys.platform == "linux":  # frameworks of macOS do not survive a fork
    start_server()


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Forks the processes of a run."""
    return Forks()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, for tests that read or copy it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    go(long(out))
    return out
