"""How often the host waits for the device in the trainer: no more with more methods, and seldom."""

import pytest

from benchmarks.waits import figures
from tests.device.simulated import REAL

pytestmark = pytest.mark.skipif(REAL, reason="nothing is counted on a real device")

STEP = "optimizer step of one micro-batch"


@pytest.mark.parametrize("methods", [10, pytest.param(29, marks=pytest.mark.slow)])
def test_an_optimizer_step_waits_four_times_and_twice_for_each_micro_batch(tmp_path, methods):
    found = figures(tmp_path, methods, ("micro-batch", STEP))
    assert 0 < found["micro-batch"][0] <= 2
    assert 0 < found[STEP][0] <= 4 + 2
    assert found["micro-batch"][2] == found[STEP][2] == 0


@pytest.mark.slow
def test_decoding_waits_for_one_token_in_eight(tmp_path):
    reads, transformers, blocking, _ = figures(tmp_path, 1, ("decoded token",))["decoded token"]
    assert 0 < reads <= 1 / 8
    assert transformers == blocking == 0
