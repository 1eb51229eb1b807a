"""What processes send each other in a run and what each of them holds, as they count it themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaMLP

from rlstab.config import load_run
from rlstab.train import loop, train
from rlstab.train.engines import Engine
from rlstab.train.engines.fsdp2 import Shards
from rlstab.train.engines.module import PolicyModule
from rlstab.train.policy import Policy

#: The line in which a process says what it counted begins so.
COUNTED = "counted: "


def local(one: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return one.to_local() if isinstance(one, DTensor) else one


def held(values: Iterable[Tensor]) -> int:
    """Bytes in the memory behind tensors, each once."""
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in map(local, values)}
    return sum(size for place, size in found.items() if place)


class Sent(TorchDispatchMode):
    """Every collective of torch, by the phase that is going on.

    Attributes:
        phase: of what comes now.
        seen: a list for each: phase, name, elements and dtype of what is sent or, if that is more, comes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.seen = "elsewhere", list[list[Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, found)) if isinstance(one, Tensor)]
        # the second kind returns what comes; waiting for it is an operation of its own
        if func.namespace in ("c10d", "_c10d_functional") and tensors and "wait" not in func.__name__:
            most = max(tensors, key=Tensor.numel)
            name = func._schema.name.partition("::")[2].strip("_").replace("_", "")
            self.seen.append([self.phase, name, most.numel(), str(most.dtype).removeprefix("torch.")])
        return found

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


class Count:
    """Counts as a run goes on; see :func:`counted`."""

    def __init__(self) -> None:
        self.sent, self.steps = Sent(), list[dict[str, Any]]()
        self.whole, self.reference = list[list[int]](), list[int]()
        self.learner: Any = None
        self.engine: Engine

    def build(self, make: Callable[..., Engine]) -> Callable[..., Engine]:
        """Engines that are made from now on are counted."""

        def made(*given: Any, **options: Any) -> Engine:
            engine: Any = make(*given, **options)
            self.engine, whole, frozen, clip = engine, engine.whole, engine.frozen, engine.clip
            signals, rounds, backward = engine.signals, engine.rounds, engine.backward

            @contextmanager
            def gathered() -> Iterator[Policy]:
                with self.sent.during("whole"), whole() as policy:
                    inside = held(policy.model.parameters())
                    yield policy
                self.whole.append([inside, held(policy.model.parameters())])

            def freeze(policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
                found = frozen(policy)
                shards = getattr(found, "__self__", None)
                if isinstance(shards, Shards):
                    self.reference = [held(one.model.parameters()) for one in (shards.live, shards.policy)]
                return found

            def dealt(parts: Any) -> Iterator[Any]:
                for number, one in enumerate(rounds(parts), 1):
                    self.steps[-1]["rounds"] = number
                    yield one

            def forward(*given: Any, **options: Any) -> Any:
                with self.sent.during(f"forward {self.steps[-1]['rounds']}"):
                    return signals(*given, **options)

            def back(loss: Tensor | None) -> None:
                with self.sent.during(f"{'filler' if loss is None else 'backward'} {self.steps[-1]['rounds']}"):
                    backward(loss)

            def clipped(largest: float) -> float:
                weights = engine.weights.values()
                moments = [one for state in self.learner.optimizer.state.values() for one in state.values()]
                self.steps[-1] |= {
                    "weights": held(weights),
                    "gradients": held(one.grad for one in weights if one.grad is not None),
                    "moments": held(one for one in moments if one.ndim),
                    "beside": held(engine.policy.model.parameters()) if engine.in_words.startswith("fsdp2") else 0,
                }
                with self.sent.during("clip"):
                    return float(clip(largest))

            engine.whole, engine.frozen, engine.clip = gathered, freeze, clipped
            engine.signals, engine.rounds, engine.backward = forward, dealt, back
            return engine

        return made

    def step(self, make: Callable[..., None]) -> Callable[..., None]:
        """Optimizer steps that are made from now on are counted."""

        def stepped(learner: Any, *given: Any, **options: Any) -> None:
            self.learner = learner
            self.steps.append({"rounds": 0, "tokens": [], "again": 0, "from": len(self.sent.seen)})
            with self.sent.during("step"):
                make(learner, *given, **options)
            self.steps[-1]["sent"] = self.sent.seen[self.steps[-1].pop("from") :]

        return stepped

    def forward(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Forwards of a step are counted by the places for tokens in their responses."""

        def run(module: PolicyModule, sequences: tuple[Tensor, ...], *given: Any) -> Any:
            if self.sent.phase != "elsewhere":
                self.steps[-1]["tokens"].append(sequences[2].numel())
            return make(module, sequences, *given)

        return run

    def layer(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Forwards of a layer in a backward, which make its activations again, are counted."""

        def run(*given: Any, **options: Any) -> Any:
            if self.sent.phase.startswith("backward"):
                self.steps[-1]["again"] += 1
            return make(*given, **options)

        return run


def counted(file: Path) -> None:
    """The run; says at the end what was sent in each optimizer step and what this process held at the end of it."""
    count = Count()
    loop.build_engine = count.build(loop.build_engine)
    loop.Learner._step = count.step(loop.Learner._step)
    PolicyModule.forward = count.forward(PolicyModule.forward)
    LlamaMLP.forward = count.layer(LlamaMLP.forward)
    with count.sent:
        train(load_run(file))
    model = count.engine.weights
    found = {
        "processes": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "parameters": sum(one.numel() for one in model.values()),
        "trainable": sum(one.numel() for one in model.values() if one.requires_grad),
        "frozen here": held(one for one in model.values() if not one.requires_grad),
        "steps": count.steps,
        "whole": count.whole,
        "reference": count.reference,
        "gathered": [one[1:] for one in count.sent.seen if one[0] == "whole" and one[3] != "uint8"],
    }
    print(COUNTED + json.dumps(found))


def said(text: str) -> dict[str, Any]:
    """What a process counted, by what it printed."""
    (line,) = [one for one in text.splitlines() if one.startswith(COUNTED)]
    found: dict[str, Any] = json.loads(line.removeprefix(COUNTED))
    return found
