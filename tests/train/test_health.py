"""A run that learns nothing says so, why, and what to look at."""

from __future__ import annotations

import io
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlstab.errors import NonFinite
from rlstab.train import loop
from rlstab.train.health import WINDOW, Health, summary
from tests.train.kills import Graded
from tests.train.runs import small

#: A rollout in which all is well.
WELL = {
    "reward/mean": 0.25,
    "reward/zero_std_groups": 0.5,
    "response/length": 12.0,
    "response/ended": 0.9,
    "tokens/kept": 1.0,
    "tokens/live": 0.4,
    "gradient/norm": 0.3,
    "lr": 1e-4,
}
IDLE = {key: value for key, value in WELL.items() if key not in ("tokens/live", "gradient/norm", "lr")}
IDLE |= {"optimizer_steps/skipped": 1}
ZERO = {**IDLE, "reward/mean": 0.0, "reward/zero_std_groups": 1.0}
REFUSED = {**WELL, "optimizer_steps/refused": 1}
del REFUSED["gradient/norm"], REFUSED["lr"], REFUSED["tokens/live"]

CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "zero": (ZERO, "every reward was 0, so every advantage was. Look in samples.jsonl whether"),
    "cut off": ({**ZERO, "response/ended": 0.0}, "Hardly a response ended by itself: raise rollout.max_new_tokens"),
    "scorer": ({**ZERO, "scorer/errors": 3, "scorer/timeouts": 1}, "The scorer failed on "),
    "beside a penalty": ({**WELL, **ZERO, "tokens/live": 0.0, "gradient/norm": 0.1}, "every reward was 0"),
    "equal": ({**ZERO, "reward/mean": 1.0}, "all rewards of each group were equal, so every advantage was 0"),
    "one token": (
        {**ZERO, "response/length": 1.0},
        "every response had at most one token. Look at samples",
    ),
    "refused": (REFUSED, "their optimizer steps were refused over NaN or Inf. Lower optimisation.lr"),
    "refused rewards": ({**REFUSED, "reward/mean": math.nan}, "were refused over NaN or Inf"),
    "dropped": ({**IDLE, "tokens/kept": 0.0}, "the methods dropped every token"),
    "silent": (IDLE, "no optimizer step had a gradient"),
    "no rate": ({**WELL, "lr": 0.0}, "the learning rate was 0. Look at optimisation.lr"),
}


def said(rollouts: list[dict[str, Any]]) -> list[list[str]]:
    health = Health()
    return [health.see(one) for one in rollouts]


@pytest.mark.parametrize(("values", "text"), CAUSES.values(), ids=CAUSES)
def test_a_cause_is_told_once_after_ten_rollouts(values: dict[str, Any], text: str) -> None:
    lines = said([values] * 35)
    assert [place for place, one in enumerate(lines) if one] == [WINDOW - 1]
    (line,) = lines[WINDOW - 1]
    assert line.startswith("nothing learnt in 10 of 10 rollouts: ")
    assert text in line
    (whole,) = summary([values] * 35)
    assert whole.startswith("this run learnt nothing in 35 of 35 rollouts: ")
    assert text in whole


@pytest.mark.parametrize("values", [one for one, _ in CAUSES.values()], ids=CAUSES)
def test_two_rollouts_of_ten_that_teach_something_are_enough(values: dict[str, Any]) -> None:
    assert not any(said([WELL, WELL, *[values] * 8]))
    assert any(said([WELL, *[values] * 9]))
    assert summary([WELL, WELL, *[values] * 8]) == []
    assert summary([WELL] * 20) == []
    assert summary([]) == []


def test_a_policy_that_was_lost_is_told_from_a_task_that_is_too_hard() -> None:
    lines = said([{**WELL, "lr": 1e30}, *[ZERO] * 29])
    (line,) = [one for some in lines for one in some]
    assert "The first rollout had rewards: the policy was lost since. Lower optimisation.lr (it was 1e+30)." in line
    (whole,) = summary([{**WELL, "lr": 1e30}, *[ZERO] * 29])
    assert whole.startswith("this run learnt nothing in 29 of 30 rollouts: every reward was 0")


def test_another_cause_is_told_too() -> None:
    lines = said([*[ZERO] * 12, *[WELL] * 12, *[REFUSED] * 12])
    assert [place for place, one in enumerate(lines) if one] == [8 + 1, 24 + 8]


class Hopeless(Graded):
    def score(self, example: Any, completion: str) -> float:
        return 0.0


def told(run: Any) -> str:
    screen = io.StringIO()
    loop.train(run, console=Console(file=screen, width=200, force_terminal=False))
    return screen.getvalue()


def test_a_run_without_rewards_ends_with_what_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "build_task", lambda settings: Hopeless())
    text = told(small(tmp_path, optimisation__rollouts=11, evaluation__every=0))
    assert text.count("health: nothing learnt in 10 of 10 rollouts: every reward was 0") == 1
    assert text.count("health: this run learnt nothing in 11 of 11 rollouts: every reward was 0") == 1


def test_a_learning_rate_that_destroys_the_policy_is_told(tmp_path: Path) -> None:
    screen = io.StringIO()
    run = small(tmp_path, optimisation__rollouts=30, optimisation__lr=1e30, evaluation__every=0)
    with suppress(NonFinite):  # where 20 refused optimizer steps follow each other
        loop.train(run, console=Console(file=screen, width=200, force_terminal=False))
    assert "health: nothing learnt in " in screen.getvalue()
    assert "Lower optimisation.lr" in screen.getvalue()
