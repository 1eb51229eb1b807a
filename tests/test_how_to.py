"""The how-to pages work for somebody who follows them: every block is run, in a folder of its own."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from rlstab.explain.card_sections import card

import rlstab
from rlstab.core.registry import Registry
from rlstab.testing import LAWS
from rlstab.zoo import METHODS
from tests.zoo.watch import differences

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "add-a-method.md"
MODULE = "spare_forks"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def with_text(text: str) -> str:
    (found,) = [block for block in blocks("python") if text in block]
    return found


CLASS = with_text("class SpareForks")
#: With fewer drawn steps than a user takes: the block that checks the method takes them all.
TESTS = f"{with_text('def oracle')}\n\n{with_text('@parametrize_laws')}".replace("oracles=", "examples=4, oracles=")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of the page, importable; the registry as it was afterwards."""
    (tmp_path / f"{MODULE}.py").write_text(CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    return tmp_path


def test_the_page_runs_and_its_yaml_loads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    printed = capsys.readouterr().out
    assert "# `spare_forks` · `SpareForks`" in printed
    assert "'spare_forks/spared': 0.125" in printed
    assert "every law holds" in printed
    (text,) = blocks("yaml")
    objective = rlstab.load_objective(yaml.safe_load(text))
    assert repr(objective.keyed["spare_forks"]) == "SpareForks(share=0.1, factor=0.5)"


def test_the_page_says_what_each_law_says_and_what_breaks_it() -> None:
    listed = re.findall(r"^\| `([a-z -]+)` \| .+ \| .+ \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert listed == [*(law.name for law in LAWS), "oracle"]


def test_the_registry_is_as_it_was() -> None:
    assert MODULE not in rlstab.available()


def test_the_class_is_about_forty_lines_below_its_card() -> None:
    (cls,) = [one for one in ast.parse(CLASS).body if isinstance(one, ast.ClassDef)]
    assert cls.end_lineno is not None
    assert cls.end_lineno - cls.body[0].end_lineno <= 40


def test_the_card_is_a_card_and_its_example_runs(folder: Path) -> None:
    cls = importlib.import_module(MODULE).SpareForks
    assert card(cls).summary.startswith("Punish less at forks")
    assert differences(cls) == []
    (example,) = [one for one in doctest.DocTestFinder(recurse=False).find(cls, globs={}) if one.examples]
    assert doctest.DocTestRunner().run(example).failed == 0


def test_its_tests_pass_under_pytest(folder: Path) -> None:
    (folder / f"test_{MODULE}.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", "--rootdir", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 30


@pytest.mark.slow
def test_it_is_one_over_two_processes(folder: Path) -> None:
    (text,) = blocks("py")
    (folder / "check_forks.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    ran = subprocess.run(
        [sys.executable, "check_forks.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "over 2 gloo processes, 40 optimizer steps, " in ran.stdout
    assert "every law holds" in ran.stdout


def test_its_entry_point_is_found(folder: Path) -> None:
    (text,) = blocks("toml")
    project = tomllib.loads(text)
    installed = folder / "rlstab_forks-0.1.0.dist-info"
    installed.mkdir()
    points = project["project"]["entry-points"]["rlstab.methods"]
    lines = [f"{name} = {place}" for name, place in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[rlstab.methods]", *lines]))
    (installed / "METADATA").write_text("Name: rlstab-forks\nVersion: 0.1.0\n")
    registry = Registry({})
    assert MODULE in registry.names()
    found = registry.get(MODULE)
    assert found.name == MODULE
    assert Path(inspect.getfile(found)).parent == folder
    assert project["tool"]["setuptools"]["py-modules"] == [MODULE]
