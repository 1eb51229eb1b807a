"""The tables of the page on several processes say what was measured, and what is measured is what `check` says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scale import Measured, measure, peaks, slopes

ONE = Measured(
    size=scale.SMALLER,
    engine="fsdp2, 2",
    parameters=100_000_000,
    rows=scale.ROWS,
    tokens=32,
    processes=2,
    measured=1100.0,
    said=1000.0,
    per_parameter=10.0,
    per_token=1024.0,
    torch="2",
)


def table(*found: Measured) -> dict[tuple[str, str, int], Measured]:
    return {(one.size, one.engine, one.rows): one for one in found}


def test_a_run_is_a_row_and_one_that_does_not_fit_says_so() -> None:
    large = replace(ONE, size="1.7B", parameters=1_700_000_000, measured=None, said=17000.0)
    assert peaks(table(large, ONE)).splitlines()[2:] == [
        "| 100.0M | fsdp2, 2 | 1000 | 1100 | 1.10 | +100 |",
        "| 1.70B | fsdp2, 2 | 17000 | too large to be run |  |  |",
    ]


def test_bytes_for_each_are_differences_of_two_runs() -> None:
    larger = replace(ONE, size=scale.LARGER, parameters=200_000_000, measured=2100.0, said=1900.0)
    few = replace(ONE, size=scale.ACTIVATIONS)
    many = replace(few, rows=scale.MORE_ROWS, measured=1100.0 + 12, said=1000.0 + 24)
    row = next(line for line in slopes(table(ONE, larger, few, many)).splitlines() if "fsdp2" in line)
    mib = 2**20
    said, measured = (f"{change * mib / 100_000_000:.2f}" for change in (900, 1000))
    per = (scale.MORE_ROWS - scale.ROWS) * 32
    tokens = (f"{change * 1024 / per:.3g} KiB" for change in (24, 12))
    assert row == f"| fsdp2, 2 | {said} | {measured} | {' | '.join(tokens)} |"


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_taken", lambda *_: pytest.fail("it was run"))
    for memory, disk in ((10**6, 10**12), (10**12, 10**6)):
        found = measure("0.1M", "ddp, 2", 4, memory, disk)
        assert (found.measured, found.processes) == (None, 2)
        assert found.said > 1


def test_the_newest_of_each_counts(tmp_path: Path) -> None:
    file = tmp_path / "scale.jsonl"
    file.write_text("".join(f"{json.dumps(asdict(replace(ONE, measured=value)))}\n" for value in (1.0, 2.0)))
    assert scale.read(file) == table(replace(ONE, measured=2.0))


def test_the_page_is_what_was_measured() -> None:
    page, found = scale.PAGE.read_text(encoding="utf-8"), scale.read(scale.RESULTS)
    assert peaks(found) in page
    assert slopes(found) in page


@pytest.mark.slow
def test_processes_take_what_is_said() -> None:
    """What the page promises of the difference, and that shards save memory."""
    found = {engine: measure("10M", engine, scale.ROWS, 2 * 10**9, 10**9) for engine in scale.ENGINES}
    for engine, one in found.items():
        assert one.measured is not None
        print(f"{engine}: {one.measured:.0f} MiB, said {one.said:.0f}")
        assert 0 <= one.measured - one.said <= scale.LIBRARIES
    sharded, whole = found["fsdp2, 2"].measured, found["one process"].measured
    assert sharded is not None
    assert whole is not None
    assert sharded < 0.8 * whole
