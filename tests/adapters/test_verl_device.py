"""verl's batch on a simulated accelerator."""

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed: nox -s verl")

from tests.device import simulated
from tests.device.in_a_fork import assert_pass


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
def test_on_the_simulated_device(tmp_path: Path) -> None:
    assert_pass(["on_device_verl.py"], "not slow", tmp_path / "log")
