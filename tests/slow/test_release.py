"""From nothing: the wheel in an empty environment, a fresh clone, and type checkers on a user's script.

These install from pip's index, several hundred megabytes, and take minutes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlstab

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
#: Nothing of what runs these tests.
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**CLEAN, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}"
    return done.stdout


def environment(folder: Path) -> Path:
    """A new environment, and its folder of programs."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin"


SCRIPT = """
import rlstab
from rlstab import ClipHigher, S2TMask, compose

loss = compose(ClipHigher(low=0.2, high=0.28), S2TMask())
reveal_type(loss)
reveal_type(rlstab.load_objective({"preset": "dapo"}))
ClipHigher(low="0.2")
"""
REPORTED = {
    "mypy": ['Revealed type is "rlstab.core.compose.Composition"'] * 2 + ['Argument "low" to "ClipHigher" has'],
    "pyright": ['Type of "loss" is "Composition"', '})" is "Composition"', "cannot be assigned to parameter"],
}


@pytest.mark.parametrize("checker", REPORTED)
def test_a_type_checker_reads_an_editable_install(checker: str, tmp_path: Path) -> None:
    """The packages that rlstab needs are those of this environment; rlstab is installed anew."""
    for package in (checker, "hatchling"):
        pytest.importorskip(package)
    bin = environment(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "packages_of_the_tests.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    run(bin / "python", "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", ROOT, cwd=tmp_path)
    assert [path.read_text().strip() for path in site.glob("*rlstab*.pth")] == [str(ROOT)]  # a path, no import hook
    (tmp_path / "script.py").write_text(SCRIPT)
    option = {"mypy": "--python-executable", "pyright": "--pythonpath"}[checker]
    said = run(sys.executable, "-m", checker, option, bin / "python", "script.py", cwd=tmp_path, code=1)
    lines = [line for line in said.splitlines() if "script.py:" in line]
    assert len(lines) == len(REPORTED[checker]), said
    for line, wanted in zip(lines, REPORTED[checker], strict=True):
        assert wanted in line


def installed(bin: Path) -> set[str]:
    listed = json.loads(run(bin / "python", "-m", "pip", "list", "--format=json", cwd=bin))
    return {package["name"].lower() for package in listed}


def test_the_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    """First the light install, then the extras, then the tests that ship."""
    pytest.importorskip("build")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    bin, empty = environment(tmp_path / "venv"), tmp_path / "empty"
    empty.mkdir()
    install = [bin / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]

    run(*install, TORCH, cwd=empty)
    before = installed(bin)
    run(*install, wheel, cwd=empty)
    brought = installed(bin) - before
    print(f"the light install brings, in addition to torch: {', '.join(sorted(brought))}")
    assert {"rlstab", "pydantic", "pyyaml", "numpy", "rich"} <= brought
    assert not brought & {"transformers", "accelerate", "wandb", "matplotlib", "scipy", "plotly"}
    assert run(bin / "rlstab", "--version", cwd=empty) == f"rlstab {rlstab.__version__}\n"
    assert "no conflict" in run(bin / "rlstab", "check", "--example", "countdown", cwd=empty)
    run(bin / "rlstab", "init", "dapo", cwd=empty)
    told = run(bin / "rlstab", "train", "dapo.yaml", cwd=empty, code=2)
    assert told.count("\n") == 1
    assert "'.[train]'" in told

    run(*install, f"{wheel}[train,testing]", cwd=empty)
    run(bin / "rlstab", "train", "--example", "countdown", "--set", "tracking.dump_every=100", cwd=empty)
    run(bin / "rlstab", "look", "runs/countdown", cwd=empty)
    assert (empty / "runs" / "countdown" / "look.html").is_file()
    assert "'.[report]'" in run(bin / "rlstab", "report", "runs/countdown", cwd=empty, code=2)
    obeys = (
        "from rlstab import S2TMask; from rlstab.testing import check_objective as c; print(c(S2TMask(), examples=2))"
    )
    assert "every law holds" in run(bin / "python", "-c", obeys, cwd=empty)

    run(*install, f"{wheel}[report]", cwd=empty)
    run(bin / "rlstab", "report", "runs/countdown", cwd=empty)
    assert (empty / "runs" / "countdown" / "report" / "report.html").is_file()


@pytest.mark.skipif(shutil.which("git") is None or shutil.which("make") is None, reason="needs git and make")
def test_make_train_in_a_fresh_clone(tmp_path: Path) -> None:
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone", cwd=tmp_path)
    run("make", "train", f"PYTHON={sys.executable}", cwd=tmp_path / "clone")
    lines = (tmp_path / "clone" / "runs" / "countdown" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["eval/mean"] > json.loads(lines[0])["eval/mean"]
    assert not run("git", "status", "--short", cwd=tmp_path / "clone")
