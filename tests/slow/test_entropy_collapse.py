"""The phenomenon that the library is about, on the model that ships: entropy dies while the reward rises."""

from pathlib import Path

import pytest

from rlstab.config import load_run
from tests.train.runs import go

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_countdown.yaml"


@pytest.mark.slow
def test_plain_grpo_loses_its_entropy_while_the_held_out_mean_doubles(tmp_path: Path) -> None:
    run = load_run(EXAMPLE, {"tracking.out": str(tmp_path / "run")})
    assert (run.seed, run.optimisation.lr, run.optimisation.rollouts) == (0, 2e-4, 250)
    result = go(run)
    start, end = result.evaluations[0], result.evaluations[-1]
    assert start["eval/mean"] == pytest.approx(0.14, abs=0.02)
    assert start["eval/entropy"] > 0.3
    assert end["eval/entropy"] < 0.2
    assert end["eval/mean"] >= 2 * start["eval/mean"]
