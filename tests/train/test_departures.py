"""What processes tell each other when they go. Those that are killed are in ``test_engines.py``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlstab.train import departures
from rlstab.train.departures import GRACE, noticing_departures
from tests.train.crews import free_port

PROCESSES = 3


class Ranks:
    """Ranks that are threads; what their first one gathers, all get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[Any] = []
        self.met = threading.Barrier(PROCESSES, action=lambda: None)
        self.exits: list[int] = []
        self.errors: dict[int, BaseException] = {}
        monkeypatch.setattr(departures, "gather_object", self.gather)
        monkeypatch.setattr(departures.os, "_exit", self.exits.append)
        monkeypatch.delenv("MASTER_ADDR", raising=False)

    def gather(self, own: list[Any]) -> list[Any]:
        if own[0][0] is not None:  # the first one has a port
            self.first = own
        self.met.wait(20)
        return self.first

    def run(self, *bodies: Callable[[], None]) -> None:
        threads = [threading.Thread(target=self._rank, args=one) for one in enumerate(bodies)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)
            assert not one.is_alive()

    def _rank(self, rank: int, body: Callable[[], None]) -> None:
        accelerator: Any = SimpleNamespace(process_index=rank, num_processes=PROCESSES)
        try:
            with noticing_departures(accelerator):
                self.met.wait(20)
                body()
        except BaseException as error:
            self.errors[rank] = error


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def fails() -> None:
    raise ValueError("no advantages here")


def is_cut_off() -> None:
    raise RuntimeError("Connection closed by peer")


def test_who_is_cut_off_is_told_who_failed_and_why(ranks: Ranks) -> None:
    ranks.run(is_cut_off, is_cut_off, fails)
    assert {rank: str(one) for rank, one in ranks.errors.items()} == {
        0: "Connection closed by peer",
        1: "Connection closed by peer",
        2: "no advantages here",
    }
    for rank in (0, 1):  # the second one hears of it by the first
        assert ranks.errors[rank].__notes__ == ["rank 2 of 3 ended with ValueError: no advantages here"]
    assert ranks.exits == []


def test_an_end_in_order_is_no_reason(ranks: Ranks) -> None:
    ranks.run(lambda: None, lambda: None, lambda: None)
    assert (ranks.errors, ranks.exits) == ({}, [])


def test_who_stays_is_ended_after_a_while(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(departures, "GRACE", 0.05)
    gone = threading.Event()
    monkeypatch.setattr(departures.os, "_exit", lambda code: (ranks.exits.append(code), gone.set()))
    ranks.run(lambda: assert_set(gone), lambda: None, fails)
    assert set(ranks.exits) == {1}
    assert "rank 2 of 3 ended with ValueError: no advantages here; rank 0 ends too\n" in capsys.readouterr().err


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_who_cannot_reach_the_first_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = free_port()
    monkeypatch.setattr(departures, "gather_object", lambda own: [(nowhere, "token")])
    accelerator: Any = SimpleNamespace(process_index=1, num_processes=2)
    with noticing_departures(accelerator):
        pass
    said = capsys.readouterr().err
    assert said.startswith(f"rank 1 cannot reach rank 0 at 127.0.0.1:{nowhere} (")
    assert said.endswith("noticed at the next collective, or when its timeout is over.\n")


def test_both_ends_of_a_connection_probe_a_machine_that_is_silent_for_15_seconds(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a machine is, and what comes of it, is in ``test_silent_machine.py``."""
    kept: list[socket.socket] = []
    keep = departures._Connections._keep

    def noted(self: Any, rank: int, one: socket.socket, reader: Any) -> None:
        keep(self, rank, one, reader)
        kept.append(one)
        probes = [one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in departures.PROBES]
        found.append((one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), probes))

    found: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(departures._Connections, "_keep", noted)
    everyone = threading.Barrier(PROCESSES)
    ranks.run(*[lambda: wait_for(lambda: len(found) == 4, everyone)] * PROCESSES)
    assert len(kept) == 2 * (PROCESSES - 1), "one connection of each to the first, with two ends"
    for on, (idle, interval, count) in found:
        assert on
        assert idle + interval * count == 15
        assert 15 + GRACE <= 30, "in which the page says that processes end"


def wait_for(there: Callable[[], bool], together: threading.Barrier) -> None:
    for _ in range(2000):
        if there():
            break
        threading.Event().wait(0.01)
    assert there()
    together.wait(20)


def test_a_stranger_without_the_token_is_turned_away(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes] = []
    join = departures._Connections._join

    def late(self: Any, port: int, token: str) -> None:
        if self.rank == 1:  # a stranger comes before it
            for hello in ({"token": "guessed", "rank": 1}, {"rank": 1}, ["x"]):
                with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
                    stranger.sendall(departures._line(hello))  # type: ignore[arg-type]
                    answers.append(stranger.recv(10))
        join(self, port, token)

    monkeypatch.setattr(departures._Connections, "_join", late)
    ranks.run(is_cut_off, is_cut_off, fails)
    assert answers == [b"", b"", b""]
    for rank in (0, 1):
        assert ranks.errors[rank].__notes__ == ["rank 2 of 3 ended with ValueError: no advantages here"]


@pytest.mark.parametrize(
    ("host", "bound"), [(None, "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("192.0.2.1", "0.0.0.0")], ids=str
)
def test_where_the_first_one_listens(host: str | None, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.1 is nobody's address."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if host is not None:
        monkeypatch.setenv("MASTER_ADDR", host)
    with departures._listening() as one, departures._listening() as other:
        assert one.getsockname()[0] == bound
        assert one.getsockname()[1] != other.getsockname()[1], "the system chooses the port"
