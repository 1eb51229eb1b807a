"""A fresh process in which a method has not run yet, with another hash seed and another rank.

One server is started for all checks of a Python process. It imports the modules of methods and never runs one; each
question is answered by a fork, so that nothing remains of the last one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from rlstab import TokenObjective
from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import walk
from rlstab.core.method import Method
from rlstab.errors import ProcessError
from rlstab.stages.response_batch import EVIDENCE
from rlstab.testing.watch import Shared

#: Seconds that a method may take for one question.
ALARM = 60
#: Seconds that an answer may take, including the start of the server and imports.
TIMEOUT = 240.0
#: Environment variables that number processes; the other process gets another number.
_RANK = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "SLURM_PROCID": "3", "CUDA_VISIBLE_DEVICES": "2,5"}


class Unreachable(Exception):
    """A method cannot run in another process; the text says why and what to do."""


def methods_of(method: Method[Any]) -> list[Any]:
    """The methods inside an objective, including observed ones; a stage stands alone."""
    return [leaf.method for leaf in walk(method, observed=True)] if isinstance(method, TokenObjective) else [method]


def own_signals(method: Method[Any]) -> list[str]:
    """The user-defined signals that a method or stage reads."""
    evidence = () if isinstance(method, TokenObjective) else EVIDENCE
    return sorted(method.needs - {*SIGNALS, *BASICS, *evidence})


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

    def run(self, work: Callable[[Any, Any], Any], argument: object) -> Any:
        """The result of ``work(method, given)`` in the other process.

        Raises:
            Unreachable: the method cannot be sent.
            RuntimeError: the method raised there but not here.
            ProcessError: the other process died, or does not answer.
        """
        if isinstance(self.pickled, str):
            raise Unreachable(self.pickled)
        path = [folder or str(Path.cwd()) for folder in sys.path]
        answer = start().ask((path, dict(self.modules), self.pickled, pickle.dumps((work, argument))))
        if isinstance(answer, Exception):
            raise answer
        return answer


# -- this side ---------------------------------------------------------------------------------------------------------


class _Server:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self.line, server_line = Pipe()
        seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        code = f"import sys; sys.path[:0] = {sys.path!r}; from rlstab.testing import fresh_process; "
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{code}fresh_process.serve({server_line.fileno()})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **_RANK, "PYTHONHASHSEED": seed},
            pass_fds=[server_line.fileno()],
        )
        server_line.close()

    def ask(self, job: object) -> Any:
        try:
            self.line.send(job)
            if self.line.poll(TIMEOUT):
                return self.line.recv()
            failure = f"did not answer within {TIMEOUT:g} s. Look for code that hangs there"
        except (EOFError, OSError):
            failure = "died. Its output says why"
        self.close()
        start.cache_clear()
        raise ProcessError(f"the fresh process in which a method is run {failure}.")

    def close(self) -> None:
        if self.owner == os.getpid():
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # including a fork of it that hangs
            self.process.wait()
        self.line.close()


@cache
def start() -> _Server:
    """The server, started at the first call, which takes seconds; only the first question waits for it.

    Raises:
        Unreachable: this platform cannot have one.
    """
    if not (hasattr(os, "fork") and sys.platform != "darwin" and sys.executable):
        raise Unreachable("processes of this platform cannot be forked safely; check it on Linux")
    server = _Server()
    atexit.register(server.close)
    os.register_at_fork(after_in_child=start.cache_clear)  # a fork of this process starts its own server
    return server


# -- the other side ----------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Answer until the other end is closed, each time in a fork; output of methods is discarded."""
    torch.set_num_threads(1)
    line = Connection(descriptor)
    distributed: Any = torch.distributed  # before the modules of methods are imported
    for name, answer in {"is_initialized": True, "get_rank": 3, "get_world_size": 8}.items():
        setattr(distributed, name, lambda *_, answer=answer, **__: answer)
    Shared()
    with suppress(EOFError):
        while True:
            path, modules, pickled, job = line.recv()
            sys.path[:] = path
            try:
                for name, file in modules.items():
                    _import(name, file)
            except Exception as error:
                line.send(Unreachable(f"{type(error).__name__}: {error}"))
                continue
            gc.freeze()
            child = os.fork()
            if child == 0:
                _answer(line, pickled, job)
            if os.waitpid(child, 0)[1] != 0:
                line.send(RuntimeError("in another process it died, or did not end"))


def _answer(line: Connection, pickled: bytes, job: bytes) -> None:
    """In the fork: run the method, answer, end; the alarm bounds the wait."""
    signal.alarm(ALARM)
    failure: type[Exception] = Unreachable
    where = ""
    try:
        method, (work, argument) = pickle.loads(pickled), pickle.loads(job)
        failure, where = RuntimeError, "in another process it raised "
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the other side has shown them
            shared = Shared()
            answer = pickle.dumps(work(method, argument))
            shared.check()
    except Exception as error:
        answer = pickle.dumps(failure(f"{where}{type(error).__name__}: {error}"))
    line.send_bytes(answer)
    os._exit(0)


def _import(name: str, file: str) -> None:
    """The module of a class, by its name, or from its file if the name leads to no module or to another one."""
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
