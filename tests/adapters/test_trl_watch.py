"""A run of TRL that a sign stops: where, with which weights, and how it continues."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]', or nox -s trl")

from rlstab.look import WatchCallback
from rlstab.look.find import read_logs
from rlstab.signs import signs
from tests.adapters.trl_jobs import recorder, trainer_of

#: TRL and what it imports warn of their own future.
pytestmark = pytest.mark.filterwarnings("default")

#: The first reward of every response is 1, and it falls.
GIVEN: dict[str, Any] = {"max_steps": 60, "num_iterations": 1, "save_strategy": "no", "learning_rate": 1e-4}


def falling(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    level = 0.9 - 0.025 * trainer_state.global_step
    return [float((sum(ids) + place) % 7 / 6 < level) for place, ids in enumerate(completion_ids)]


def test_a_sign_stops_training_where_the_page_sees_it_and_it_goes_on(tmp_path: Path) -> None:
    def made(folder: str, *callbacks: Any, **changes: Any) -> Any:
        extra = {"reward_funcs": falling, "callbacks": list(callbacks)}
        return trainer_of(tmp_path / folder, extra=extra, **{**GIVEN, **changes})

    watched = made("watched", WatchCallback(stop_at=["reward_fall"]))
    steps = recorder(watched)
    watched.train()
    stopped = watched.state.global_step
    assert 0 < stopped < GIVEN["max_steps"]
    assert len(steps) == stopped

    def seen(state: Path) -> set[str]:
        (log,) = read_logs(state)
        return {sign.name for sign in signs(log) if sign.fired}

    checkpoint = tmp_path / "watched" / f"checkpoint-{stopped}"
    assert "reward_fall" in seen(checkpoint)

    plain = made("plain", max_steps=stopped)
    without = recorder(plain)
    plain.train()
    for name, weight in without[-1]["weights"].items():
        assert torch.equal(weight, steps[-1]["weights"][name]), name
    before = made("before", max_steps=stopped - 1, save_strategy="steps", save_steps=stopped - 1)
    before.train()
    assert "reward_fall" not in seen(tmp_path / "before" / f"checkpoint-{stopped - 1}")

    # what is known already stops nothing again
    again = made("watched", WatchCallback(stop_at=["reward_fall"]), max_steps=stopped + 3)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == stopped + 3
