"""One bad folder costs a report that folder, and nothing in it reaches a terminal or a page with effect."""

from __future__ import annotations

import os
import time
import unicodedata
from pathlib import Path

import pytest

from rlstab.cli import main
from rlstab.report.load import load_runs
from rlstab.report.runs import LeftOut, RunRecord
from tests.report.conftest import write_run

LETTERS = "abcdefghij"
#: A list of nine lists of nine lists ... ten deep.
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{inner}: &{inner} [{','.join([f'*{outer}'] * 9)}]\n"
    for outer, inner in zip(LETTERS, [*LETTERS[1:], "k"], strict=True)
)
CLIP = "objective: [{name: clip_higher}]\noptimisation: {rollouts: 60}\nseed: 7\n"
ESC = "\\u001b[31m\\u202e\\u0007"

#: By name: a file of the run, what is in it, and why the run is left out, or None where it stays.
BAD: dict[str, tuple[str, str, str | None]] = {
    "cyclic objective": ("config.yaml", "objective: &a [*a]\n", "nested deeper than 100 levels"),
    "cyclic setting": ("config.yaml", CLIP + "task: &a {x: *a}\n", "nested deeper than 100 levels"),
    "exploding": ("config.yaml", CLIP + LAUGHS, "more than 100000 values"),
    "exploding name": ("config.yaml", LAUGHS + "objective: [{name: *k}]\n", "more than 100000 values"),
    "deep": ("config.yaml", CLIP + "x: " + "[" * 5000 + "]" * 5000, "nested deeper than 100 levels"),
    "number as a method": ("config.yaml", "objective: [5]\n", "objective in config.yaml is not a list of methods"),
    "number among methods": ("config.yaml", "objective: [5, {name: s2t}]\n", "objective in config.yaml is not a list"),
    "word as an objective": ("config.yaml", "objective: s2t\n", "objective in config.yaml is not a list of methods"),
    "list as a name": ("config.yaml", "objective: [{name: [1, {a: b}]}]\n", None),
    "lone surrogate": ("config.yaml", 'objective: [{name: "a\\ud800b"}]\n', None),
    "lone surrogate as a key": ("config.yaml", CLIP + '"\\udfff": {"\\ud800": "\\ud800"}\n', None),
    "escape as a name": ("config.yaml", f'objective: [{{name: "{ESC}"}}]\n', None),
    "escape as a task": ("config.yaml", CLIP + f'task: {{name: "{ESC}"}}\n', None),
    "list as a key": ("config.yaml", CLIP + "[1, 2]: 3\n", "a list or mapping is used as a key"),
    "object": ("config.yaml", CLIP + "x: !!python/object/apply:os.system [true]\n", "python/object/apply:os.system"),
    "numbers as keys": ("config.yaml", CLIP + "5: 6\nnull: 7\n", None),
    "5,000 digits": ("config.yaml", CLIP + f"x: 1{'0' * 5000}\n", "cannot be read as int"),
    "no numbers": ("config.yaml", "objective: [{name: s2t}]\noptimisation: {rollouts: .nan, lr: .inf}\n", None),
    "hash that is NaN": ("run.json", '{"run_hash": NaN, "objective_hash": Infinity}', None),
    "hash that is a list": ("run.json", '{"run_hash": [1], "objective_hash": {"a": NaN}, "cpu": 5}', None),
    "surrogates in run.json": ("run.json", '{"device": "\\ud800", "rlstab": {"\\ud800": NaN}}', None),
    "escape in run.json": ("run.json", f'{{"device": "{ESC}", "command": "{ESC}", "rlstab": "{ESC}"}}', None),
    "escape as an error": (
        "bench.json",
        f'{{"method": "m{ESC}", "seed": 1, "setting": "{ESC}", "bench": "{ESC}", "status": "failed", '
        f'"error": "{ESC}\\ud800", "command": "{ESC}\\ud800", "cpu_seconds": NaN, "seconds": 1e999}}',
        None,
    ),
    "wrong types in bench.json": ("bench.json", '{"method": ["m"], "seed": true, "setting": 5, "status": []}', None),
    "surrogates as metrics": ("metrics.jsonl", '{"rollout": 1, "\\ud800": 3, "eval/\\ud800": 3, "a": NaN}\n', None),
    "escape as a metric": ("metrics.jsonl", f'{{"rollout": 1, "{ESC}": 3, "eval/{ESC}": 4, "s2t/{ESC}": 1}}\n', None),
}
#: By name: a file that is something else.
ODD = {
    f"{what} for {file}": (what, file)
    for what in ("device", "pipe", "folder")
    for file in ("config.yaml", "run.json", "bench.json", "metrics.jsonl")
}


def spoil(folder: Path, name: str) -> Path:
    write_run(folder, seed=len(name))
    if name in BAD:
        file, text, _ = BAD[name]
        (folder / file).write_text(text, encoding="utf-8")
        return folder
    what, file = ODD[name]
    (folder / file).unlink(missing_ok=True)
    if what == "device":
        (folder / file).symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(folder / file)
    else:
        (folder / file).mkdir()
    return folder


def acts(text: str) -> set[str]:
    """Characters that would steer a terminal, or hide in a page."""
    return {one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs") and one != "\n"}


@pytest.mark.parametrize("name", [*BAD, *ODD])
def test_a_bad_folder_is_left_out_or_told(name: str, tmp_path: Path) -> None:
    write_run(tmp_path / "good", seed=99)
    bad = spoil(tmp_path / "bad", name)
    start = time.monotonic()
    loaded = load_runs(tmp_path)
    assert time.monotonic() - start < 20
    assert any(one.path == str(tmp_path / "good") for one in loaded.runs)
    why = BAD[name][2] if name in BAD else None
    found: list[RunRecord | LeftOut] = [one for one in (*loaded.runs, *loaded.left_out) if one.path == str(bad)]
    if why is not None:
        assert [why in one.why for one in found if isinstance(one, LeftOut)] == [True]
    elif name in ODD and ODD[name][1] in ("config.yaml", "metrics.jsonl"):
        assert [isinstance(one, LeftOut) for one in found] == [True]
    else:
        assert [isinstance(one, RunRecord) for one in found] == [True]


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font:UserWarning")
def test_a_report_over_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        write_run(tmp_path / "runs" / "good" / f"seed-{seed}", seed=seed)
    for number, name in enumerate([*BAD, *ODD]):
        spoil(tmp_path / "runs" / f"bad-{number}\x1b[31m", name)
    out = tmp_path / "report"
    assert main(["report", str(tmp_path / "runs"), "--out", str(out), "--export", str(tmp_path / "kept.jsonl")]) == 0
    said = capsys.readouterr()
    page = (out / "report.md").read_text(encoding="utf-8")
    assert acts(said.out + said.err) == acts(page) == set()
    assert "␛[31m" in said.err.replace("\n", "")
    assert "␛" in page
    left_out = sum(line.startswith("left out:") for line in said.err.splitlines())
    with capsys.disabled():
        print(f"\n{len(BAD) + len(ODD)} bad folders, {left_out} told as left out, no traceback")
    assert left_out >= sum(why is not None for _, _, why in BAD.values())
    assert main(["report", str(tmp_path / "kept.jsonl"), "--markdown", str(tmp_path / "again.md")]) == 0
    said = capsys.readouterr()
    assert acts(said.out + said.err + (tmp_path / "again.md").read_text(encoding="utf-8")) == set()
    assert main(["view", str(tmp_path / "runs")]) == 2  # it has no traces
    assert acts(capsys.readouterr().err) == set()


@pytest.mark.parametrize(
    "text",
    [
        f'"{ESC}": 1\nobjective: clip_higher\n',
        f'objective: "{ESC}"\n',
        f'objective: [{{name: clip_higher, "{ESC}": 1}}]\n',
        f'objective: [{{name: clip_higher, low: "{ESC}"}}]\n',
        f'objective: clip_higher\nmodel: {{"{ESC}": 1}}\n',
        f'objective: clip_higher\ntask: {{name: "{ESC}"}}\n',
        "objective: [\x1b[31m\n",
        f'objective: [{{name: clip_higher}}, {{name: clip_higher}}, "{ESC}"]\n',
    ],
)
def test_errors_about_a_file_show_what_is_in_it(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run\x1b[31m\u202e.yaml"
    path.write_text(text, encoding="utf-8")
    for command in ("check", "explain", "train", "bench"):
        assert main([command, str(path)]) == 2
        said = capsys.readouterr()
        assert acts(said.out + said.err) == set()
        assert "␛[31m⟨U+202E⟩.yaml" in said.err


def test_what_is_fine_shows_the_name_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run\x1b[31m.yaml"
    path.write_text("objective: clip_higher\n")
    for command in (["check"], ["explain"], ["explain", "--markdown"]):
        assert main([*command, str(path)]) == 0
        said = capsys.readouterr()
        assert acts(said.out + said.err) == set()
    assert "␛[31m" in said.out
