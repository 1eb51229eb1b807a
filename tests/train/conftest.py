"""What several files of tests start once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Forks the processes of a run."""
    started = Forks()
    yield started
    started.end()
