"""At what the host would wait for a GPU, and how many kernels it would launch there; counted without one.

Tensors of a CPU stand for those of the device, less the ones that are known to stay with the host: what was made
without a device, what ``cpu()`` brought, what is computed from these alone.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

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
FREE = (
    *("empty", "new_empty", "empty_like", "empty_strided", "detach", "_local_scalar_dense", "_unsafe_view"),
    "promote_types",
)


class Waits:
    """Counts by phase, which a test names as it goes.

    Attributes:
        phase: of what comes now.
        seen: waits, by phase and by "file function: what", or by "transformers: what".
        launches: by phase; operations that are no views, each of which is a kernel or a few.
    """

    def __init__(self, phase: str = "") -> None:
        self.phase = phase
        self.seen: dict[str, Counter[str]] = {}
        self.launches: Counter[str] = Counter()
        self._host: dict[int, Any] = {}  # storages by address; held, so that no other takes it

    def keep(self, *values: Tensor) -> None:
        """Let tensors be the host's."""
        for tensor in values:
            self._host[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def send(self, tensor: Tensor) -> Tensor:
        """Let a tensor be the device's."""
        self._host.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def hosts(self, tensor: Tensor) -> bool:
        """The host has it."""
        return tensor.untyped_storage()._cdata in self._host

    def wait(self, what: str) -> None:
        """Count one, for the innermost line that is neither torch's nor a test's."""
        frame = _frame()
        path = Path(frame.f_code.co_filename)
        where = "transformers" if "transformers" in path.parts else f"{path.name} {frame.f_code.co_name}"
        self.seen.setdefault(self.phase, Counter())[f"{where}: {what}"] += 1

    @contextmanager
    def __call__(self) -> Iterator[Self]:
        with pytest.MonkeyPatch.context() as patched, _Operations(self), _Calls(self):
            # on a CPU numpy makes bools, on a device torch does
            patched.setattr(compare, "_compare", lambda compared, values, other: compared(values, other))
            yield self


def _frame() -> FrameType:
    """The innermost that is neither torch's nor one of this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.name != "waits.py" and "torch" not in path.parts:
            break
        frame = frame.f_back
    return frame


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        own = bool(given) and all(map(self.waits.hosts, given))
        if not own:
            if any(read in name for read in READS) or (name.startswith("aten.index") and _by_mask(args)):
                self.waits.wait(name.split(".")[1])
            elif name.startswith("aten.index.") and any(map(self.waits.hosts, given[1:])):
                self.waits.wait("index sent")
            aliases = [value.alias_info for value in func._schema.returns]
            views = any(alias is not None and not alias.is_write for alias in aliases)
            if not views and name.split(".")[1] not in FREE:
                self.waits.launches[self.waits.phase] += 1
        result = func(*args, **(kwargs or {}))
        if own:
            self.waits.keep(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result


def _by_mask(args: Any) -> bool:
    """Indexing by bools looks for the places of those that are True."""
    index = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(place, Tensor) and place.dtype == torch.bool for place in index)


class _Calls(TorchFunctionMode):
    """What a CPU does without an operation, and a device does not."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        of_device = isinstance(first, Tensor) and not self.waits.hosts(first)
        if name in ("cpu", "numpy", "tolist") and of_device:
            self.waits.wait(name)
        if name == "cpu":
            result = func(*args, **kwargs).clone()
            self.waits.keep(result)
            return result
        if name == "to" and of_device and self._returned():
            self.waits.wait("returned")
            result = func(*args, **kwargs).clone()
            self.waits.keep(result)
            return result
        if name == "to" and isinstance(first, Tensor) and not of_device and _names_device(args, kwargs):
            self.waits.wait("sent")
            return self.waits.send(func(*args, **kwargs).clone())
        result = func(*args, **kwargs)
        if name in MADE and isinstance(result, Tensor):
            if kwargs.get("device") is None:
                self.waits.keep(result)
            elif name in ("tensor", "as_tensor") and not isinstance(first, Tensor) and result.numel():
                self.waits.wait("sent")
        return result

    def _returned(self) -> bool:
        """A collective that was given what the host has gives the host what comes of it."""
        frame = _frame()
        given = frame.f_locals.get("values")
        return Path(frame.f_code.co_filename).name == "comm.py" and given is not None and self.waits.hosts(given)


def _names_device(args: Any, kwargs: Any) -> bool:
    return any(isinstance(value, torch.device) for value in (*args, *kwargs.values()))
