"""What `rlstab check` says of memory is what processes take."""

import pytest

from benchmarks import scale
from benchmarks.scale import measure, row


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_taken", lambda *_: pytest.fail("it was run"))
    for memory, disk in ((10**6, 10**12), (10**12, 10**6)):
        ddp = measure("0.1M", "ddp, 2", memory, disk)
        assert (ddp.measured, ddp.processes) == (None, 2)
        assert ddp.said > 1
        assert row(ddp)[-2] == "too large to be run"


@pytest.mark.slow
def test_processes_take_what_is_said() -> None:
    for engine in scale.ENGINES:
        run = measure("10M", engine, 2 * 10**9, 10**9)
        assert run.measured is not None
        print(f"{engine}: {run.measured:.0f} MiB, said {run.said:.0f}")
        assert 0.9 * run.said <= run.measured <= run.said + scale.LIBRARIES
