"""Dumps of rlstab's trainer: its loss, its state and its decisions again, on one rank and on two."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rlstab import PolicyOutputs, Terms, TokenBatch, TokenObjective
from rlstab.core.plan import Plan
from rlstab.look.alternatives import effect_of
from rlstab.look.forward import completed
from rlstab.look.gradient import run_coefficients, traces_of
from rlstab.look.host_loss import judge
from rlstab.look.recorded_loss import loss_of
from rlstab.record import Dump, load, read_dump, trace
from tests.replay.dumps import told
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
    return small(folder, objective, **{"tracking__dump_every": 1, **settings, **changes})


def agreed(folder: Path, ranks: int) -> list[Any]:
    dump = read_dump(folder / "dump")
    assert dump.notes == []
    assert {step.header.ranks for step in dump.steps} == {ranks}
    verdict = judge(dump.steps)
    assert (verdict.name, verdict.agrees, verdict.findings) == ("rlstab", True, ())
    assert verdict.error < 5e-6
    return dump.steps


class Rare(TokenObjective):
    """User-defined: a record cannot name its code, and has to say what it did."""

    name = "rare"
    needs = {"logprobs"}
    writes = {"keep", "weight"}

    def terms(self, batch: TokenBatch, stat: object, state: object) -> Terms:
        return Terms(keep=batch.logprobs > -3.0, weight=torch.where(batch.logprobs < -1.0, 0.5, 1.0))


def seen_by_the_loss(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, dict[tuple[str, int], Any]]]:
    """By optimizer step, and by response and position of a token: its ratio, weight and actions in the loss."""
    steps: list[tuple[Plan, dict[tuple[str, int], Any]]] = []
    loss = Plan.loss

    def keep(plan: Plan, which: Any, live: PolicyOutputs, **more: Any) -> Any:
        if not steps or steps[-1][0] is not plan:
            steps.append((plan, {}))
        part, seen = plan.part(which), trace(plan, which, live)
        batch, weight = part.batch, part.terms.weight
        ratio = (live.logprobs.detach() - batch.old_logprobs).clamp(-20, 20).exp()
        read = torch.stack(list(plan.live_rows(part).values())).any(0)
        for index, (row, position) in enumerate(zip(batch.sequence.tolist(), batch.position.tolist(), strict=True)):
            did = {
                (key, action)
                for key, method in seen.methods.items()
                for action, where in method.actions.items()
                if where[index]
            }
            steps[-1][1][str(int(batch.sequence_ids[row])), position] = (
                float(ratio[index]) if read[index] else None,
                1.0 if weight is None else float(weight[index]),
                did,
            )
        return loss(plan, which, live, **more)

    monkeypatch.setattr(Plan, "loss", keep)
    return steps


@pytest.mark.parametrize("kind", [pytest.param("step", marks=pytest.mark.slow), "rollout", "user-defined"])
def test_a_record_says_of_each_token_what_the_loss_did(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live ratios included: with `refresh: rollout` the evidence of later optimizer steps is older than the policy."""
    seen, objective = seen_by_the_loss(monkeypatch), OBJECTIVE
    if kind == "user-defined":
        objective = [*OBJECTIVE, f"{__file__}:Rare"]
    go(dumping(tmp_path, objective, learning={"refresh": "step" if kind == "step" else "rollout"}))
    monkeypatch.undo()
    if kind != "user-defined":
        steps = agreed(tmp_path, 1)
        assert [step.number for step in steps] == list(range(1, 13))
        # four optimizer steps a rollout
        behind = int(small(tmp_path).rollout.staleness)
        versions = [4 * max(0, rollout - behind) for rollout in range(3) for _ in range(4)]
        assert [step.tensors["versions"].unique().tolist() for step in steps] == [[version] for version in versions]
        doubled = told(steps[0], values=[2 * value for value in steps[0].header.loss.values])
        verdict = judge([doubled.having({"coefficients": 2 * doubled.tensors["coefficients"]})])
        assert verdict.agrees is False
        assert verdict.findings == ("It was not divided by the gradient accumulation.",)
        # a gradient on every token, also where the loss has none: no more tokens differ than have one
        noise = torch.rand(len(steps[0].batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with patch("rlstab.look.host_loss.FEW", 0):  # a factor of each known error too would take seconds
            (finding,) = judge([steps[0].having({"coefficients": noise + 0.5})]).findings
        differing, tokens = map(int, re.findall(r"(\d+) of (\d+) tokens with a gradient differ", finding)[0])
        assert differing == tokens == len(steps[0].batch)
        for step, after in itertools.pairwise(steps):
            loss = loss_of(step)
            assert loss is not None
            assert loss.objective is not None
            coefficients, _, state = effect_of(step, loss.objective, loss.state)
            assert torch.allclose(coefficients, run_coefficients(step), rtol=1e-6, atol=1e-12)
            assert after.header.loss is not None
            assert after.header.loss.settings["state"] == json.loads(json.dumps(state))
    moved, acted = 0, 0
    traced = [(step, found) for recorded in read_dump(tmp_path).steps for step, found in traces_of(recorded)]
    assert sum(len(step.batch) for step, _ in traced) == sum(len(tokens) for _, tokens in seen) > 250
    for step, found in traced:
        marks = [
            (key, action, where) for key, method in found.methods.items() for action, where in method.actions.items()
        ]
        for index, (row, position) in enumerate(
            zip(step.batch.sequence.tolist(), step.batch.position.tolist(), strict=True)
        ):
            of_token = str(int(step.batch.sequence_ids[row])), position
            ratio, weight, did = seen[step.number - 1][1][of_token]
            if ratio is not None:
                assert float(found.ratio[index]) == pytest.approx(ratio, rel=1e-4)
                moved += abs(ratio - 1) > 0.01
            assert float(found.weight[index]) == pytest.approx(weight, rel=1e-4)
            assert {(key, action) for key, action, where in marks if where[index]} == did
            acted += len(did)
    assert acted > 100
    assert moved > 20


@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_ranks_dump_one_step(engine: str, tmp_path: Path) -> None:
    """Also where a rank has nothing of a step: two groups in two mini-batches."""
    Forks().does(file_of(dumping(tmp_path, engine=engine)), 2)
    steps = agreed(tmp_path, 2)
    assert [step.number for step in steps] == list(range(1, 13))
    assert {len(set(step.ranks)) for step in steps} <= {1, 2}
    assert all(len(batch.sequence_ids) == 4 for batch in load(tmp_path / "dump"))


def test_every_so_many_steps_are_dumped_and_a_new_run_forgets_the_old_dump(tmp_path: Path) -> None:
    go(dumping(tmp_path, learning={"rollouts": 1}))
    run = dumping(tmp_path, tracking__dump_every=5)
    go(run, overwrite=True)
    steps = agreed(tmp_path, 1)
    assert [step.number for step in steps] == [1, 5, 10, 12]
    assert all(len(prompt) for step in steps for prompt in step.prompts)
    assert steps[0].tensors["rewards"].unique().numel() > 1
    # and what it lacks, the model of the run adds
    known = steps[0].tensors["entropies"]
    bare = replace(steps[0], tensors={name: values for name, values in steps[0].tensors.items() if values is not known})
    added = completed(Dump([bare]), run.model.name, quiet())
    assert added.notes == []
    assert torch.allclose(added.steps[0].tensors["entropies"], known, atol=1e-4)
