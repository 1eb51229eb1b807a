"""A fresh process, in which a method has not run yet: another hash seed, rank, host, time zone and date.

Two servers are started for all checks of a Python process; two, for another hash seed may order a small set alike. They
import the modules of methods and never run one; every question is answered by a fork, so that nothing is left of the
last one.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from rlstab.core.compose import walk
from rlstab.core.method import Method
from rlstab.core.objective import TokenObjective
from rlstab.errors import ProcessError
from rlstab.testing.compare import BrokenLaw
from rlstab.testing.watch import Shared

#: Seconds that a method may take for what it is asked.
ALARM = 60
#: Seconds that an answer may take, the start of the server and imports among them.
TIMEOUT = 240.0
#: How many servers there are.
SERVERS = 2
#: Seconds by which the clocks of the other process are ahead: a hundred days.
LATER = 100 * 86400
#: What tells a process which one of several it is; the other process is another one.
_RANK = {
    **dict.fromkeys(("RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"), "3"),
    **dict.fromkeys(("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "GROUP_RANK", "NODE_RANK"), "1"),
    **dict.fromkeys(("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"), "8"),
    "LOCAL_WORLD_SIZE": "2",
    "CUDA_VISIBLE_DEVICES": "2,5",
    "HOSTNAME": "elsewhere",
    "USER": "somebody",
}
#: 26 hours apart: at any time one of the two has another date than this process.
_ZONES = ("Etc/GMT-14", "Etc/GMT+12")
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Unreachable(Exception):
    """A method cannot run in another process; the text says why and what to do."""


def methods_of(method: Method[Any]) -> list[Any]:
    """The methods inside of an objective, those that are only observed too; a stage is alone."""
    return [leaf.method for leaf in walk(method, observed=True)] if isinstance(method, TokenObjective) else [method]


@dataclass(frozen=True)
class PickledMethod:
    """A method or stage as it was before any law saw it, for another process to run.

    Attributes:
        pickled: the method, or why it cannot be sent.
        modules: files of the modules of its classes, by name.
    """

    pickled: bytes | str
    modules: Mapping[str, str]

    @classmethod
    def of(cls, method: Method[Any]) -> PickledMethod:
        """Take a method as it is now."""
        names = {type(part).__module__ for part in (method, *methods_of(method))}
        files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in sorted(names)}
        try:
            return cls(pickle.dumps(method), files)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return cls(f"{error}. Define the class at the top of a module", files)

    def run(self, work: Callable[[Any, Any], Any], given: object, which: int = 0) -> Any:
        """What ``work(method, given)`` gives there; ``which`` of the servers answers, for 0 it is run twice.

        Raises:
            Unreachable: the method cannot be sent.
            BrokenLaw: it changed there what the whole process shares, or what outlives a call.
            RuntimeError: the method raised there, and not here.
            ProcessError: the other process died, or does not answer.
        """
        if isinstance(self.pickled, str):
            raise Unreachable(self.pickled)
        path = [folder or str(Path.cwd()) for folder in sys.path]
        job = path, dict(self.modules), self.pickled, pickle.dumps((work, given)), which == 0
        answer = start(which % SERVERS).ask(job)
        if isinstance(answer, Exception):
            raise answer
        return answer


# -- this side ---------------------------------------------------------------------------------------------------------


class _Server:
    def __init__(self, which: int) -> None:
        self.owner = os.getpid()
        self.line, there = Pipe()
        seed = [text for text in ("1", "2", "3") if text != os.environ.get("PYTHONHASHSEED")][which]
        code = f"import sys; sys.path[:0] = {sys.path!r}; from rlstab.testing import fresh_process; "
        threads = 2 if torch.get_num_threads() == 1 else 1  # another number than here
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{code}fresh_process.serve({there.fileno()}, {threads})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **_RANK, **_THREADS, "PYTHONHASHSEED": seed, "TZ": _ZONES[which]},
            pass_fds=[there.fileno()],
        )
        there.close()

    def ask(self, job: object) -> Any:
        try:
            self.line.send(job)
            if self.line.poll(TIMEOUT):
                return self.line.recv()
            what = f"did not answer within {TIMEOUT:g} s. Look for what hangs there"
        except (EOFError, OSError):
            what = "died. Its output says why"
        self.close()
        start.cache_clear()
        raise ProcessError(f"the process in which a method is run anew {what}.")

    def close(self) -> None:
        if self.owner == os.getpid():
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # a fork of it that hangs, too
            self.process.wait()
        self.line.close()


@cache
def start(which: int) -> _Server:
    """One of the servers, started at the first call; it takes seconds, for which only the first question waits.

    Raises:
        Unreachable: this platform has none.
    """
    if not (hasattr(os, "fork") and sys.platform != "darwin" and sys.executable):
        raise Unreachable("processes of this platform cannot be forked safely; check it on Linux")
    server = _Server(which)
    atexit.register(server.close)
    os.register_at_fork(after_in_child=start.cache_clear)  # a fork of this process starts its own
    return server


# -- the other side ----------------------------------------------------------------------------------------------------


def serve(descriptor: int, threads: int) -> None:
    """Answer until the other end is closed, each time in a fork; what a method prints goes nowhere."""
    torch.set_num_threads(threads)
    os.chdir("/")
    line = Connection(descriptor)
    _pretend()
    with suppress(EOFError):
        while True:
            path, modules, pickled, job, twice = line.recv()
            sys.path[:] = path
            try:
                for name, file in modules.items():
                    _import(name, file)
            except Exception as error:
                line.send(Unreachable(f"{type(error).__name__}: {error}"))
                continue
            child = os.fork()
            if child == 0:
                _answer(line, pickled, job, list(modules) if twice else [])
            if os.waitpid(child, 0)[1] != 0:
                line.send(RuntimeError("in another process it died, or did not end"))


def _answer(line: Connection, pickled: bytes, job: bytes, modules: Sequence[str]) -> None:
    """In the fork: run the method, answer, end; the alarm bounds the wait."""
    signal.alarm(ALARM)
    failure: type[Exception] = Unreachable
    where = ""
    try:
        method, (work, given) = pickle.loads(pickled), pickle.loads(job)
        failure, where = RuntimeError, "in another process it raised "
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they were told on the other side
            shared = Shared()
            outcome = work(method, given)
            if modules:  # what only the first call sets may be a cache; what the second changes, too, is a counter
                before = _kept(method, modules)
                work(method, given)
                for path, value in _kept(method, modules).items():
                    if value != before.get(path):
                        raise BrokenLaw(f"{path} changes from call to call. What lasts belongs in the state.")
            shared.check()
        answer = pickle.dumps(outcome)
    except BrokenLaw as error:
        answer = pickle.dumps(error)
    except Exception as error:
        answer = pickle.dumps(failure(f"{where}{type(error).__name__}: {error}"))
    line.send_bytes(answer)
    os._exit(0)


def _kept(method: Method[Any], modules: Sequence[str]) -> dict[str, object]:
    """What outlives a call, by its path: values of modules, of their classes and functions, and of the method."""
    kept: dict[str, object] = {}

    def keep(path: str, value: Any, owner: str) -> None:
        if isinstance(value, types.FunctionType | type):
            if value.__module__ == owner and path not in kept:
                kept[path] = None
                held = dict(vars(value), defaults=getattr(value, "__defaults__", None))
                if isinstance(value, types.FunctionType):
                    with suppress(ValueError):  # it closes over a name that has no value yet
                        held |= inspect.getclosurevars(value).nonlocals
                for name, inner in held.items():
                    if not name.startswith("__"):  # pickle itself puts some on a class
                        keep(f"{path}.{name}", inner, owner)
            return
        try:
            kept[path] = pickle.dumps(value)
        except Exception:  # what cannot be pickled is known by its text
            kept[path] = repr(value)

    packages = {name.rpartition(".")[0] for name in modules if not name.startswith("rlstab.")} - {""}
    near = {name for name in sys.modules if name.rpartition(".")[0] in packages}
    for owner in sorted(near | {name for name in modules if not name.startswith("rlstab.core.")}):
        for name, value in list(vars(sys.modules[owner]).items()):
            keep(f"{owner}.{name}", value, owner)
    keep("the method", method, "")
    return kept


def _pretend() -> None:
    """Be another rank on another machine, a hundred days later; before the modules of methods are imported."""
    for name in ("time", "monotonic", "perf_counter", "process_time"):
        for clock, by in ((name, LATER), (f"{name}_ns", LATER * 10**9)):
            now = getattr(time, clock)
            setattr(time, clock, lambda now=now, by=by: now() + by)
    answers: dict[Any, dict[str, Any]] = {
        torch.distributed: {"is_initialized": True, "get_rank": 3, "get_world_size": 8},
        os: {"cpu_count": 3, "sched_getaffinity": {0, 1, 2}, "getppid": 1, "uname": os.uname_result(["elsewhere"] * 5)},
        socket: {"gethostname": "elsewhere"},
        platform: {"node": "elsewhere"},
    }
    for module, functions in answers.items():
        for name, answer in functions.items():
            setattr(module, name, lambda *_, answer=answer, **__: answer)


def _import(name: str, file: str) -> None:
    """The module of a class: by its name, or from its file where the name leads to no module or to another one."""
    if name == "__main__":
        raise ImportError("its class is defined in a script or was typed in. Define it in a module")
    try:
        if getattr(importlib.import_module(name), "__file__", None) in (file, None):
            return
    except ImportError:
        if not file:
            raise
    sys.modules[name] = module = types.ModuleType(name)
    module.__file__ = file
    SourceFileLoader(name, file).exec_module(module)
