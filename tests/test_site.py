"""The documentation site: its notebooks print what they store, and its loop is the example and learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGE = ROOT / "docs" / "start" / "own-loop.md"
EXAMPLE = ROOT / "examples" / "own_loop.py"


def test_there_are_notebooks() -> None:
    assert [one.stem for one in NOTEBOOKS] == ["a-loss-by-hand", "look-at-tokens"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda one: one.stem)
def test_a_notebook_prints_what_it_stores(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("IPython", reason="a notebook shows HTML: pip install -e '.[docs]'")
    cells = [one for one in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if one["cell_type"] == "code"]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(notebook), "exec", dont_inherit=True), namespace)
        stored = "".join("".join(one["text"]) for one in cell["outputs"] if one["output_type"] == "stream")
        assert rounded(capsys.readouterr().out) == rounded(stored)
    assert any(one["outputs"] for one in cells)


def rounded(text: str) -> str:
    """The last digit of a figure may be another on another processor."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.2f}", text)


def test_the_page_has_the_loop_that_is_in_the_examples() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert block == EXAMPLE.read_text(encoding="utf-8")


@pytest.mark.parametrize("rollouts", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_the_loop_runs_and_learns(rollouts: int, capsys: pytest.CaptureFixture[str]) -> None:
    counts = "ROLLOUTS, PROMPTS, GROUP = "
    text = EXAMPLE.read_text(encoding="utf-8").replace(f"{counts}60,", f"{counts}{rollouts},")
    with torch.random.fork_rng():
        exec(compile(text, str(EXAMPLE), "exec", dont_inherit=True), {"__name__": "__main__"})
    right = [float(one) for one in re.findall(r"right ([0-9.]+)", capsys.readouterr().out)]
    assert len(right) == rollouts
    if rollouts == 60:
        assert sum(right[-10:]) / 10 > sum(right[:10]) / 10 + 0.1
