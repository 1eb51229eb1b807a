"""What forks a worker that has imported everything."""

from tests.train.conftest import forks  # noqa: F401
