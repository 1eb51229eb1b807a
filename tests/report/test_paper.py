"""What `rlstab report --paper` writes: the numbers of the page, figures of one width, and nobody else's file."""

import csv
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from rlstab.cli import main
from rlstab.errors import ReportError
from rlstab.report.comparison import Comparison, compare
from rlstab.report.runs import Loaded
from tests.report.conftest import curves, record, rewards

pytest.importorskip("matplotlib")
from rlstab.report import paper
from rlstab.report.paper import write_paper

HOSTILE = r"a_b & 50% #1 $x$ {y} \input{z} ~^ <|> 方法 ё"


def lossy(method: str = "dapo", setting: str = "default") -> list:
    return [
        record(
            {"reward/mean": rewards(seed, name == method and seed in (2, 5, 6))},
            method=name,
            seed=seed,
            setting=setting,
        )
        for name in ("grpo", method)
        for seed in range(8)
    ]


def of(runs: list) -> Comparison:
    return compare(Loaded(runs, [], []), metrics=["reward/area", "reward/last"])


def size(svg: Path) -> tuple[float, float]:
    """In inches; matplotlib writes points."""
    root = ElementTree.parse(svg).getroot()  # ours
    width, height = (float(root.attrib[side].removesuffix("pt")) / 72 for side in ("width", "height"))
    return width, height


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return of(lossy())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds, and does not decide which files may be replaced."""
    monkeypatch.setattr(paper, "_figures", lambda _, width: [("curve.svg", width.encode())])


def test_the_files_of_a_paper_have_the_numbers_of_the_comparison(comparison: Comparison, tmp_path: Path) -> None:
    written = write_paper(comparison, tmp_path / "p", "rlstab report x", "column")
    figures = {f"{name}.{kind}" for name in ("curve", "differences", "survival") for kind in ("svg", "pdf")}
    assert {path.name for path in written} == {"runs.csv", "numbers.csv", "table.tex", "rlstab-report.json"} | figures
    numbers = list(csv.DictReader((tmp_path / "p/numbers.csv").read_text().splitlines()))
    [row] = [row for row in numbers if (row["method"], row["number"]) == ("dapo", "rate of lost runs")]
    assert [float(row[name]) for name in ("value", "low", "high", "seeds")] == pytest.approx(
        [0.375, 0.0852, 0.7551, 8], rel=1e-3
    )
    assert row["verdict"] == "p = 0.25 against grpo"
    cell = comparison.tables[0].cells["dapo", "reward/last"]
    [row] = [
        row for row in numbers if (row["method"], row["outcome"], row["number"]) == ("dapo", "reward/last", "mean")
    ]
    assert [float(row[name]) for name in ("value", "low", "high")] == [
        cell.summary.value,
        cell.summary.low,
        cell.summary.high,
    ]
    runs = list(csv.DictReader((tmp_path / "p/runs.csv").read_text().splitlines()))
    assert [(run["seed"], run["lost"]) for run in runs if run["method"] == "dapo"][2] == ("2", "True")
    assert len([run for run in runs if run["reward/last"]]) == 16
    about = json.loads((tmp_path / "p/rlstab-report.json").read_text())
    assert about["command"] == "rlstab report x"
    assert {"rlstab", "numpy", "scipy", "matplotlib"} == about["versions"].keys()
    assert about["settings"]["default dapo seed 2"]["optimisation"]["lr"] == 2e-4
    for svg in (tmp_path / "p").glob("*.svg"):
        assert size(svg)[0] == pytest.approx(3.3, abs=0.01)
        assert 0.8 < size(svg)[1] < 4
    lines = re.findall(r'<path d="[^"]*" clip-path', (tmp_path / "p/curve.svg").read_text())
    assert len(lines) == 16 + 2  # a line for each seed, and the means of two methods
    for pdf in (tmp_path / "p").glob("*.pdf"):
        assert pdf.read_bytes().startswith(b"%PDF-")
        assert b"/FontFile2" in pdf.read_bytes() or b"/Type42" in pdf.read_bytes()  # no Type 3 fonts
    again = itertools.islice(paper._figures(comparison, "column"), 2)  # the fonts of each cost a fifth of a second
    assert all((tmp_path / "p" / name).read_bytes() == content for name, content in again)
    name, content = next(paper._figures(comparison, "page"))
    (tmp_path / name).write_bytes(content)
    assert size(tmp_path / name)[0] == pytest.approx(6.9, abs=0.01)


@pytest.mark.usefixtures("undrawn")
def test_no_file_of_anybody_else_is_replaced(comparison: Comparison, tmp_path: Path) -> None:
    out = tmp_path / "p"
    first, again = (
        {path.name: path.read_bytes() for path in write_paper(comparison, out, "rlstab report x", "column")}
        for _ in range(2)
    )
    assert first == again
    write_paper(comparison, out, "rlstab report x", "page")  # its own files may change
    (out / "table.tex").write_text("edited by hand")
    (out / "notes.txt").write_text("the user's")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ReportError, match=r"table\.tex exists, is not as rlstab wrote it, and stays so"):
        write_paper(comparison, out, "rlstab report x", "column")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "curve.svg").write_text("<svg/>")
    with pytest.raises(ReportError, match=r"curve\.svg exists"):
        write_paper(comparison, other, "rlstab report x", "column")
    assert [path.name for path in other.iterdir()] == ["curve.svg"]
    (other / "curve.svg").rename(other / "rlstab-report.json")
    with pytest.raises(ReportError, match=r"rlstab-report\.json exists"):
        write_paper(comparison, other, "rlstab report x", "column")


@pytest.mark.slow
def test_a_sweep_and_several_settings(swept: Comparison, tmp_path: Path) -> None:
    names = {path.name for path in write_paper(swept, tmp_path / "s", "", "column")}
    assert {"sweep-1.svg", "curve-1.svg", "curve-3.pdf", "differences-2.svg", "survival-3.svg"} <= names
    assert "survival-1.svg" not in names  # nothing was lost there
    drawn = (tmp_path / "s/sweep-1.svg").read_text()
    assert "<!-- 2e-4 -->" in drawn
    assert "mathdefault" not in drawn


@pytest.mark.usefixtures("undrawn")
def test_the_command_line_writes_a_paper_and_nothing_else(
    bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(bench), "--paper", str(tmp_path / "p"), "--width", "page", "--metric", "eval/mean"]) == 0
    assert not (bench / "report").exists()
    about = json.loads((tmp_path / "p/rlstab-report.json").read_text())
    assert about["command"] == f"rlstab report {bench} --metric eval/mean --paper {tmp_path}/p --width page"
    assert "written" in capsys.readouterr().err
    (tmp_path / "p/table.tex").write_text("x")
    assert main(["report", str(bench), "--paper", str(tmp_path / "p")]) == 2


def test_names_of_any_letters_and_runs_of_nothing_but_nan(tmp_path: Path) -> None:
    runs = [
        record(
            {"reward/mean": [np.nan] * 60, **{"tokens/entropy": curves(60, seed)["tokens/entropy"]}},
            method=name,
            seed=seed,
        )
        for name in ("grpo", HOSTILE)
        for seed in range(3)
    ]
    written = {path.name for path in write_paper(of(runs), tmp_path, "", "column")}
    assert {"curve.svg", "survival.svg", "table.tex"} <= written
    assert size(tmp_path / "curve.svg")[0] == pytest.approx(3.3, abs=0.01)
    tex = (tmp_path / "table.tex").read_text()
    assert r"a\_b \& 50\% \#1 \$x\$ \{y\} \textbackslash{}input\{z\}" in tex
    assert r"$<$$|$$>$ U+65B9U+6CD5 U+0451" in tex


@pytest.mark.slow
def test_the_table_compiles(swept: Comparison, tmp_path: Path) -> None:
    """By pdflatex of the system; `nox -s tex` requires it."""
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed: texlive-latex-base and texlive-latex-recommended")
    for name, comparison in (("plain", of(lossy())), ("names", of(lossy(HOSTILE))), ("settings", swept)):
        write_paper(comparison, tmp_path / name, "", "column")
        text = rf"\documentclass{{article}}\usepackage{{booktabs,graphicx}}\begin{{document}}\input{{{name}/table}}"
        text += rf"\includegraphics{{{next((tmp_path / name).glob('*.pdf')).relative_to(tmp_path)}}}\end{{document}}"
        (tmp_path / f"{name}.tex").write_text(text)
        made = subprocess.run(
            ["pdflatex", "-halt-on-error", f"{name}.tex"], cwd=tmp_path, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stdout[-2000:]
        assert (tmp_path / f"{name}.pdf").stat().st_size > 10_000
