"""The benchmark of a GPU runs to its end on a CPU, so that it cannot rot."""

import subprocess
import sys

import pytest

from benchmarks.gpu import ROWS, table
from benchmarks.protocol import ROOT


@pytest.mark.slow
def test_every_row_of_the_page_is_measured():
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--small"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cells = [line.split("|")[2].strip() for line in ran.stdout.splitlines() if line.startswith("| ")][2:]
    shapes = sum(case.startswith("head") for case, _, _ in ROWS)
    assert len(cells) == len(ROWS)
    assert cells.count("not measured") == shapes - 1  # a small one alone
    assert [cell for cell in cells if cell in ("True", "False")] == ["True", "True"]
    assert cells[0].endswith(" and 0")


def test_a_page_without_a_run_says_so():
    assert table([]).count("not measured") == len(ROWS)
    assert "5 and 1" in table([{"case": "tests/device", "card": "H100", "passed": 5, "failed": 1}])
