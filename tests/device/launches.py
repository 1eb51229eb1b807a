"""Where the host would wait for a GPU, and how many kernels it would launch there; told without one.

Tensors of a CPU stand for those of the device, less the ones that are known to stay with the host: what was made
without a device, what ``cpu()`` brought, what is computed from these alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlstab.core import compare

#: What hands a number, or a shape that only the values decide, to Python.
READS = ("_local_scalar_dense", "aten.nonzero.default", "aten._unique", "aten.unique", "aten.masked_select", "bincount")
#: Whose results are the host's where no device is named.
MADE = ("tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange")
#: These allocate, or compute no values, and launch nothing.
FREE = ["empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view"]
FREE += ["_local_scalar_dense", "promote_types"]


class Device:
    """Counts ``launches`` by phase: operations that are no views, each of which is a kernel or a few."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self._host: dict[int, Any] = {}  # storages by address; held, so that no other takes it

    @contextmanager
    def __call__(self, phase: str, *, may_wait: bool = False) -> Iterator[None]:
        self.phase, self.may_wait = phase, may_wait
        with pytest.MonkeyPatch.context() as patched, _Operations(self), _Calls(self):
            # on a CPU numpy makes bools, on a device torch does
            patched.setattr(compare, "_compare", lambda compared, values, other: compared(values, other))
            yield

    def keep(self, result: Any) -> Any:
        """Let the tensors of a result be the host's."""
        for tensor in tensors(result):
            self._host[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return result

    def has(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._host

    def wait(self, what: str) -> None:
        if not self.may_wait:
            raise AssertionError(f"the host waits in the {self.phase}: {what}")


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = str(func), tensors((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if given and not any(map(self.device.has, given)):
            return self.device.keep(result)
        indices = given[1:] if name.startswith("aten.index") else []
        # indexing by bools looks for the places of those that are True
        if any(read in name for read in READS) or any(index.dtype == torch.bool for index in indices):
            self.device.wait(name)
        elif name.startswith("aten.index.") and not all(map(self.device.has, indices)):
            self.device.wait("index sent")
        aliases = [value.alias_info for value in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in aliases)
        self.device.launches[self.device.phase] += not views and name.split(".")[1] not in FREE
        return result


class _Calls(TorchFunctionMode):
    """What a CPU does without an operation, and a device does not."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        result, named = func(*args, **kwargs), kwargs.get("device") is not None
        if name in ("cpu", "numpy", "tolist") and self.device.has(args[0]):
            self.device.wait(name)
        if name == "cpu":
            return self.device.keep(result.clone())
        if name == "to" and not self.device.has(args[0]) and any(isinstance(value, torch.device) for value in args):
            self.device.wait("sent")
            return result.clone()
        if name in MADE and not named:
            return self.device.keep(result)
        if name in ("tensor", "as_tensor") and not isinstance(args[0], Tensor) and result.numel():
            self.device.wait("sent")
        return result
