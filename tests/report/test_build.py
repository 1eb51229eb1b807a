import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlstab
from rlstab.cli import main
from rlstab.report import figures, html
from rlstab.report.build import make_report
from rlstab.report.records import load_runs
from tests.report.conftest import write_run


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where the page and the figures, which have tests of their own, would be written."""
    found: list[Path] = []
    monkeypatch.setattr(html, "write", lambda comparison, out, *_: found.append(out) or out / "report.html")
    saved = figures.Saved(Path("figures/a.png"), "overlap", "")
    monkeypatch.setattr(figures, "write", lambda comparison, out: found.append(out) or [saved])
    return found


def test_export_and_markdown_by_command(bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export, text = tmp_path / "results" / "x.jsonl", tmp_path / "docs" / "results.md"
    assert main(["report", str(bench), "--export", str(export), "--markdown", str(text)]) == 0
    assert len(load_runs(export).runs) == 16
    assert f"rlstab report {bench} --markdown {text}" in text.read_text()
    said = capsys.readouterr().err
    assert "16 runs, 4 methods, 1 setting\n" in said
    assert f"written: {export}" in said
    assert not Path("report").exists()


def test_markdown_from_a_results_file_says_the_same(bench: Path, tmp_path: Path) -> None:
    export, one, other = tmp_path / "x.jsonl", tmp_path / "one.md", tmp_path / "other.md"
    make_report([bench], export=export, markdown_file=one)
    make_report([export], markdown_file=other)
    cut = [text.read_text().split("```", 2)[2] for text in (one, other)]  # without the command
    assert cut[0] == cut[1]


def test_the_page_and_its_figures_go_to_one_folder(
    bench: Path, tmp_path: Path, drawn: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_report([bench], metrics=["eval/mean"], baseline="stare")
    assert drawn == [Path("report"), Path("report")]
    text = Path("report/report.md").read_text()
    assert f"rlstab report {bench} --metric eval/mean --baseline stare --out report" in text
    assert "eval/entropy against" not in text
    assert "difference from stare" in text


def test_what_is_left_out_is_said_without_markup(
    tmp_path: Path, drawn: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", done=30)
    (write_run(tmp_path / "[b]") / "config.yaml").unlink()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert f"left out: {tmp_path}/[b]: neither config.yaml nor bench.json" in said
    assert "note: default clip_higher seed 0: unfinished, 30 of 60 rollouts." in said


def test_errors_end_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: Path) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "ReportError" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(bench), "--markdown", str(tmp_path / "file" / "x.md")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_markdown_needs_no_plotting(bench: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from rlstab.report.build import make_report;"
        f"make_report([{str(bench)!r}], markdown_file={str(tmp_path / 'x.md')!r});"
        "print([name for name in ('plotly', 'matplotlib', 'transformers', 'accelerate') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_report_reads_runs_and_imports_no_trainer() -> None:
    folder = Path(rlstab.__file__).parent
    for path in (folder / "report").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not name.startswith(("rlstab.train", "rlstab.bench", "rlstab.adapters")), path.name
