"""A light install: what it can do, and what it says where an extra is missing."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlstab
from rlstab.cli import main
from rlstab.errors import MissingPackage
from rlstab.extras import EXTRAS, how_to_install, require

PACKAGE = Path(rlstab.__file__).parent
CLONE = PACKAGE.parent
PROJECT = tomllib.loads((CLONE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Distributions that are imported by another name.
IMPORTED_AS = {"pyyaml": "yaml", "transferqueue": "transfer_queue"}
#: Comes with a package that is listed.
COMES_WITH = {
    "pydantic": {"pydantic_core"},
    "transformers": {"tokenizers", "huggingface_hub"},
    "jinja2": {"markupsafe"},
}


def packages(requirements: list[str]) -> set[str]:
    """Names under which the packages of a list of requirements are imported."""
    names = {re.split("[>=;]", line)[0].lower().replace("-", "_") for line in requirements}
    return {IMPORTED_AS.get(name, name) for name in names}


BASE = packages(PROJECT["dependencies"])
OF = {extra: packages(PROJECT["optional-dependencies"][extra]) for extra in EXTRAS}


def test_the_table_is_that_of_the_project() -> None:
    not_imported = {"train": {"wandb"}, "verl": {"fastapi", "uvicorn"}}
    assert {extra: set(names) for extra, names in EXTRAS.items()} == {
        extra: names - not_imported.get(extra, set()) for extra, names in OF.items()
    }


def imported(room: str) -> set[str]:
    """Foreign packages that the files of a room import as they are imported themselves."""
    names = set()
    for path in sorted((PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module).partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"rlstab"}


def test_a_room_imports_what_its_installation_has() -> None:
    extras = {"train": "train", "bench": "train", "report": "report"}
    for room in ("train", "bench", "report", "explain", "config", "tasks", "trace", "diagnose", "cli"):
        there = BASE | OF.get(extras.get(room, ""), set())
        assert imported(room) <= there | set().union(*(COMES_WITH.get(name, set()) for name in there)), room


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for extra, commands in {"train": ["train", "bench"], "report": ["report"]}.items():
        for name in EXTRAS[extra]:
            monkeypatch.setitem(sys.modules, name, None)  # as Python finds a package that is not there
            for command in commands:
                assert main([command, str(CLONE / "examples" / "countdown.yaml")]) == 2
                out, err = capsys.readouterr()
                assert (out, err.count("\n")) == ("", 1)
                assert err.startswith("MissingPackage: ")
                assert f": {name} is not installed" in err
                assert how_to_install(extra) in err
            monkeypatch.undo()
            monkeypatch.chdir(tmp_path)
    assert not any(tmp_path.iterdir())


def test_packages_that_are_missing_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS["report"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackage, match="scipy, matplotlib, plotly, jinja2 are not installed"):
        require("report", "It")


#: Where a reader meets a command that installs rlstab.
TEXTS = ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "examples/**/*", "rlstab/**/*.py", "benchmarks/*", "pyproject.toml")


def test_every_line_that_installs_rlstab_works_in_a_clone() -> None:
    """The package is on no index: only a path installs it."""
    from_path = 0
    for path in {path for pattern in TEXTS for path in CLONE.glob(pattern) if path.is_file()}:
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines():
            if "pip install" not in line:
                continue
            assert not re.search(
                r"""(?<![-\w/.])['"]?rlstab(\[|['"`)]|\s*$)""", line.partition("pip install")[2].partition("#")[0]
            ), line
            for extras in re.findall(r"-e ['\"]?[\w/]*\.?\[([a-z,]+)\]", line):
                from_path += 1
                assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), (path, line)
    assert from_path >= 5
    assert how_to_install("train", "report").endswith("pip install -e '.[train,report]'")


#: What a light install is for. `view` and `runs` have nothing to read here, and say so.
LIGHT = {
    "": 0,
    "list": 0,
    "check {examples}/countdown.yaml": 0,
    "check {examples}/jsonl_math.yaml": 2,
    "explain --preset dapo": 0,
    "explain {examples}/bench_entropy.yaml": 0,
    "schema --out run.json": 0,
    "schema --of bench --out bench.json": 0,
    "doctor": 0,
    "init": 0,
    "init dapo": 0,
    "check dapo.yaml": 0,
    "diagnose {examples}/../tests/diagnose/data/truncation.jsonl": 0,
    "runs": 2,
    "view runs/x": 2,
    "diagnose runs/x": 2,
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
    ended["import"] = 2, str(error) + "\\n"
print(json.dumps(ended))
"""


def test_a_light_install_does_all_that_reads(tmp_path: Path) -> None:
    """Without every package that the base does not list: those of all extras, and what comes with them."""
    extras = ("train", "report", "tasks", "tensorboard", "lora", "datasets", "testing", "trl")
    every = set().union(*(packages(PROJECT["optional-dependencies"][extra]) for extra in extras))
    absent = sorted((every | set().union(*COMES_WITH.values())) - {"pydantic_core"})
    commands = {command.format(examples=CLONE / "examples"): code for command, code in LIGHT.items()}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(absent), json.dumps([*commands])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    ended = json.loads(ran.stdout)
    assert {command: code for command, (code, _) in ended.items()} == {**commands, "import": 2}, ended
    for code, said in ended.values():
        assert "Traceback" not in said
        assert said.count("\n") == (1 if code else 0)
    assert how_to_install("train") in ended["import"][1]
