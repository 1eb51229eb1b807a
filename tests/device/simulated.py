"""A simulated accelerator, ``sim:0``: what a CPU can tell about a GPU.

Its tensors lie in CPU memory, say that they are on another device, and refuse to meet CPU tensors. It counts, by file
and line of rlstab, where the host waits for the device and which sums a GPU would add up in no fixed order. It stands
on torch's Python backend for ``PrivateUse1``, which torch has from 2.10 on. Autocast narrows products of matrices
there, as on CUDA.

With ``RLSTAB_ON_DEVICE=cuda`` in the environment the same tests run on that device for real, where nothing is counted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

import rlstab
from rlstab.core.devices import counting_device

#: The device of the tests, and whether it is a real one.
REAL = os.environ.get("RLSTAB_ON_DEVICE", "1") != "1"
DEVICE = torch.device(os.environ["RLSTAB_ON_DEVICE"], 0) if REAL else torch.device("privateuseone", 0)

#: Whether this torch can have a backend that is written in Python.
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
NEEDS = "torch's Python backend for PrivateUse1 is not in this release"
#: Whose waits are counted apart from those of rlstab.
OTHERS = ("transformers", "trl")
PACKAGE = str(Path(rlstab.__file__).parent)

#: The host waits for their result: a number, or a shape that only values decide. With copies that block, these are the
#: operations of which ``torch.cuda.set_sync_debug_mode`` warns on CUDA.
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount", "repeat_interleave"}
WAITS |= {"unique_dim", "_unique2", "unique_consecutive"}
#: CUDA adds floating-point numbers in no fixed order here, unless torch is told to be deterministic.
UNORDERED = {"index_add", "index_add_", "scatter_add", "scatter_add_", "cumsum", "put_", "embedding_dense_backward"}
UNORDERED |= {"scatter_reduce", "scatter_reduce_", "_index_put_impl_", "index_put", "index_put_", "histc", "bincount"}
#: Of these, and of others, the ones that torch refuses on CUDA where it is told to be deterministic.
REFUSED = {"histc", "bincount", "put_", "kthvalue", "median", "scatter_reduce", "scatter_reduce_"}
#: These allocate, or compute no values, and launch nothing.
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "_local_scalar_dense"}
#: Whose tensors torch would make by itself, out of the reach of a fallback.
FACTORIES = ["arange", "arange.start", "arange.start_step", "eye", "full", "linspace", "ones", "randperm", "zeros"]
FACTORIES += ["tril_indices", "triu_indices"]
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Tally:
    """What happened on the device, by ``(operation, file:line)``.

    A line is of rlstab, or of :data:`OTHERS` where they wait by themselves.

    Attributes:
        waits: reads, for which the host waits until the device has done all that was asked of it.
        sends: copies to the device that block: torch waits for them, and so for all that was asked before.
        queued: copies to the device that do not block.
        unordered: sums in no fixed order.
        launches: operations that compute values, each of which is a kernel or a few.
    """

    def __init__(self, has_float64: bool = True) -> None:
        self.waits: Counter[tuple[str, str]] = Counter()
        self.sends: Counter[tuple[str, str]] = Counter()
        self.queued: Counter[tuple[str, str]] = Counter()
        self.unordered: Counter[tuple[str, str]] = Counter()
        self.launches = 0
        self.has_float64 = has_float64


TALLY = Tally()


class SimulatedTensor(torch.Tensor):
    """A tensor on ``sim:0`` whose values are those of ``held``, a CPU tensor."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> SimulatedTensor:
        if held.dtype == torch.float64 and not TALLY.has_float64:
            raise TypeError("sim:0 has no float64")
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # private to torch
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("sim:0"),
        )
        tensor.held = held
        return tensor  # type: ignore[no-any-return]  # what torch makes has no type

    def __init__(self, held: Tensor) -> None:
        pass

    def tolist(self) -> Any:
        """Torch's refuses subclasses."""
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the held tensor: what saves weights asks which of them share one."""
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _line() -> str:
    """The innermost line that is running of rlstab, or of :data:`OTHERS` if that is further in."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and not name.endswith(("core/devices.py", "core/comm.py")):
            return f"{name[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
        for other in OTHERS:
            if f"-packages/{other}/" in name:
                return f"{other}/{name.rpartition(f'/{other}/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _held(value: Any) -> Any:
    """What a tensor or a list of them holds; torch's own walk through trees takes half of the time of a run."""
    if isinstance(value, list | tuple):
        return [_held(each) for each in value]
    return value.held if isinstance(value, SimulatedTensor) else value


def _simulate(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [*map(_simulate, value)] if isinstance(value, list) else tuple(map(_simulate, value))
    return SimulatedTensor(value) if isinstance(value, Tensor) else value


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = [value for value in values if isinstance(value, Tensor)]
    return found + [each for value in values if isinstance(value, list | tuple) for each in _tensors(value)]


def _simulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == "sim"


def _copied(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """A copy within the device, or between it and the CPU; one to the CPU is read at once by what comes next."""
    into = func is torch.ops.aten.copy_.default
    source, device = args[into], kwargs.pop("device", None)
    here, there = isinstance(source, SimulatedTensor), isinstance(args[0], SimulatedTensor)
    there = there if device is None else _simulated(device)
    if here != there and source.numel():  # a copy of nothing waits for nothing
        blocks = not (kwargs.get("non_blocking", False) or any(args[2:]))
        kind = TALLY.waits if here else TALLY.sends if blocks else TALLY.queued
        kind["copy to cpu" if here else "copy to sim", _line()] += 1
    out = func(*map(_held, args), **kwargs)
    if into:
        return args[0]  # type: ignore[no-any-return]  # a tensor
    return SimulatedTensor(out) if there else out  # type: ignore[no-any-return]  # as func returns it


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the held tensors, and count it."""
    kwargs, name = dict(kwargs), func.overloadpacket.__name__
    if name in ("copy_", "_to_copy"):
        return _copied(func, args, kwargs)
    given = _tensors([*args, *kwargs.values()])
    simulated = [tensor for tensor in given if isinstance(tensor, SimulatedTensor)]
    if simulated:
        _refuse_mixing(name, args, given)
    _count(name, args, given)
    aliases = [value.alias_info for value in func._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    TALLY.launches += not views and name not in FREE
    device = kwargs.get("device")
    there = bool(simulated) if device is None else _simulated(device)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    out = func(*map(_held, args), **{name: _held(value) for name, value in kwargs.items()})
    if func._schema.is_mutable:
        for given_argument, described in zip(args, func._schema.arguments, strict=False):
            written = described.alias_info is not None and described.alias_info.is_write
            if written and isinstance(given_argument, SimulatedTensor) and out is given_argument.held:
                return given_argument
    return _simulate(out) if there else out


def _refuse_mixing(name: str, args: Any, given: Sequence[Tensor]) -> None:
    """Refuse an operation on tensors of two devices, as a GPU does; one number and an index may lie on the CPU."""
    strangers = [tensor for tensor in given if not isinstance(tensor, SimulatedTensor) and tensor.dim() > 0]
    if not strangers:
        return
    values = args[2] if len(args) > 2 else None
    on_cpu = isinstance(values, Tensor) and not isinstance(values, SimulatedTensor) and values.dim() > 0
    if name in INDEXING and isinstance(args[0], SimulatedTensor) and not on_cpu:
        TALLY.sends["index sent", _line()] += 1
        return
    shapes = [(tuple(tensor.shape), tensor.device.type) for tensor in given]
    raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {shapes} at {_line()}")


def _count(name: str, args: Any, given: Sequence[Tensor]) -> None:
    by_bools = name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
    if name in WAITS or by_bools:
        TALLY.waits["bool index" if by_bools else name, _line()] += 1
    adds = len(args) > 3 and bool(args[3]) if "index_put" in name else True
    # whole numbers, and the largest of some, are the same in any order
    extreme = any(isinstance(argument, str) and argument in ("amax", "amin") for argument in args)
    floats = any(tensor.is_floating_point() for tensor in given) and not extreme
    ordered = torch.are_deterministic_algorithms_enabled()
    if ordered and name in REFUSED and (floats or name == "kthvalue"):
        raise RuntimeError(f"{name} has no deterministic form on CUDA, and was asked for at {_line()}")
    if name in UNORDERED and adds and floats and not ordered:
        TALLY.unordered[name, _line()] += 1


class _Sent(TorchFunctionMode):
    """``torch.tensor(..., device="sim")`` and ``new_tensor`` do not dispatch: made on the CPU and moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor:
            like, *args = args
            func, kwargs = torch.tensor, {"dtype": like.dtype, "device": like.device, **kwargs}
        if func in (torch.tensor, torch.as_tensor) and _simulated(kwargs.get("device")):
            device = kwargs.pop("device")
            out = func(*args, **kwargs)
            return out.detach().to(device).requires_grad_(kwargs.get("requires_grad", False))
        return func(*args, **kwargs)


_LIBRARIES: list[Any] = []  # registrations end with their object


def register() -> None:
    """Make ``sim`` a device of this process, before its first backward pass: autograd counts devices then.

    torch allows one such backend in a process.
    """
    if _LIBRARIES:
        return

    class Module(backend_registration._DummyBackendModule):  # type: ignore[name-defined, misc]  # private to torch
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def synchronize(self, *_: Any) -> None:
            pass

        manual_seed = set_rng_state = synchronize

        def get_rng_state(self, *_: Any) -> Tensor:
            return torch.get_rng_state()

    backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=Module())
    fallback, made = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), dispatch_key="PrivateUse1")
    for name in FACTORIES:
        made.impl(name, _factory(name), "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention"):
        made.impl(name, _narrowed(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    _LIBRARIES.extend([fallback, made])


def _factory(name: str) -> Any:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: SimulatedTensor(func(*args, **(kwargs | {"device": torch.device("cpu")})))


def _narrowed(func: Any) -> Any:
    """An operation under autocast: on tensors of its dtype."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        def narrow(value: Any) -> Any:
            return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

        with torch._C._ExcludeDispatchKeyGuard(key):
            return func(*map(narrow, args), **{name: narrow(value) for name, value in kwargs.items()})

    return run


@contextmanager
def simulated_device(*, float64: bool = True) -> Iterator[Tally]:
    """The device ``sim:0``, inside of the block, and the tally of what happens on it.

    Args:
        float64: whether the device has numbers of that type; Apple's mps has not.
    """
    global TALLY
    if REAL:
        yield Tally()
        return
    before, TALLY = TALLY, Tally(float64)
    counting_device.cache_clear()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # else Module.to makes new parameters of another class, and those that two modules share come apart
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with _Sent():
            yield TALLY
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        counting_device.cache_clear()
        TALLY = before


@contextmanager
def accelerate_there(**options: Any) -> Iterator[Tally]:
    """:func:`simulated_device`, which accelerate finds in rlstab's trainer and in TRL's."""
    found = patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=str(DEVICE))
    with found, patch.object(Accelerator, "device", DEVICE), simulated_device(**options) as tally:
        yield tally
