import signal
import sys

import hypothesis
import pytest
import torch

from tests.browser import browser_page, chromium  # noqa: F401 (fixtures for every test of a page)

torch.set_num_threads(1)
# a shell starts jobs in the background with SIGINT ignored, which tests that interrupt themselves would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)

# the same draws in every run, and no deadline, because a machine may be busy
hypothesis.settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a user's file stays on the path of imports until its process ends: here, until its test does."""
    monkeypatch.setattr(sys, "path", [*sys.path])
