"""Saved figures: one of each for every setting, readable as XML, the same again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from rlstab.errors import ReportError
from rlstab.report import figures
from rlstab.report.comparison import Comparison, compare
from rlstab.report.model import Loaded
from rlstab.report.overlap import Overlap
from rlstab.report.records import load_runs
from tests.report.conftest import curves, record


def files(comparison: Comparison, out: Path) -> list[Path]:
    return [one.path for one in figures.write(comparison, out)]


def names(written: list[Path]) -> list[str]:
    return [path.stem for path in written if path.suffix == ".svg"]


def test_each_figure_is_a_png_and_an_svg(tmp_path):
    nasty = "a<b>&$x_1$"
    runs = [record(curves(60, seed), method=name, seed=seed) for name in ("grpo", nasty) for seed in range(3)]
    overlap = Overlap(None, "default", [nasty, "s2t"], [3, 0], [[1.0, None], [None, None]], "all")
    comparison = dataclasses.replace(compare(Loaded(runs, [], [])), overlaps=[overlap])
    written = files(comparison, tmp_path)
    expected = ["differences", "learning-curves", "entropy-and-reward", "gradient-norms", "touched", "overlap"]
    assert names(written) == expected
    assert sorted(written) == sorted((tmp_path / "figures").iterdir())
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert min(image.size) > 200
        else:
            # text stays text, and a name is neither markup nor mathematics
            texts = "".join(ElementTree.parse(path).getroot().itertext())
            assert nasty in texts
    first = {path.name: path.read_bytes() for path in written if path.stem == "differences"}
    again = files(comparison, tmp_path / "again")
    assert {path.name: path.read_bytes() for path in again if path.stem == "differences"} == first


def test_nothing_to_draw_gives_no_file(tmp_path):
    comparison = compare(Loaded([record({}, status="failed", config={})], [], []))
    assert figures.write(comparison, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "figures").write_text("")
    with pytest.raises(ReportError, match="--out another folder"):
        figures.write(compare(Loaded([record(curves(60, 0))], [], [])), tmp_path)


@pytest.mark.slow
def test_settings_and_sweeps_have_their_own(sweep, tmp_path):
    found = names(files(compare(load_runs(sweep)), tmp_path))
    assert "sweep" in found
    assert {f"learning-curves-stability-lr_{one}" for one in ("1e-4", "2e-4", "4e-4")} <= set(found)
    assert len(found) == len(set(found))


def test_an_empty_panel_says_why(tmp_path):
    runs = [record(curves(60, seed), method="grpo", seed=seed) for seed in range(3)]
    for seed, run in enumerate(runs):
        run.metrics["s2t/threshold"] = (np.array([10 * seed + 7]), np.array([0.4]))
    written = files(compare(Loaded(runs, [], [])), tmp_path)
    [touched] = [path for path in written if path.name == "touched.svg"]
    texts = " ".join("".join(ElementTree.parse(touched).getroot().itertext()).split())
    assert "0 throughout" in texts
    assert "never recorded in half" in texts
    assert "s2t/threshold, nats" in texts
