import gc
import signal
import sys

import pytest

from tests.browser import browser_page, chromium  # noqa: F401 (fixtures for every test of a page)

# a shell starts jobs in the background with SIGINT ignored, which tests that interrupt themselves would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Set up a process that runs tests; one that only hands them out to others needs neither torch nor hypothesis."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    import hypothesis
    import torch

    torch.set_num_threads(1)
    # the same draws in every run, and no deadline, because a machine may be busy
    hypothesis.settings.register_profile(
        "repeatable",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("repeatable")
    gc.disable()  # while modules are imported, whose millions of objects stay


def pytest_collection_finish() -> None:
    """The garbage collector passes over what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a user's file stays on the path of imports until its process ends: here, until its test does."""
    monkeypatch.setattr(sys, "path", [*sys.path])
