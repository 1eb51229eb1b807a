"""What Trackio and MLflow keep in SQLite, as their own packages write it."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rlstab.errors import ReportError
from rlstab.look.find import read_logs

LINES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "diagnose" / "data" / "truncation.jsonl").read_text().splitlines()
]


@contextmanager
def written(path: Path) -> Iterator[sqlite3.Connection]:
    """A database that is committed and closed at the end of the block."""
    with closing(sqlite3.connect(path)) as database, database:
        yield database


def trackio(path: Path) -> None:
    """The tables of trackio 0.43.0, as far as they are read."""
    with written(path) as database:
        database.execute(
            "create table metrics (id integer primary key autoincrement, timestamp text, run_name text, step integer, "
            "metrics text)"
        )
        for line in LINES:
            row = ("now", "run-a", line["rollout"], json.dumps(line))
            database.execute("insert into metrics (timestamp, run_name, step, metrics) values (?, ?, ?, ?)", row)


def mlflow(path: Path) -> None:
    """The tables of mlflow 3.17.2, as far as they are read."""
    with written(path) as database:
        database.execute("create table runs (run_uuid text, name text)")
        database.execute(
            "create table metrics "
            "(key text, value double, timestamp bigint, run_uuid text, step bigint, is_nan boolean)"
        )
        database.execute("insert into runs values ('f00', 'run-a')")
        for line in LINES:
            for key, value in line.items():
                if isinstance(value, int | float):
                    database.execute(
                        "insert into metrics values (?, ?, 0, 'f00', ?, 0)", (key, float(value), line["rollout"])
                    )


@pytest.mark.parametrize("write", [trackio, mlflow])
def test_a_database_is_read_as_the_log_that_went_into_it(write, tmp_path: Path) -> None:
    write(tmp_path / "runs.db")
    expected = read_logs(Path(__file__).parents[1] / "diagnose" / "data" / "truncation.jsonl")[0]
    for path in (tmp_path, tmp_path / "runs.db"):
        (log,) = read_logs(path)
        assert log.path.endswith("run-a")
        assert log.metrics["reward/mean"][1].tolist() == expected.metrics["reward/mean"][1].tolist()


def test_runs_of_one_name_stay_apart(tmp_path: Path) -> None:
    with written(tmp_path / "runs.db") as database:
        database.execute("create table metrics (run_id text, run_name text, step integer, metrics text)")
        for run, reward in (("f00", 0.2), ("f01", 0.7)):
            rows = [(run, "grpo", step, json.dumps({"reward/mean": reward})) for step in range(1, 5)]
            database.executemany("insert into metrics values (?, ?, ?, ?)", rows)
    logs = read_logs(tmp_path / "runs.db")
    assert [log.metrics["reward/mean"][1].tolist() for log in logs] == [[0.2] * 4, [0.7] * 4]


def test_what_a_killed_writer_began_is_rolled_back_in_a_copy(tmp_path: Path) -> None:
    path, left = tmp_path / "whole.db", tmp_path / "killed" / "runs.db"
    trackio(path)
    expected = read_logs(path)[0].metrics["reward/mean"][1].tolist()
    left.parent.mkdir()
    with written(path) as database:
        database.execute("pragma cache_size = 1")  # changed pages go into the file before the commit
        database.execute("update metrics set metrics = '{}', run_name = 'half'")
        for file in (path, Path(f"{path}-journal")):
            shutil.copyfile(file, left.with_name(file.name.replace("whole", "runs")))
        database.rollback()
    before = {file.name: file.read_bytes() for file in left.parent.iterdir()}
    assert len(before) == 2
    (log,) = read_logs(left)
    assert log.metrics["reward/mean"][1].tolist() == expected
    assert {file.name: file.read_bytes() for file in left.parent.iterdir()} == before


def test_a_damaged_database_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    trackio(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ReportError, match="cannot be read"):
        read_logs(path)
    path.write_text("not a database at all, but long enough to have a head" * 9)
    with pytest.raises(ReportError, match="cannot be read"):
        read_logs(path)
    assert path.exists()
