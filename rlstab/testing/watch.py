"""What a method must leave alone: tensors that are not its own, and what a whole process shares."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlstab.testing.agreement import BrokenLaw


@dataclass(frozen=True)
class Untouched:
    """Tensors by name, as they were; :meth:`check` finds what was written to, be it the value that was there."""

    tensors: Sequence[tuple[str, Tensor]]
    versions: Sequence[int]
    values: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Untouched:
        """Remember them."""
        listed = list(tensors)
        return cls(listed, [one._version for _, one in listed], [one.detach().clone() for _, one in listed])

    def check(self) -> None:
        """Find what was written to.

        Raises:
            BrokenLaw: names it.
        """
        for (name, now), version, before in zip(self.tensors, self.versions, self.values, strict=True):
            # torch counts writes; what numpy writes changes the values alone
            if now._version != version or not torch.equal(now.detach().nan_to_num(), before.nan_to_num()):
                raise BrokenLaw(
                    f"it wrote to {name} in place, which belongs to others. Make a new tensor: clamp, not clamp_; "
                    f"torch.where, not x[i] = ..."
                )


class Shared:
    """Generators and settings of the process, as they were."""

    def __init__(self) -> None:
        self.generators = _generators()
        self.settings = _settings()

    def check(self) -> None:
        """Find what was used or set.

        Raises:
            BrokenLaw: names it.
        """
        for name, now in _generators().items():
            if now != self.generators.get(name):
                raise BrokenLaw(
                    f"it drew from the global random number generator of {name}, or seeded it; use batch.uniform(seed)."
                )
        for name, setting in _settings().items():
            if setting != self.settings[name]:
                raise BrokenLaw(f"it changed {name}, which the whole process shares. Leave it alone.")


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": bytes(torch.get_rng_state().numpy()), "random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        found["numpy"] = (state[0], state[1].tobytes(), *state[2:])
    return found


def _settings() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's choice of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "numpy's treatment of floating-point errors": numpy.geterr() if numpy is not None else None,
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),  # noqa: PTH109  # a path to compare
    }


class Wide(TorchFunctionMode):
    """Inside, no call of torch on float64 evidence reads or gives half precision, and none is ``torch.quantile``.

    Raises:
        BrokenLaw: names the first that does.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("quantile", "nanquantile"):
            raise BrokenLaw(
                "it calls torch.quantile, which refuses more than 2^24 values and sees those at hand only. Use "
                "Pool.quantile in `measure`."
            )
        found = func(*args, **(kwargs or {}))
        for one in (*args, found):
            if isinstance(one, Tensor) and one.is_floating_point() and one.itemsize < 4:
                raise BrokenLaw(
                    f"it computes in {str(one.dtype).removeprefix('torch.')} (in '{name}'), which merges values that "
                    f"differ by a thousandth. Compare in the dtype of the evidence, or in float64."
                )
        return found
