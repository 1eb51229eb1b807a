"""What several files of tests start once."""

import pytest

from tests.train.forks import Forks


@pytest.fixture(scope="session")
def forks() -> Forks:
    """Forks the processes of a run."""
    return Forks()
