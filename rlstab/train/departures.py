"""Processes that hear of one another's end, and end too.

Every other process keeps a connection to the first one. The system closes the connections of a process that is gone,
however it ended, so that it is missed at once: also by one that samples for minutes before its next collective, and by
one that waits in a collective of a backend that does not notice.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from accelerate import Accelerator
from accelerate.utils import gather_object

from rlstab.errors import RlstabError
from rlstab.train.stopping import Stopped

#: Seconds that a process has to end by itself once another is gone. Most end at once, by an error of a collective.
GRACE = 10.0

#: Seconds in which a machine that says nothing any more is given up: probes begin after the first and are two.
PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}

#: Seconds to wait for the reason, once a collective failed, and for the connections when a run starts.
PATIENCE, CONNECT = 2.0, 20.0

#: Letters of an error that the others are told, and bytes of a line that says so.
MOST, LINE = 2000, 1 << 16


@contextmanager
def noticing_departures(accelerator: Accelerator) -> Iterator[None]:
    """While it is entered, the end of any process ends this one within :data:`GRACE` seconds, with code 1.

    An error of a collective carries a note on which process ended first, and why, as far as that could still say so.
    """
    if accelerator.num_processes == 1:
        yield
        return
    others = _Connections(accelerator.process_index, accelerator.num_processes)
    try:
        yield
    except BaseException as error:
        failed = not isinstance(error, Stopped)
        if isinstance(error, RuntimeError) and not isinstance(error, RlstabError):
            others.known.wait(PATIENCE)
            if others.cause:
                error.add_note(others.cause)
        others.leave(f"{type(error).__name__}: {error}"[:MOST] if failed else None)
        raise
    else:
        others.leave(None)


class _Connections:
    """The connections of one process.

    Attributes:
        cause: which process ended first, and why; empty while none did.
        known: set with the cause.
    """

    def __init__(self, rank: int, processes: int) -> None:
        self.rank, self.processes = rank, processes
        self.cause, self.known = "", threading.Event()
        self._over, self._lock = threading.Event(), threading.Lock()
        self._others: dict[int, socket.socket] = {}
        self._last = b""
        token = secrets.token_hex(16)
        listening = _listening() if rank == 0 else None
        place = None if listening is None else listening.getsockname()[1]
        port, token = gather_object([(place, token)])[0]
        if listening is not None:
            threading.Thread(target=self._meet, args=(listening, token), daemon=True).start()
        else:
            self._join(port, token)

    def leave(self, error: str | None) -> None:
        """Tell the others that this process goes; ``error``: why it fails, None where it does not."""
        self._over.set()
        with self._lock:
            word = self.cause if error is not None and self.cause else error
            self._last = _line({"error": word, "cause": bool(self.cause)})
            for one in self._others.values():
                self._part(one)

    def _part(self, one: socket.socket) -> None:
        with suppress(OSError):
            one.sendall(self._last)
            one.shutdown(socket.SHUT_RDWR)
        one.close()

    # -- connections ---------------------------------------------------------------------------------------------

    def _meet(self, listening: socket.socket, token: str) -> None:
        """In the first process: take the connections of all others, one each."""
        listening.settimeout(CONNECT)
        with listening, suppress(OSError):
            while len(self._others) < self.processes - 1:
                one, _ = listening.accept()
                one.settimeout(CONNECT)
                reader = one.makefile("rb")  # which keeps what comes with the first line
                hello = _next_line(reader)
                if hello.get("token") != token:
                    reader.close()  # or the connection stays
                    one.close()
                    continue
                self._keep(int(hello["rank"]), one, reader)

    def _join(self, port: int, token: str) -> None:
        """In another process: connect to the first."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        try:
            one = socket.create_connection((host, port), timeout=CONNECT)
            one.sendall(_line({"token": token, "rank": self.rank}))
        except OSError as error:
            print(
                f"rank {self.rank} cannot reach rank 0 at {host}:{port} ({error}): that a process is gone is noticed "
                f"at the next collective, or when its timeout is over.",
                file=sys.stderr,
            )
            return
        self._keep(0, one, one.makefile("rb"))

    def _keep(self, rank: int, one: socket.socket, reader: BinaryIO) -> None:
        one.settimeout(None)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in PROBES.items():
            if hasattr(socket, name):  # not everywhere
                one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        with self._lock:
            self._others[rank] = one
            if self._last:  # this process has gone already
                self._part(one)
        threading.Thread(target=self._listen, args=(rank, reader), daemon=True).start()

    def _listen(self, rank: int, reader: BinaryIO) -> None:
        """Until the other process goes, however that happens."""
        with reader:
            word = _next_line(reader)
        if self._over.is_set() or (word and word.get("error") is None):
            return
        text = f"ended with {word['error']}" if word else "ended without a word, as one that is killed does"
        self._missed(str(word["error"]) if word.get("cause") else f"rank {rank} of {self.processes} {text}")

    def _missed(self, cause: str) -> None:
        """A process is gone: tell the others, and give this one a while to end by itself."""
        with self._lock:
            if self.cause:
                return
            self.cause = cause
            self.known.set()
            for one in self._others.values() if self.rank == 0 else ():
                with suppress(OSError):
                    one.sendall(_line({"error": cause, "cause": True}))
        if not self._over.wait(GRACE):
            print(f"{cause}; rank {self.rank} ends too", file=sys.stderr, flush=True)
            os._exit(1)


def _listening() -> socket.socket:
    """A socket on the address at which the processes met, or on all where that is not this machine's own."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    return socket.create_server(("", 0))


def _line(word: dict[str, Any]) -> bytes:
    return json.dumps(word).encode() + b"\n"


def _next_line(reader: BinaryIO) -> dict[str, Any]:
    """The next line of a connection; empty where that ends before, or holds something else."""
    try:
        word = json.loads(reader.readline(LINE))
    except (OSError, ValueError):
        return {}
    return word if isinstance(word, dict) else {}
