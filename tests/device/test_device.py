"""Every path of the library and of its trainer on a simulated accelerator."""

from pathlib import Path

import pytest

from tests.device import simulated
from tests.device.in_a_fork import assert_pass

FILES = ["on_device_objectives.py", "on_device_trainer.py"]


@pytest.mark.skipif(not simulated.AVAILABLE, reason=simulated.NEEDS)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_the_simulated_device(marks: str, tmp_path: Path) -> None:
    assert_pass(FILES, marks, tmp_path / "log")
