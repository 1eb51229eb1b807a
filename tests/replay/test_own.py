"""Dumps of our own trainer: its loss, its state and its decisions again, on one rank and on two."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.replay import Dump, load, read_dump
from rlstab.replay.effects import effect_of, run_coefficients
from rlstab.replay.forward import completed
from rlstab.replay.host_loss import formula_of, judge
from tests.train.forks import Forks
from tests.train.runs import file_of, go, quiet, small

OBJECTIVE: list[Any] = [
    {"name": "clip_higher", "low": 0.05, "high": 0.05},
    {"name": "s2t", "max_prob": 0.5},
    {"name": "stare", "target_entropy": 0.8},
    {"name": "entropy_bonus", "coefficient": 0.01},
    {"name": "kl", "coefficient": 0.1},
]
CHANGES = {"epochs": 2, "mini_batches": 2, "micro_batch_size": 3, "rollouts": 3, "lr": 0.01}


def dumping(folder: Path, objective: Any = OBJECTIVE, **changes: Any) -> Any:
    settings = {f"optimisation__{name}": value for name, value in {**CHANGES, **changes.pop("learning", {})}.items()}
    return small(folder, objective, **{"tracking__dump_every": 1, "tracking__trace_every": 1, **settings, **changes})


def agreed(folder: Path, ranks: int) -> list[Any]:
    dump = read_dump(folder / "dump")
    assert dump.notes == []
    assert {step.header.ranks for step in dump.steps} == {ranks}
    verdict = judge(dump.steps)
    assert (verdict.name, verdict.agrees, verdict.findings) == ("rlstab", True, ())
    assert verdict.error < 5e-6
    return dump.steps


@pytest.mark.parametrize("refresh", ["step", "rollout"])
def test_what_a_run_did_is_replayed(refresh: str, tmp_path: Path) -> None:
    """Token by token: what the trace of the run says that each method dropped, clipped and weighted."""
    go(dumping(tmp_path, learning={"refresh": refresh}))
    steps = agreed(tmp_path, 1)
    assert [step.number for step in steps] == list(range(1, 13))
    lines = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    compared = 0
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        formula = formula_of(step)
        assert formula is not None
        effect, state = effect_of(step, formula.objective, formula.state, run_coefficients(step))
        assert effect.numbers["cosine"] == pytest.approx(1, abs=1e-9)
        told = after and after.header.loss
        assert told is None or told.settings["state"] == json.loads(json.dumps(state))
        for line in (line for line in lines if line["optimizer_step"] == step.number):
            own = (step.batch.sequence_ids == line["sequence_id"])[step.batch.sequence]
            assert step.tensors["ids"][step.mask][own].tolist() == line["ids"]
            assert effect.weight[own].tolist() == pytest.approx(line["weight"], rel=1e-4)
            for action, tokens in effect.actions.items():
                places = {place for method in line["methods"].values() for place in method.get(action, [])}
                assert set(tokens[own].nonzero()[:, 0].tolist()) == places
                compared += len(places)
    assert compared > 100


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_dump_one_step(engine: str, tmp_path: Path) -> None:
    """Also where a rank has nothing of a step: two groups in two mini-batches."""
    Forks().does(file_of(dumping(tmp_path, engine=engine)), 2)
    steps = agreed(tmp_path, 2)
    assert [step.number for step in steps] == list(range(1, 13))
    assert {len(set(step.ranks)) for step in steps} <= {1, 2}
    assert all(len(batch.sequence_ids) == 4 for batch in load(tmp_path / "dump"))


def test_every_so_many_steps_are_dumped_and_a_new_run_forgets_the_old_dump(tmp_path: Path) -> None:
    go(dumping(tmp_path))
    run = dumping(tmp_path, tracking__dump_every=5)
    go(run, overwrite=True)
    steps = agreed(tmp_path, 1)
    assert [step.number for step in steps] == [1, 5, 10]
    assert all(len(prompt) for step in steps for prompt in step.prompts)
    assert steps[0].tensors["rewards"].unique().numel() > 1
    # and what it lacks, the model of the run adds
    known = steps[0].tensors["entropies"]
    bare = replace(steps[0], tensors={name: values for name, values in steps[0].tensors.items() if values is not known})
    added = completed(Dump([bare]), run.model.name, quiet())
    assert added.notes == []
    assert torch.allclose(added.steps[0].tensors["entropies"], known, atol=1e-4)
