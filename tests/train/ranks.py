"""What tests start in several processes: ``python -m tests.train.ranks SCENARIO FILE`` under a launcher."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

import rlstab
from rlstab.config import RunConfig, load_run
from rlstab.core.comm import TorchComm
from rlstab.core.stats import Mean
from rlstab.stages.advantages import dr_grpo
from rlstab.train import Responses, loop, train
from rlstab.train.engines import build_engine
from rlstab.train.policy import Policy, load_policy
from rlstab.train.processes import count, leave, meet
from tests.train.counting import counted  # noqa: F401  # scenarios too
from tests.train.experts import listed  # noqa: F401


@final
@dataclass(frozen=True)
class WeighPlaces(rlstab.TokenObjective):
    """Weight by place in the response over its mean over the step; the place comes from a signal where one is named."""

    name: ClassVar[str] = "weigh_places"
    writes = frozenset({"weight"})

    signal: str = ""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.signal} - {""})

    def place(self, batch: rlstab.TokenBatch) -> Tensor:
        return batch.signal(self.signal) if self.signal else batch.position.float() + 1

    def measure(self, batch: rlstab.TokenBatch) -> Any:
        return {"mean": Mean.of(self.place(batch))}

    def terms(self, batch: rlstab.TokenBatch, stat: Any, state: Any) -> rlstab.Terms:
        return rlstab.Terms(weight=self.place(batch) / stat["mean"].value)


def weighing(run: RunConfig, signal: str) -> RunConfig:
    """The run with that method added to its objective."""
    run._composition = rlstab.compose(*run.composition.keyed.values(), WeighPlaces(signal))
    return run


def places(responses: Rollout) -> Tensor:
    """``(R, T)``: the place of each token in its response, from 1; NaN where there is none."""
    return responses.response_mask.cumsum(-1).float().where(responses.response_mask, torch.nan)


def fading(responses: Rollout) -> Tensor:
    """``(R, T)``: Dr. GRPO on the length of the text, less the later a token stands."""
    lengths = torch.tensor([float(len(text)) for text in responses.texts], dtype=torch.float64)
    return dr_grpo(lengths, responses.group_ids).unsqueeze(-1) / places(responses).cpu()


def provided(file: Path) -> None:
    """A run on a signal and advantages of its own; made twice, for the processes stay together between two runs."""
    run = weighing(load_run(file), "places")
    train(run, signals={"places": places}, advantages=fading)
    train(run, overwrite=True, signals={"places": places}, advantages=fading)


def raises(file: Path) -> None:
    """A function that raises, on rank 1 alone, in the second rollout."""

    def broken(responses: Rollout) -> Tensor:
        if dist.get_rank() == 1 and int(responses.group_ids.min()) >= 4:
            raise ValueError("no advantages here")
        return fading(responses)

    train(load_run(file), advantages=broken)


def trouble(file: Path) -> None:
    """On rank 1 alone: in rollout 0 the scorer raises, in 1 the live policy is NaN, in 2 the rewards; 3 is sound.

    Each rank saves its weights before the rollouts that reach the advantages, and those at the end.
    """
    run, rank = load_run(file), int(os.environ["RANK"])  # the processes have not met yet
    now, seen, saved = {"rollout": 0, "scored": 0}, [], {}
    build, load = loop.build_task, loop.load_policy

    def build_task(settings: Any) -> Any:
        task = build(settings)
        each = run.rollout.prompts * run.rollout.group // 2

        def score(example: Any, completion: str) -> float:
            rollout, now["scored"] = now["scored"] // each, now["scored"] + 1
            if rank == 1 and rollout == 0:
                raise ValueError("no score")
            return float("nan") if rank == 1 and rollout == 2 else (len(completion) % 5) / 4

        task.score = score
        return task

    def load_policy(*arguments: Any, **options: Any) -> Any:
        policy = load(*arguments, **options)
        seen.append(policy)
        signals = type(policy).signals

        def poisoned(self: Any, *arguments: Any, **options: Any) -> Any:
            found = signals(self, *arguments, **options)
            if rank == 1 and now["rollout"] == 1 and torch.is_grad_enabled():
                return dataclasses.replace(found, logprobs=found.logprobs * torch.nan)
            return found

        type(policy).signals = poisoned
        return policy

    def weights() -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in seen[0].model.state_dict().items()}

    def advantages(responses: Rollout) -> Tensor:
        now["rollout"] = int(responses.group_ids.min()) // run.rollout.prompts
        saved[now["rollout"]] = weights()
        return fading(responses)

    loop.build_task, loop.load_policy = build_task, load_policy
    train(run, advantages=advantages)
    torch.save({**saved, "end": weights()}, file.parent / f"rank-{rank}.pt")


def plain(file: Path) -> None:
    """The run."""
    train(load_run(file))


def halfway(file: Path) -> None:
    """The run, as far as its first checkpoint: it ends as a kill would end it, in all processes at once."""
    save = loop._Loop._save

    def saved(self: Any, **options: Any) -> None:
        save(self, **options)
        leave()
        os._exit(0)

    loop._Loop._save = saved
    train(load_run(file))


def resumed(file: Path) -> None:
    """The run, continued."""
    train(load_run(file), resume=True)


def busy(file: Path) -> None:
    """The run; in the second rollout rank 0 is busy for minutes, and reaches no collective."""

    def slow(responses: Rollout) -> Tensor:
        if dist.get_rank() == 0 and int(responses.group_ids.min()) >= 4:
            time.sleep(300)
        return fading(responses)

    train(load_run(file), advantages=slow)


def refused(file: Path) -> None:
    """The run; the third optimizer step is NaN in every forward of it, whoever makes them.

    Each process says how many of its responses were in each step.
    """
    step, signals, now, shares = loop.Learner._step, Policy.signals, {"step": 0}, list[int]()

    def noted(self: Any, experience: Any, rows: Tensor, *arguments: Any, **options: Any) -> None:
        now["step"] = self.optimizer_steps
        shares.append(len(rows))
        step(self, experience, rows, *arguments, **options)

    def poisoned(self: Any, *arguments: Any, **options: Any) -> Any:
        found = signals(self, *arguments, **options)
        if now["step"] == 3 and torch.is_grad_enabled():
            return dataclasses.replace(found, logprobs=found.logprobs * torch.nan)
        return found

    loop.Learner._step, Policy.signals = noted, poisoned
    train(load_run(file))
    print("responses in each step:", *shares)


def early(file: Path) -> None:
    """The run; rank 1 is gone before the processes meet."""
    if os.environ["RANK"] == "1":
        os._exit(3)
    train(load_run(file))


def blind(file: Path) -> None:
    """The run, continued; rank 1 sees no folder that another process made."""
    if os.environ["RANK"] == "1":
        Path.is_dir = lambda self: False
    train(load_run(file), resume=True)


def asked(file: Path) -> None:
    """The run, with advantages of its own; each process says of how many responses to each prompt, call by call."""
    calls = list[list[int]]()

    def told(responses: Rollout) -> Tensor:
        calls.append(responses.group_ids.unique(return_counts=True)[1].tolist())
        return fading(responses)

    train(load_run(file), advantages=told)
    print("asked:", json.dumps({"processes": count(""), "calls": calls}))


def waiting(file: Path) -> None:
    """One optimizer step; says where the host waited for the device in it, and how many processes there were."""
    from tests.train.test_waits import waits_of

    run = load_run(file)
    accelerator = meet(file.parent, [])
    comm = TorchComm(device=accelerator.device)
    engine = build_engine(run.engine.name, run, load_policy("countdown-tiny"), accelerator, comm)
    waits = waits_of(run, engine, accelerator, comm)
    print("waited:", json.dumps({"processes": count(""), "seen": waits.seen}))


if __name__ == "__main__":
    {"provided": provided, "raises": raises, "trouble": trouble, "early": early}[sys.argv[1]](Path(sys.argv[2]))
    leave()
