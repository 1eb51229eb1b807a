"""Another process runs a method as if for the first time, or says why it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab import ClipHigher, Terms, TokenBatch, TokenObjective
from rlstab.testing import check_objective
from rlstab.testing.elsewhere import SERVERS, Sent, Unreachable, _definitions, run_on
from rlstab.testing.steps import Step, make_step

STEPS: Sequence[Step] = [make_step("mixed", [3, 4], 1, seed, ()) for seed in (1, 2)]
HERE = os.getpid()

SCRIPT = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from rlstab import Terms, TokenObjective
from rlstab.testing import check_objective

SEEN = {}
print("the script ran")


class First(TokenObjective):
    name = "first"
    writes = {"weight"}

    def terms(self, batch, stat, state):
        seen = SEEN.setdefault("first", 1 + float(batch.advantages.abs().sum()))
        return Terms(weight=torch.full_like(batch.logprobs, seen))


print(sorted(check_objective(First(), examples=3, laws=["process"]).failed))
"""


class Odd(TokenObjective):
    """Does something elsewhere that it does not do here."""

    name = "odd"

    does: str

    def terms(self, batch: TokenBatch, stat: Any, state: Any) -> Terms:
        if os.getpid() != HERE and self.does == "raise":
            raise ValueError("nothing left to weigh")
        if os.getpid() != HERE and self.does == "die":
            os._exit(3)
        return Terms()


@pytest.mark.parametrize("which", range(SERVERS))
def test_another_process_gives_the_same(which: int) -> None:
    here, there = run_on(ClipHigher(), STEPS), Sent.of(ClipHigher()).run(STEPS, which)
    for one, other in zip(here, there, strict=True):
        assert one.loss == other.loss
        assert torch.equal(one.gradients["logprobs"], other.gradients["logprobs"])


@pytest.mark.parametrize(
    ("does", "seen"),
    [("raise", "it raised ValueError: nothing left to weigh"), ("die", "it raised nothing: it died, or did not end")],
)
def test_what_goes_wrong_there_breaks_the_law_and_the_next_method_is_checked(does: str, seen: str) -> None:
    report = check_objective(Odd(does), examples=1, laws=["process"])
    (result,) = [one for one in report.results if one.law == "process"]
    assert result.outcome == "failed"
    assert f"in another process {seen}" in result.detail
    assert check_objective(ClipHigher(), examples=1, laws=["process"]).ok


def test_a_class_that_cannot_be_imported_is_not_checked_and_says_so() -> None:
    local = type("Local", (Odd,), {})("nothing")
    with pytest.raises(Unreachable, match="Define the class at the top of a module"):
        Sent.of(local).run(STEPS)
    report = check_objective(local, examples=1, laws=["process"])
    (result,) = [one for one in report.results if one.law == "process"]
    assert result.outcome == "silent"
    assert result.detail.startswith("not checked, for another process cannot run it: ")
    assert report.ok


def test_of_a_script_only_what_it_defines_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    found = vars(_definitions(str(file)))
    assert found["SEEN"] == {}
    assert found["First"]().name == "first"
    with pytest.raises(ImportError, match="typed in"):
        _definitions("")


@pytest.mark.slow
def test_a_method_of_a_script_is_checked_without_running_the_script_again(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True)
    assert ran.stdout == "the script ran\n['process']\n", ran.stderr
