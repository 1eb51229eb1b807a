"""What processes tell each other when they go. Those that are killed are in ``test_engines.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlstab.train import departures
from rlstab.train.departures import noticing_departures
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
