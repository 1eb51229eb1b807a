"""The command: a recorded run is not run again, an interrupted one continues, what fails or does not fit is named."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlstab.bench import run as running
from rlstab.cli import main
from rlstab.probe import records
from rlstab.probe.suite import START, Probe
from tests.probe.test_suite import OWN

#: Ends as its row and its dose say, without a model: the base tolerates 2 of false positives, `Mine` everything.
PRETEND = """
import json, os, pathlib, sys
for line in sys.stdin:
    folder = pathlib.Path(json.loads(line))
    run = json.loads((folder / "order.json").read_text())["run"]
    with open(os.environ["STARTED"], "a") as started:
        started.write(run["tracking"]["out"] + "\\n")
    positive = next((stage["positive"] for stage in run["stages"] if "positive" in stage), 0.0)
    row, status, error = folder.parent.name, "finished", None
    if os.environ.get("FAIL") == row:
        status, error = "failed", os.environ["ERROR"]
    held_out = 0.8 if positive < 0.5 or row == "Mine" else 0.2
    held_out = (0.4 if run["optimisation"]["lr"] == 0 else held_out) + 0.001 * (run["seed"] % 7)
    record = {"rollout": 40, "reward/mean": 0.5, "eval/mean": held_out}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
    (folder / "config.yaml").write_text("objective: []")
    (folder / "run.json").write_text("{}")
    kept = json.loads((folder / "bench.json").read_text())
    (folder / "bench.json").write_text(json.dumps({**kept, "status": status, "error": error, "cpu_seconds": 1.0}))
    print(0, flush=True)
"""


#: The fixed rows of these maps: the same run in two cells, and one at any dose, are among them.
ROWS = ("base", "half_lr", "random_mask", "control")


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Workers pretend, and say in this file what they were ordered; the probe has few rows, and no other doses."""
    monkeypatch.setattr(running, "COMMAND", [sys.executable, "-c", PRETEND])
    monkeypatch.setattr(running, "POLL", 0.02)
    monkeypatch.setenv("STARTED", str(folder / "started"))
    monkeypatch.chdir(folder)
    (folder / "own.py").write_text(OWN)
    # a stage of its own, whose control is the true reward; nothing is recorded of it here, nor what ships read
    monkeypatch.setattr(records, "NUMBERS", 0)
    monkeypatch.setattr(records, "resources", SimpleNamespace(files=lambda _: folder))
    probe = Probe("false_positives")
    methods = {name: probe.bench["methods"][name] for name in (*ROWS, START)}
    settings = {dose: probe.bench["settings"][dose] for dose in probe.quick_doses}
    monkeypatch.setattr(Probe, "bench", {**probe.bench, "methods": methods, "settings": settings})
    return folder / "started"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return pretend(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished map in `a`."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patched:
        pretend(patched, folder)
        assert main([*PROBE, "--out", "a"]) == 0
    return folder


@pytest.fixture
def copied(first: Path, started: Path) -> list[str]:
    """A copy of it in the folder of the test; what its workers were ordered."""
    shutil.copytree(first / "a", started.with_name("a"))
    return (first / "started").read_text().splitlines()


def cells(out: Path) -> dict[str, Any]:
    return {cell["row"]: cell for cell in json.loads((out / "map.json").read_text())["cells"]}


PROBE = ["probe", "own.py:Mine", "--probe", "false_positives", "--quick", "--workers", "2"]


def test_a_second_time_nothing_is_run(
    copied: list[str], started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = copied
    # five rows, at three doses and three seeds; the true reward is one run a seed whatever the dose
    assert len(runs) == len(set(runs)) == (len(ROWS) + 1) * 9 - 3 * 3 + 1
    scored = cells(tmp_path / "a")
    assert (scored["Mine"]["verdict"], scored["Mine"]["relative"]["value"]) == ("twice or more", None)
    assert scored["control"]["verdict"] == "twice or more"
    assert (scored["random_mask"]["verdict"], scored["random_mask"]["relative"]["value"]) == (
        "no visible difference",
        1,
    )
    lines = [json.loads(line) for line in (tmp_path / "a" / "results.jsonl").read_text().splitlines()]
    assert len(lines) == (len(ROWS) + 1) * 9 + 1
    assert main([*PROBE, "--out", "a"]) == 0  # finished folders stay
    assert "Mine, tolerated dose relative to the base's: twice or more in false_positives." in capsys.readouterr().out
    assert main([*PROBE, "--out", "b", "--records", "a/results.jsonl"]) == 0  # and so does what is recorded elsewhere
    assert not started.exists()
    assert (tmp_path / "b" / "results.jsonl").read_text() == (tmp_path / "a" / "results.jsonl").read_text()
    assert cells(tmp_path / "b") == scored
    whole, records_file = (tmp_path / "a" / "results.jsonl").read_text(), tmp_path / "broken.jsonl"
    number = next(json.loads(line)["trainer"] for line in whole.splitlines())
    for bad in (whole[:-5], whole.replace(f"{number},", "NaN,")):
        records_file.write_text(bad)
        assert main([*PROBE, "--records", str(records_file)]) == 2
        line = next(number for number, line in enumerate(bad.splitlines(), 1) if line not in whole.splitlines())
        assert f"broken.jsonl, line {line}:" in capsys.readouterr().err


def test_other_numbers_are_run_again(copied: list[str], started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = copied[5:9]
    for folder in again:
        record = json.loads(Path(folder, "bench.json").read_text())
        Path(folder, "bench.json").write_text(json.dumps({**record, "status": "running"}))
    assert main([*PROBE, "--out", "a"]) == 0
    assert sorted(started.read_text().splitlines()) == sorted(again)
    started.unlink()
    monkeypatch.setattr(records, "NUMBERS", -1)
    assert main([*PROBE, "--out", "b", "--records", "a/results.jsonl"]) == 0
    assert len(started.read_text().splitlines()) == (len(ROWS) + 1) * 9 - 8


def test_a_lost_policy_counts(started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FAIL", "Mine")
    monkeypatch.setenv("ERROR", "NonFinite: 20 optimizer steps in a row were refused")
    assert main([*PROBE, "--out", "lost"]) == 0
    lost = cells(tmp_path / "lost")["Mine"]
    assert (lost["verdict"], lost["price"]["value"]) == ("half or less", pytest.approx(-1, abs=0.05))
    monkeypatch.setenv("ERROR", "OSError: no space")
    assert main([*PROBE, "--out", "broken"]) == 1
    assert "why" in cells(tmp_path / "broken")["Mine"]
    assert "OSError: no space" in (tmp_path / "broken" / "map.md").read_text()
    assert "OSError: no space" in capsys.readouterr().out


def test_what_cannot_run_is_told_before_any_run(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where the large model would lie
    (tmp_path / "clash.yaml").write_text("objective: [{name: constant_length, length: 3}]\nstages: [overlong]\n")
    (tmp_path / "typo.yaml").write_text("objective: [s2t]\nstage: [dynamic_sampling]\n")
    (tmp_path / "setting.yaml").write_text("objective: [{name: s2t, max_porb: 0.1}]\n")
    (tmp_path / "nameless.yaml").write_text("objective: [s2t]\nstages: [{nme: overlong}]\n")
    for asked in ("clash.yaml", "typo.yaml", "setting.yaml", "nameless.yaml", "base", "random_mask"):
        assert main(["probe", asked, *PROBE[1:], "--out", "none"]) == 2
        assert asked.removesuffix(".yaml") in capsys.readouterr().err
    assert main(["probe", "--quick", "--model", "smollm2", "--out", "none"]) == 2
    assert "examples/smollm2_model.py" in capsys.readouterr().err
    assert not started.exists()


@pytest.mark.usefixtures("copied")
def test_what_it_did_not_write_stays(started: Path, tmp_path: Path) -> None:
    for name, text in (("map.html", "mine"), ("bench.json", '{"name": "mybench"}')):
        own = tmp_path / f"with {name}"
        own.mkdir()
        (own / name).write_text(text)
        for out in (own, own / name):  # a folder that holds another's files, and a file; with nothing left to run
            assert main([*PROBE, "--out", str(out), "--records", "a/results.jsonl"]) == 2
        assert {path.name: path.read_text() for path in own.iterdir()} == {name: text}
    assert not started.exists()


def test_code_that_ones_code_imports_is_a_part_of_it(started: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"import beside\n{OWN}")
    (tmp_path / "beside.py").write_text("SHARE = 0.5\n")
    assert main([*PROBE, "--out", "a"]) == 0
    whole = len(started.read_text().splitlines())
    (tmp_path / "rlstab").mkdir()  # as in a clone, where rlstab lies next to the user's code
    (tmp_path / "rlstab" / "__init__.py").write_text("RELEASE = 1\n")
    assert main([*PROBE, "--out", "b", "--records", "a/results.jsonl"]) == 0
    assert len(started.read_text().splitlines()) == whole
    (tmp_path / "beside.py").write_text("SHARE = 0.1\n")
    assert main([*PROBE, "--out", "c", "--records", "a/results.jsonl"]) == 0
    assert len(started.read_text().splitlines()) == whole + 9
