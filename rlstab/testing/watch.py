"""Watches what a method must leave alone: the caller's tensors, what a whole process shares, and precision."""

import logging
import os
import pickle
import random
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlstab.testing.agreement import BrokenLaw


class ReadOnly:
    """Tensors of the caller, as they were when they were guarded."""

    def __init__(self) -> None:
        self._guarded: list[tuple[str, Tensor, int, Tensor]] = []

    def guard(self, values: Iterable[tuple[str, Any]]) -> None:
        """Guard further tensors, by name; other values are left out."""
        for name, tensor in values:
            if isinstance(tensor, Tensor):
                self._guarded.append((name, tensor, tensor._version, tensor.detach().clone()))

    def check(self) -> None:
        """Find tensors that were written to: torch counts its own writes, and numpy's show in the values.

        Raises:
            BrokenLaw: names the tensor.
        """
        for name, tensor, version, before in self._guarded:
            current = tensor.detach()
            if tensor._version != version or bool(((current != before) & (before == before)).any()):
                raise BrokenLaw(
                    f"it wrote to {name} in place, which belongs to others. Make a new tensor: clamp, not clamp_."
                )


class Wide(TorchFunctionMode):
    """A context in which no torch call on float64 evidence reads or gives half precision, or is ``torch.quantile``.

    Raises:
        BrokenLaw: names the first that does.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("quantile", "nanquantile"):
            raise BrokenLaw(
                "it calls torch.quantile, which sees only the values of one part. Use Pool.quantile in `measure`."
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
    """A snapshot of what a whole process shares: generators, settings, the environment."""

    def __init__(self) -> None:
        self.before = _shared()

    def check(self) -> None:
        """Find what was used or changed.

        Raises:
            BrokenLaw: names it.
        """
        for name, current in _shared().items():
            if current != self.before[name]:
                raise BrokenLaw(
                    f"it used or changed {name}, which the process shares. Random numbers come from batch.uniform."
                )


def _shared() -> dict[str, Any]:
    """Everything that is watched, by name."""
    return {
        "the random numbers of torch": bytes(torch.get_rng_state().numpy()),
        "the random numbers of random": random.getstate(),
        "the random numbers of numpy": pickle.dumps(np.random.get_state(legacy=False)),  # noqa: NPY002  # what is watched
        "torch's default dtype": torch.get_default_dtype(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's precision of matrix products": torch.get_float32_matmul_precision(),
        "the filters of warnings": list(warnings.filters),
        "the level of logging": logging.root.level,
        "the environment": dict(os.environ),
    }
