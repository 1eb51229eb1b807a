"""Engines: several processes under each train to the weights of one, and go on from each other's checkpoints."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.config import RunConfig, dump_run
from rlstab.train.policy import load_policy
from tests.train.crews import Crew
from tests.train.runs import about, largest_difference, small, weights, without_times

STACK = [{"preset": "recommended"}, {"name": "lp_reg", "share": 0.2}, "entropy_bonus"]

#: Six optimizer steps on two prompts each, in several forwards. With a larger eps AdamW is smooth where a gradient is
#: next to nothing; else rounding would decide the sign of a step there.
SIX = {
    "seed": 3,
    "rollout__prompts": 6,
    "rollout__max_new_tokens": 12,
    "optimisation__rollouts": 2,
    "optimisation__mini_batches": 3,
    "optimisation__micro_batch_size": 3,
    "optimisation__lr": 1e-3,
    "optimisation__eps": 1e-4,
    "optimisation__max_grad_norm": 0.1,
}
#: What issue and documents promise of the largest difference between weights.
ALIKE = 1e-5


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.end()


def file_of(run: RunConfig) -> Path:
    out = Path(run.tracking.out)
    file = out.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_run(run))
    return file


@pytest.fixture(scope="module")
def alone(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    crew.does(file_of(small(out, STACK, **SIX)), 1, "refused")
    return out


@pytest.mark.parametrize(
    ("engine", "processes"),
    [
        ("fsdp2", 2),
        *(
            pytest.param(engine, processes, marks=pytest.mark.slow)
            for engine in ("ddp", "fsdp2")
            for processes in (1, 2, 3)
            if (engine, processes) != ("fsdp2", 2)
        ),
    ],
)
def test_they_train_to_the_weights_of_one_process(
    engine: str, processes: int, crew: Crew, alone: Path, tmp_path: Path
) -> None:
    """Gradients are clipped, a step is refused, and in some steps a rank has no response."""
    out = tmp_path / "run"
    done = crew.does(file_of(small(out, STACK, **SIX, engine=engine)), processes, "refused")
    shares = [re.search("responses in each step: (.*)", said)[1].split() for said in done.said]
    assert [sum(map(int, step)) for step in zip(*shares, strict=True)] == [8] * 6
    assert processes == 1 or any("0" in step for step in shares), "a rank is empty"
    assert about(out)["processes"] == processes
    assert about(out)["engine"].startswith(engine if (engine, processes) != ("ddp", 1) else "one process")
    records = without_times(out)
    assert [one.get("optimizer_steps/refused", 0) for one in records] == [1, 0]
    assert all(one["gradient/norm"] > SIX["optimisation__max_grad_norm"] for one in records), "clipped"
    assert largest_difference(alone, out) <= ALIKE
    start, end = load_policy("countdown-tiny").model.state_dict(), weights(out)
    assert max(float((start[name] - one).abs().max()) for name, one in end.items()) > 100 * ALIKE


# -- what one left and another goes on from --------------------------------------------------------------------------

#: Rollouts wait in a queue, and the objective has a state.
LEFT = {**SIX, "optimisation__rollouts": 4, "tracking__checkpoint_every": 2, "rollout__staleness": 1}
STATES = [*STACK[:2], {"name": "adaptive_entropy", "increment": 0.001, "target_entropy": 0.5}]


@pytest.fixture(scope="module")
def whole(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    crew.does(file_of(small(out, STATES, **LEFT)), 1)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("fsdp2", 2), ("auto", 1)),
        (("auto", 1), ("fsdp2", 2)),
        (("fsdp2", 2), ("fsdp2", 3)),
        (("ddp", 2), ("fsdp2", 3)),
        (("ddp", 3), ("auto", 1)),
        (("fsdp2", 3), ("ddp", 2)),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_number_of_processes(
    before: tuple[str, int], after: tuple[str, int], crew: Crew, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    for (engine, processes), scenario in ((before, "halfway"), (after, "resumed")):
        crew.does(file_of(small(out, STATES, **LEFT, engine=engine)), processes, scenario)
        assert about(out)["processes"] == processes
        assert about(out)["engine"].startswith("one process" if engine == "auto" else engine)
    assert [one["rollout"] for one in without_times(out)] == [1, 2, 3, 4]
    assert largest_difference(whole, out) <= ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_after_the_kill_of_a_rank_all_end_and_the_run_goes_on(engine: str, crew: Crew, tmp_path: Path) -> None:
    """Five random moments for each engine; what is left at the end is, bit for bit, what an undisturbed run leaves."""
    settings = {**LEFT, "optimisation__rollouts": 8, "engine": engine}
    crew.does(file_of(small(tmp_path / "undisturbed", STATES, **settings)), 2)
    chance, slowest = random.Random(14), 0.0
    for number in range(5):
        out = tmp_path / f"run{number}"
        file, moment = file_of(small(out, STATES, **settings)), (chance.randrange(7), chance.random())
        done = crew.tries(file, 2, victim=number % 2, lines=moment[0], after=moment[1])
        assert done.codes[number % 2] == -signal.SIGKILL
        assert done.codes[1 - number % 2] == 1, "\n".join(done.said)
        slowest = max(slowest, done.seconds)
        crew.does(file, 2, "resumed")
        assert about(out)["processes"] == 2
        left, right = weights(tmp_path / "undisturbed"), weights(out)
        assert all(torch.equal(left[name], right[name]) for name in left | right)
        assert without_times(out) == without_times(tmp_path / "undisturbed")
    assert slowest <= 30, "what docs/scale-out.md promises"


# -- what needs whole weights, and other settings --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"stages": ["opob"]}, id="gradients of responses"),
        pytest.param({"stages": [{"name": "goldilocks", "pool": 24}]}, id="features of prompts"),
        pytest.param({"rollout__precision": "int8"}, id="a rounded sampler"),
        pytest.param({"objective": ["clip_higher", "kl"]}, id="a reference policy"),
        pytest.param({"optimisation__gradient_checkpointing": True}, id="checkpointed gradients"),
        pytest.param({"optimisation__refresh": "step"}, id="evidence of each step"),
        pytest.param({"engine": {"name": "fsdp2", "offload": True}}, id="shards in host memory"),
    ],
)
def test_with_shards_everything_works_as_in_one_process(changes: dict[str, Any], crew: Crew, tmp_path: Path) -> None:
    changes = {"objective": STACK, **SIX, **changes}
    engine = changes.pop("engine", "fsdp2")
    stages = {"stages": changes.pop("stages")} if "stages" in changes else {}
    crew.does(file_of(small(tmp_path / "one", **changes, **stages)), 1)
    crew.does(file_of(small(tmp_path / "two", **changes, **stages, engine=engine)), 2)
    assert (about(tmp_path / "one")["engine"], about(tmp_path / "two")["processes"]) == ("one process", 2)
    assert about(tmp_path / "two")["engine"].startswith("fsdp2, 2 processes")
    assert largest_difference(tmp_path / "one", tmp_path / "two") <= ALIKE
