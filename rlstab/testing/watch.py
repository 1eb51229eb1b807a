"""What a method must leave alone: tensors that are not its own, and what a whole process shares."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlstab.testing.compare import BrokenLaw


class ReadOnly(TorchDispatchMode):
    """Inside, no operation of torch writes to the memory of tensors that belong to others.

    Views, ``detach`` and ``.data`` share that memory. numpy writes to it without a word, so :class:`NumpyReadOnly`
    goes with it.

    Raises:
        BrokenLaw: names the tensor that is written to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guarded: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def guard(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Guard further tensors, by name; they stay alive as long as this does."""
        for name, tensor in tensors:
            if tensor.numel():
                self.guarded.setdefault(tensor.untyped_storage().data_ptr(), name)
                self._kept.append(tensor)

    def name_of(self, tensor: Any) -> str | None:
        """What the memory of a tensor belongs to; None if it is not guarded."""
        if not isinstance(tensor, Tensor) or not tensor.numel():
            return None
        return self.guarded.get(tensor.untyped_storage().data_ptr())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch would import its compiler for this, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = kwargs.get(argument.name, args[index] if index < len(args) else None)
                    for name in map(self.name_of, given if isinstance(given, list | tuple) else [given]):
                        if name is not None:
                            raise BrokenLaw(
                                f"it wrote to {name} in place, which belongs to others. Make a new tensor: clamp, not "
                                f"clamp_; torch.where, not x[i] = ..."
                            )
        return func(*args, **kwargs)


class NumpyReadOnly(TorchFunctionMode):
    """Inside, arrays that share memory with guarded tensors cannot be written to: numpy then raises ValueError."""

    def __init__(self, guard: ReadOnly) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, np.ndarray) and args and self.guard.name_of(args[0]) is not None:
            result.setflags(write=False)
        return result


class Wide(TorchFunctionMode):
    """Inside, no call of torch on float64 evidence reads or gives half precision, and none is ``torch.quantile``.

    Raises:
        BrokenLaw: names the first that does.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("quantile", "nanquantile"):
            raise BrokenLaw(
                "it calls torch.quantile, which refuses more than 2^24 values and sees those at hand only. Use "
                "Pool.quantile in `measure`."
            )
        result = func(*args, **(kwargs or {}))
        for value in (*args, result):
            if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4:
                raise BrokenLaw(
                    f"it computes in {str(value.dtype).removeprefix('torch.')} (in '{name}'), which merges values that "
                    f"differ by a thousandth. Compare in the dtype of the evidence, or in float64."
                )
        return result


class Shared:
    """What a whole process shares, as it was: generators, settings, the environment, files."""

    def __init__(self) -> None:
        self.before = _shared()
        _watch_files()
        _written.clear()

    def check(self) -> None:
        """Find what was used or set.

        Raises:
            BrokenLaw: names it.
        """
        if _written:
            raise BrokenLaw(f"it wrote to {_written[0]}. What lasts belongs in the state.")
        for name, now in _shared().items():
            if now != self.before[name]:
                raise BrokenLaw(
                    f"it used or changed {name}, which the whole process shares. Leave it alone; random numbers come "
                    f"from batch.uniform(seed)."
                )


def _shared() -> dict[str, Any]:
    """Everything that is watched, by name."""
    smallest = torch.tensor(1e-310, dtype=torch.float64)
    return {
        "the random numbers of torch": bytes(torch.get_rng_state().numpy()),
        "the random numbers of random": random.getstate(),
        "the random numbers of numpy": repr(np.random.get_state(legacy=False)),  # noqa: NPY002  # what is watched
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's choice of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's precision of matrix products": torch.get_float32_matmul_precision(),
        "torch's anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "torch's autocast": torch.is_autocast_enabled("cpu"),
        "torch's treatment of denormal numbers": bool(smallest * 1 == 0),
        "numpy's treatment of floating-point errors": np.geterr(),
        "the filters of warnings": list(warnings.filters),
        "the level of logging": logging.root.level,
        "the threads": threading.active_count(),
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),  # noqa: PTH109  # a path to compare
    }


#: Files that were opened to write since the last :class:`Shared` was made.
_written: list[str] = []


@cache
def _watch_files() -> None:
    """Note what is opened to write, from now on; Python cannot take the hook away again."""

    def note(event: str, details: tuple[Any, ...]) -> None:
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"):
            _written.append(str(details[0]))
        if event == "open" and isinstance(details[0], str | bytes) and isinstance(details[2], int):
            path = os.fsdecode(details[0])
            devices = path.startswith("/dev/") and not path.startswith("/dev/shm/")
            if details[2] & (os.O_WRONLY | os.O_RDWR) and "__pycache__" not in path and not devices:
                _written.append(path)

    sys.addaudithook(note)
