"""The guard for foreign files: what it refuses at once, and the numbers that it lets through."""

import math
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rlstab import load_objective, safe_read
from rlstab.adapters.objective_state import RECORD, restore_state
from rlstab.bench.record import read_record
from rlstab.config.settings import JsonlSettings
from rlstab.errors import CheckpointError, DataError
from rlstab.files import leads_away, replace_file
from rlstab.report.listing import running
from rlstab.run_files import LOCK
from rlstab.safe_read import as_float, as_number, as_step, parse_json, read_bytes, read_json, text_of
from rlstab.tasks.text_task import read_rows
from rlstab.visible import LINE, in_error


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(safe_read.MOST_BYTES + 1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: os.mknod(path, stat.S_IFSOCK), "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to("f"), "levels of symbolic links"),
        (sparse, "larger than"),
    ],
)
def test_what_is_not_a_file_to_read_is_refused_at_once(make: Callable[[Path], None], why: str, tmp_path: Path) -> None:
    make(tmp_path / "f")
    with pytest.raises(OSError, match=why):
        read_bytes(tmp_path / "f")


@pytest.mark.parametrize("content", [b"[" * 1500 + b"]" * 1500, b"[1]", b"\xff\xfe\x00", b"9" * 5000, None])
def test_damaged_records_of_runs_and_models_are_empty_or_told(content: bytes | None, tmp_path: Path) -> None:
    for name in ("bench.json", "config.json", LOCK, RECORD, "rows.jsonl"):
        if content is None:
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
    assert read_record(tmp_path) == read_json(tmp_path / "config.json") == {}
    assert running(tmp_path) is None
    with pytest.raises(CheckpointError, match="is damaged"):
        restore_state(tmp_path, load_objective("clip_higher"))
    with pytest.raises(DataError):
        list(read_rows(JsonlSettings(path=str(tmp_path / "rows.jsonl")))[0])


def test_json_is_refused_beyond_a_depth_and_not_for_its_size() -> None:
    depth = safe_read.MOST_DEPTH
    assert parse_json("[" * depth + "]" * depth)
    assert len(parse_json(b"[" + b"[{}], " * 1000 + b"{}]")) == 1001
    for text in ("[" * (depth + 1) + "]" * (depth + 1), '{"a":' * 100_000, "[" * 100_000, "9" * 5000, '{"a": 1'):
        with pytest.raises(ValueError, match=r"nested deeper|digits|Expecting"):
            parse_json(text)


def test_text_with_and_without_a_byte_order_mark() -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert text_of("é\n".encode(encoding)) == "é\n"
    assert parse_json("\ufeff[1]".encode()) == [1]


def test_numbers_are_read_as_they_are_written_and_cannot_overflow() -> None:
    for value, number in [("0.5", 0.5), ("Infinity", math.inf), ("-inf", -math.inf), (1e308, math.inf), (1e21, 1e21)]:
        assert as_number(value) == number
    assert as_float(-(10**400)) == as_number("-1e400") == as_float(-1e101) == -math.inf
    assert math.isnan(as_number("NaN") or 0)
    assert [as_number(value) for value in ("", "x", True, None, [1], {})] == [None] * 6
    assert [as_step(value) for value in (61, 61.0, "61", "61.0", " 61 ")] == [61] * 5
    assert [as_step(value) for value in (61.5, "12/60", "NaN", 1e300, None, True)] == [None] * 6


def test_lines_of_errors_keep_their_ends() -> None:
    first, second = in_error("who\x1b[31m" + "x" * 10_000 + " what to do.\n" + "y" * LINE).split("\n")
    assert len(first) == len(second) == LINE
    assert first.startswith("who␛[31mxx")
    assert first.endswith("xx what to do.")


def test_links_that_lead_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "mine").write_text("mine")
    for name, target, away in [("a", "../mine", True), ("b", "c", False), ("e", "/etc/none", True)]:
        (tmp_path / "d" / name).symlink_to(target)
        assert leads_away(tmp_path / "d" / name) is away
    replace_file(tmp_path / "d" / "a", "ours")
    assert (tmp_path / "mine").read_text() == "mine"
