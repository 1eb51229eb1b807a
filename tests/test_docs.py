"""The documents: their code runs, their YAML loads, their commands exist, and what they list is complete."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlstab.bench.file import BenchFile, MethodEntry, load_bench
from rlstab.cli import main
from rlstab.config import RunConfig, load_objective, load_run
from rlstab.core.objective import no_fit_warnings
from rlstab.explain.check import read
from rlstab.explain.notes import notes
from rlstab.stages import STAGES
from rlstab.zoo import METHODS
from tests.train.runs import go, small

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
HOW_TO = DOCS / "how-to" / "add-a-method.md"
OWN_LOOP = ROOT / "examples" / "own_loop.py"
#: Pages on other hosts are run where these are installed, in tests/adapters; the others further down.
ELSEWHERE = {DOCS / "start" / "trl.md", DOCS / "start" / "own-loop.md"}
RUN_HERE = [page for page in PAGES if page.parent.name not in ("how-to", "hosts") and page not in ELSEWHERE]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def blocks(page: Path, language: str) -> list[str]:
    """The code of a page, with the files that it includes."""
    text = page.read_text(encoding="utf-8")
    return [
        re.sub(r'--8<-- "(.*)"\n', lambda file: (ROOT / file[1]).read_text(encoding="utf-8"), block)
        for block in re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    ]


def run(text: str, name: str, namespace: dict[str, Any]) -> None:
    exec(compile(text, name, "exec", dont_inherit=True), namespace)


def close(text: str) -> str:
    """The last digit of a figure may differ on another processor."""
    return re.sub(r"\d+\.\d+", lambda figure: f"{float(figure[0]):.2f}", text)


def test_python_in_the_documents_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for page in RUN_HERE:
        for registry in (METHODS, STAGES):
            monkeypatch.setattr(registry, "_classes", dict(registry._classes))
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in blocks(page, "python"):
            run(block, str(page), namespace)
        if page.name == "README.md":
            assert "'ratio/mean': 1.0" in capsys.readouterr().out


def test_yaml_in_the_documents_and_every_example_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for page in [*RUN_HERE, DOCS / "how-to" / "compare.md"]:
        for block in blocks(page, "yaml"):
            data = yaml.safe_load(block)
            if isinstance(data, dict) and {"base", "command"} & data.keys():
                if page.parent.name == "how-to":  # others are of the examples, below
                    load_bench(data)
            elif isinstance(data, dict) and "slurm" in data:
                pass  # a part of a bench file
            elif isinstance(data, dict) and "stages" in data:
                load_run({"objective": "clip_higher", **data})
            else:
                load_objective(data)
    for file in [*(ROOT / "examples").glob("*.yaml"), ROOT / "examples" / "my_mask" / "bench.yaml"]:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        (load_bench if {"base", "command"} & data.keys() else load_run if "model" in data else load_objective)(file)
        if not {"base", "command"} & data.keys():
            with no_fit_warnings():
                assert notes(*read(str(file), {})) == [], file  # `check` has no objection


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_stores(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("IPython", reason="a notebook shows HTML, and IPython is not installed")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        run("".join(cell["source"]), str(notebook), namespace)
        stored = "".join("".join(part["text"]) for part in cell["outputs"] if part["output_type"] == "stream")
        assert close(capsys.readouterr().out) == close(stored)
    assert any(cell["outputs"] for cell in cells)


@pytest.mark.parametrize("rollouts", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_the_loop_of_the_page_is_the_example_runs_and_learns(rollouts: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = OWN_LOOP.read_text(encoding="utf-8")
    assert blocks(DOCS / "start" / "own-loop.md", "python") == [text]
    counts = "ROLLOUTS, PROMPTS, GROUP = "
    assert f"{counts}60, 16," in text
    text = text.replace(f"{counts}60, 16,", f"{counts}{rollouts}, {4 if rollouts == 2 else 16},")
    with torch.random.fork_rng():
        run(text, str(OWN_LOOP), {"__name__": "__main__"})
    right = [float(share) for share in re.findall(r"right ([0-9.]+)", capsys.readouterr().out)]
    assert len(right) == rollouts
    assert rollouts == 2 or sum(right[-10:]) / 10 > sum(right[:10]) / 10 + 0.1


def with_text(text: str) -> str:
    (block,) = [block for block in blocks(HOW_TO, "python") if text in block]
    return block


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modules of the page, importable; the registry as it was afterwards."""
    (tmp_path / "spare_forks.py").write_text(with_text("class SpareForks"))
    (tmp_path / "skip.py").write_text(with_text("class SkipCertain"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spare_forks", raising=False)
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    return tmp_path


def test_the_page_on_methods_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(HOW_TO, "python"):
        run(block.replace("examples=5", "examples=2"), str(HOW_TO), namespace)
    assert "every law holds" in capsys.readouterr().out
    for block in blocks(HOW_TO, "yaml"):
        (folder / "objective.yaml").write_text(block)
        load_objective(folder / "objective.yaml")
    (points,) = [tomllib.loads(block)["project"]["entry-points"]["rlstab.methods"] for block in blocks(HOW_TO, "toml")]
    for name, place in points.items():
        assert EntryPoint(name, place, "rlstab.methods").load().name == name


@pytest.mark.slow
def test_its_tests_pass_under_pytest(folder: Path) -> None:
    """With fewer drawn steps than a user takes: the block that checks the method takes them all."""
    tests = f"{with_text('def oracle')}\n\n{with_text('@parametrize_laws')}".replace("oracles=", "examples=4, oracles=")
    (folder / "test_spare_forks.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def commands() -> Iterator[list[str]]:
    """The words of each line of a shell block, without its comment."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").strip().splitlines():
                if words := shlex.split(line, comments=True):
                    yield words


def test_every_command_in_the_documents_exists(capsys: pytest.CaptureFixture[str]) -> None:
    ours = {tuple(words[1:]) for words in commands() if words[0] == "rlstab" and ">" not in words}
    assert len(ours) >= 10
    for words in ours:
        with pytest.raises(SystemExit) as ended:  # what cannot be parsed ends with 2, and --help with 0 after the rest
            main([*words, "--help"])
        assert ended.value.code == 0, words
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {words[1] for words in commands() if words[0] == "make"} <= rules
    capsys.readouterr()


def keys(schema: Any) -> Iterator[str]:
    """The names of all properties in a schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from keys(part)


def test_settings_are_listed() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for model in (RunConfig, BenchFile, MethodEntry):
        assert {key for key in keys(model.model_json_schema()) if f"`{key}`" not in text} == set()


def test_every_metric_is_explained(tmp_path: Path) -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    controller = {"name": "adaptive_entropy", "target_entropy": 5.0, "initial": 0.001}
    objective = ["clip_higher", "s2t", "stare", {"name": "lp_reg", "share": 0.2}, "kl", "entropy_bonus", controller]
    changes = {"evaluation__every": 3, "evaluation__prompts": 4, "optimisation__epochs": 2}
    logged = {name for record in go(small(tmp_path, objective, **changes)).records for name in record}
    general = {re.sub(r"@\d+", "@k", name) for name in logged if not name.startswith("seconds/")}
    assert {name for name in general if f"`{name}`" not in text} == set()
