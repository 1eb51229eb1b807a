"""Where a host has to be there, a skipped test would hide that it is not: it fails the run."""

import os
from typing import Any

import pytest

#: The tests that may not be skipped, by the variable that says so.
REQUIRED = {"RLSTAB_REQUIRE_TRL": "test_trl", "RLSTAB_REQUIRE_VERL": "test_verl"}
asked = [name for variable, name in REQUIRED.items() if os.environ.get(variable)]

if "test_trl" in asked:
    import trl  # noqa: F401
if "test_verl" in asked:
    import verl  # noqa: F401

skipped: list[str] = []


def note(report: Any) -> None:
    """Remember a test or a module that was skipped and may not be."""
    if report.skipped and any(f"/{name}" in report.nodeid for name in asked):
        skipped.append(report.nodeid)


pytest_runtest_logreport = pytest_collectreport = note


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if skipped:
        print(f"\nskipped, and required: {', '.join(sorted(set(skipped)))}")
        session.exitstatus = 1
