"""What `rlstab check` says of memory is what processes take."""

from __future__ import annotations

import pytest

from benchmarks import scale
from benchmarks.scale import measure, row


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_taken", lambda *_: pytest.fail("it was run"))
    for memory, disk in ((10**6, 10**12), (10**12, 10**6)):
        found = measure("0.1M", "ddp, 2", memory, disk)
        assert (found.measured, found.processes) == (None, 2)
        assert found.said > 1
        assert row(found)[-2] == "too large to be run"


@pytest.mark.slow
def test_processes_take_what_is_said() -> None:
    """But under fsdp2, where on a CPU the C library keeps what gathering took."""
    for engine in scale.ENGINES:
        found = measure("10M", engine, 2 * 10**9, 10**9)
        assert found.measured is not None
        print(f"{engine}: {found.measured:.0f} MiB, said {found.said:.0f}")
        assert found.measured >= 0.9 * found.said
        assert engine.startswith("fsdp2") or found.measured - found.said <= scale.LIBRARIES
