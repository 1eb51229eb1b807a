"""What a forked process of a run does: scenarios, by the name that a test gives to :mod:`tests.train.forks`."""

import json
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlstab.cli import main
from rlstab.config import load_run
from rlstab.train import Rollout, train
from tests.train.forks import COUNTED
from tests.train.own import places, poison
from tests.train.runs import quiet


def plain(file: Path, **options: Any) -> None:
    """The run."""
    train(load_run(file), **options)


def command(file: Path) -> None:
    """The run from the command line."""
    sys.exit(main(["train", str(file)]))


def tell(counts: Any) -> None:
    """Say what was counted, for :func:`tests.train.forks.Done.counted`."""
    print(COUNTED + json.dumps(counts))


def processes() -> int:
    """Of the run, as they count themselves."""
    return dist.get_world_size() if dist.is_initialized() else 1


def provided(file: Path, breaks: int = 0) -> None:
    """The run on user-defined signals; each process tells of how many responses to each prompt it was asked.

    With ``breaks``, on rank 1 alone, that call of the function raises.
    """
    calls: list[list[int]] = []

    def told(responses: Rollout) -> Tensor:
        calls.append(responses.group_ids.unique(return_counts=True)[1].tolist())
        if len(calls) == breaks and dist.get_rank() == 1:
            raise ValueError("no signal here")
        return places(responses)

    train(load_run(file), signals={"places": told, "poison": poison})
    tell({"processes": processes(), "calls": calls})


def limited(file: Path, size: int, **options: Any) -> None:
    """The run, where no file can grow beyond this many bytes, as on a full disk; reports how it ends."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    said = ""
    try:
        train(load_run(file), console=quiet(), **options)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    tell(said)


def unpickled(file: Path) -> None:
    """The run, continued; tells which classes and functions pickles named meanwhile."""
    named: list[str] = []

    def listen(event: str, given: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            named.append(".".join(given))

    sys.addaudithook(listen)
    train(load_run(file), console=quiet(), resume=True)
    tell(named)


def held(values: Iterable[Tensor | None]) -> int:
    """Bytes in the memory behind tensors of this process, each once."""
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values if value is not None]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in local}
    return sum(size for place, size in storages.items() if place)


def recomputed(file: Path) -> None:
    """The run; tells how often the forward of a layer was one whose activations are not kept."""
    calls = 0
    forward: Any = CheckpointWrapper.forward

    def noted(layer: CheckpointWrapper, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(layer, *args, **options)

    CheckpointWrapper.forward = noted  # type: ignore[assignment, method-assign]  # the process ends with the run
    train(load_run(file))
    tell(calls)


class Sent(TorchDispatchMode):
    """Every collective of torch: name, elements and dtype of what is sent or, if that is more, comes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.seen: list[tuple[str, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, made)) if isinstance(value, Tensor)]
        # the second kind returns what comes; waiting for it is an operation of its own
        if func.namespace in ("c10d", "_c10d_functional") and tensors and "wait" not in func.__name__:
            most = max(tensors, key=Tensor.numel)
            name = func._schema.name.partition("::")[2].strip("_").replace("_", "")
            self.seen.append((name, most.numel(), str(most.dtype).removeprefix("torch.")))
        return made


def counted(file: Path) -> None:
    """The run; tells for each optimizer step what this process held in it, and what was sent since the one before."""
    sent, steps = Sent(), list[dict[str, Any]]()

    def before(optimizer: Optimizer, *_: Any) -> None:
        given = [value for group in optimizer.param_groups for value in group["params"]]
        steps.append({"weights": held(given), "gradients": held(value.grad for value in given), "sent": sent.seen[:]})
        sent.seen.clear()

    def after(optimizer: Optimizer, *_: Any) -> None:
        moments = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
        steps[-1]["moments"] = held(value for value in moments if value.ndim)

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    with sent:
        train(load_run(file))
    for hook in hooks:
        hook.remove()
    tell({"processes": processes(), "steps": steps})
