"""What several files of tests start once."""

from pathlib import Path

import pytest

from tests.train.forks import Forks
from tests.train.runs import go, long


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
