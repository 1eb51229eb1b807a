"""What several files of tests start once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.crews import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Forks the processes of a run."""
    crew = Crew()
    yield crew
    crew.end()
