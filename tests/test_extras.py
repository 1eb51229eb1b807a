"""A light install: what it can do, and what it says where an extra is missing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlstab
from rlstab.cli import main
from rlstab.errors import MissingPackage
from rlstab.extras import EXTRAS, require

PACKAGE = Path(rlstab.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXAMPLES = PACKAGE.parent / "examples"
#: Distributions that are imported by another name.
IMPORTED_AS = {"pyyaml": "yaml"}
#: Comes with a package that is listed.
COMES_WITH = {
    "pydantic": {"pydantic_core"},
    "transformers": {"tokenizers", "huggingface_hub"},
    "jinja2": {"markupsafe"},
}


def packages(requirements: list[str]) -> set[str]:
    """Names under which the packages of a list of requirements are imported."""
    names = {one.partition(">")[0].lower().replace("-", "_") for one in requirements}
    return {IMPORTED_AS.get(one, one) for one in names}


BASE = packages(PROJECT["dependencies"])
OF = {extra: packages(PROJECT["optional-dependencies"][extra]) for extra in EXTRAS}


def test_the_table_is_that_of_the_project() -> None:
    assert {extra: set(names) for extra, names in EXTRAS.items()} == {**OF, "train": OF["train"] - {"wandb"}}


def imported(room: str) -> set[str]:
    """Foreign packages that the files of a room import as they are imported themselves."""
    found = set()
    for path in sorted((PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                found |= {one.name.partition(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"rlstab"}


@pytest.mark.parametrize("room", ["train", "bench", "report", "explain", "config", "tasks", "trace", "atlas", "cli"])
def test_a_room_imports_what_its_installation_has(room: str) -> None:
    extra = {"train": "train", "bench": "train", "report": "report"}.get(room, "")
    there = BASE | OF.get(extra, set())
    assert imported(room) <= there | set().union(*(COMES_WITH.get(one, set()) for one in there))


EVERY = [(extra, name) for extra, names in EXTRAS.items() for name in names]


@pytest.mark.parametrize(("extra", "name"), EVERY)
def test_a_package_that_is_missing_is_told_in_one_line(
    extra: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)  # as Python finds a package that is not there
    for command in {"train": ["train", "bench"], "report": ["report"]}[extra]:
        assert main([command, str(EXAMPLES / "countdown.yaml")]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err == (
            f"MissingPackage: rlstab {command} needs the extra `{extra}`: {name} is not installed. "
            f'Run: pip install "rlstab[{extra}]"\n'
        )
    assert not any(tmp_path.iterdir())


def test_several_that_are_missing_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS["report"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackage, match=r"^It needs .*: scipy, matplotlib, plotly, jinja2 are not installed\. "):
        require("report", "It")


#: What a light install is for. `view` and `runs` have nothing to read here, and say so.
LIGHT = {
    "list": 0,
    "check {examples}/countdown.yaml": 0,
    "check {examples}/jsonl_math.yaml": 0,
    "explain --preset dapo": 0,
    "explain {examples}/bench_entropy.yaml": 0,
    "schema --out run.json": 0,
    "schema --of bench --out bench.json": 0,
    "doctor": 0,
    "init": 0,
    "init dapo": 0,
    "check dapo.yaml": 0,
    "runs": 2,
    "view runs/x": 2,
    "train --example countdown": 2,
}
PROGRAM = """
import contextlib, io, json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
from rlstab.cli import main
ended = {}
for command in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        ended[command] = main(command.split()), said.getvalue()
try:
    import rlstab.train
except ImportError as error:
    ended["import"] = 2, str(error)
print(json.dumps(ended))
"""


def test_a_light_install_does_all_that_reads(tmp_path: Path) -> None:
    """Without every package that the base does not list: those of all extras, and what comes with them."""
    extras = ("train", "report", "tasks", "tensorboard", "lora", "completion", "testing")
    every = set().union(*(packages(PROJECT["optional-dependencies"][one]) for one in extras))
    absent = sorted((every | set().union(*COMES_WITH.values())) - {"pydantic_core"})
    commands = {one.format(examples=EXAMPLES): code for one, code in LIGHT.items()}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(absent), json.dumps([*commands])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    ended = json.loads(ran.stdout)
    assert ended.pop("import")[1].endswith('pip install "rlstab[train]"')
    assert {command: code for command, (code, _) in ended.items()} == commands, ended
    for code, said in ended.values():
        assert "Traceback" not in said
        assert said.count("\n") == (1 if code else 0)
