"""The commands that the documents print: all are understood, and those that need no run of hours are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlstab.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of each line of a shell block, less its comment."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            lines = block.replace("\\\n", " ").strip().splitlines()  # a line that goes on is one
            found += [(page.name, words) for line in lines if (words := shlex.split(line, comments=True))]
    return found


OURS = sorted({tuple(words[1:]) for _, words in commands() if words[0] == "rlstab" and ">" not in words})


def test_there_are_commands() -> None:
    assert len(OURS) >= 15


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_every_command_of_ours_is_understood(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:  # what cannot be parsed ends with 2, and --help with 0 after all the rest
        main([*words, "--help"])
    assert ended.value.code == 0
    assert words[0] in capsys.readouterr().out


def test_every_make_command_has_a_rule() -> None:
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {words[1] for _, words in commands() if words[0] == "make"} <= rules


@pytest.mark.slow
def test_the_commands_run_as_they_are_printed(tmp_path: Path) -> None:
    """In the order of the pages, with the files that the earlier ones leave; figures are those of tiny runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "f.yaml").write_text((ROOT / "examples" / "countdown.yaml").read_text(encoding="utf-8"))
    fast = (
        "--set optimisation.rollouts=2 --set evaluation.prompts=8 --set tracking.trace_every=1 --set rollout.prompts=4"
    )
    ran = [
        "explain examples/countdown.yaml",
        "explain f.yaml --set optimisation.epochs=4",
        "explain --preset stapo",
        "explain s2t,stare",
        "explain examples/bench_entropy.yaml",
        "explain s2t,stare --markdown",
        "bench examples/bench_s2t.yaml --dry-run",
        f"train examples/chain.yaml --set tracking.trace_every=50 {fast}",
        "view runs/chain",
        "view runs/chain --terminal --limit 5",
        "view runs/chain --rollout 2 --out rollout-2.html",
        "report runs/chain",
        "check examples/objective.yaml",
        "list",
    ]
    for line in ran:
        done = subprocess.run(
            [sys.executable, "-m", "rlstab.cli", *shlex.split(line)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"rlstab {line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "runs/chain/view.html").is_file()
    assert (tmp_path / "rollout-2.html").is_file()
    assert (tmp_path / "runs/chain/report/report.html").is_file()
