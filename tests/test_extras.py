"""A light install: what it can do, and what it says where an extra is missing."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlstab
from rlstab.extras import EXTRAS, PINNED, how_to_install

PACKAGE = Path(rlstab.__file__).parent
CLONE = PACKAGE.parent
PROJECT = tomllib.loads((CLONE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: Distributions that are imported by another name.
IMPORTED_AS = {"pyyaml": "yaml", "transferqueue": "transfer_queue"}
#: Comes with a package that is listed.
COMES_WITH = {
    "pydantic": {"pydantic_core"},
    "transformers": {"tokenizers", "huggingface_hub"},
    "torch": {"jinja2", "markupsafe"},
    "trl": {"transformers", "accelerate", "datasets", "safetensors", "tokenizers", "huggingface_hub", "filelock"},
    "peft": {"transformers", "accelerate", "safetensors", "tokenizers", "huggingface_hub", "filelock"},
    "datasets": {"huggingface_hub", "filelock"},
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
    """Foreign packages that the files of a room import as they are imported themselves.

    Those of a callback for trainers of transformers are left out: who has no transformers has none to watch.
    """
    names = set()
    for path in sorted((PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]):
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.name != "callback.py" else ():
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module).partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"rlstab"}


def test_a_room_imports_what_its_installation_has() -> None:
    extras = {"train": "train", "bench": "train", "report": "report"}
    for room in ("train", "bench", "report", "explain", "config", "tasks", "record", "look", "cli"):
        there = (
            BASE
            | OF.get(extras.get(room, ""), set())
            | OF.get({"bench": "slurm", "report": "paper"}.get(room, ""), set())
        )
        assert imported(room) <= there | set().union(*(COMES_WITH.get(name, set()) for name in there)), room


#: Where a reader meets a command that installs rlstab.
TEXTS = ("*.md", "docs/**/*.md", "docs/**/*.ipynb", "examples/**/*", "rlstab/**/*.py", "benchmarks/*", "pyproject.toml")


def test_every_line_that_installs_rlstab_works_in_a_clone() -> None:
    """The package is on no index: only a path installs it."""
    paths = {path for pattern in TEXTS for path in CLONE.glob(pattern) if path.is_file()}
    text = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    installed = re.findall(r"pip install ([^#\n]*)", text)
    assert [line for line in installed if re.search(r"""(?<![-\w/.])rlstab(\[|['"`)]|\s*$)""", line)] == []
    extras = re.findall(r"-e ['\"]?[\w/]*\.?\[([a-z,]+)\]", "\n".join(installed))
    assert len(extras) >= 5
    assert set(",".join(extras).split(",")) <= PROJECT["optional-dependencies"].keys()
    unpinned = [line for line in installed if re.search(r"-e ['\"]?\.\[", line) and "-c constraints" not in line]
    unpinned = [line for line in unpinned if not any(f".[{extra}]" in line for extra in PINNED)]
    assert unpinned == [], "without the constraints, untested releases would be installed"
    assert how_to_install("train", "report").endswith("pip install -c constraints.txt -e '.[train,report]'")
    assert how_to_install("axolotl").endswith("pip install -e '.[axolotl]'")
    assert how_to_install("verl").endswith("pip install -c constraints-verl.txt -e '.[verl]'")


def test_a_peft_that_transformers_refuses_is_answered_with_releases_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    from rlstab.config.settings import AdapterSettings
    from rlstab.models.loading import FIT, load_model

    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "99.0.0")
    with pytest.raises(rlstab.errors.ModelError, match=f"99.0.0.*{FIT}: .*train,lora"):
        load_model("countdown-tiny", adapter=AdapterSettings())


#: A log without a dump is looked at without torch.
LOOK = "look {examples}/../tests/diagnose/data/truncation.jsonl --out look.html"
#: What needs neither torch nor pydantic: commands, and how their output begins.
QUICK = {"": "usage: rlstab", "--help": "usage: rlstab", "--version": f"rlstab {rlstab.__version__}"}
#: What the names of the library, which are about tensors alone, must not import.
HEAVY = {"transformers", "accelerate", "pydantic", "yaml", "matplotlib", "rich", "wandb", "einops", "safetensors"}
#: What an install without any extra does, and how it ends. There is nothing to read for `runs`.
LIGHT = {
    "list": 0,
    "check {examples}/countdown.yaml": 0,
    "check {examples}/jsonl_math.yaml": 2,
    "explain --preset dapo": 0,
    "schema --out run.json": 0,
    "doctor": 0,
    "init": 0,
    "init dapo": 0,
    "check dapo.yaml": 0,
    "runs": 2,
    "look runs/x": 2,
    "train {run}": 2,
    "bench {examples}/bench_entropy.yaml --dry-run": 2,
    "report train": 2,
}
#: What more an install with one extra does.
WITH = {"train": {"train {run}": 0, "bench {examples}/bench_entropy.yaml --dry-run": 0}}
PROGRAM = """
import contextlib, io, json, sys
lacking, quick, look, light = map(json.loads, sys.argv[1:])
for name in lacking:
    sys.modules[name] = None
before = set(sys.modules)
import rlstab, rlstab.cli
at_once, ended = sys.modules.keys() - before, {}
def run(command):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = rlstab.cli.main(command.split())
        except SystemExit as end:
            code = end.code
    ended[command] = code, out.getvalue(), err.getvalue()
for command in quick:
    run(command)
too_much = sys.modules.keys() & {"torch", "pydantic"}
run(look)
too_much |= sys.modules.keys() & {"torch"}
import torch, torch.distributed
before = set(sys.modules)
[getattr(rlstab, name) for name in dir(rlstab)]
by_names = sys.modules.keys() - before
for command in light:
    run(command)
    if command.startswith("check") and "rlstab.train" in sys.modules:
        too_much.add(command)
import rlstab.adapters.data, rlstab.adapters.prime_rl  # which need no package
print(json.dumps([*map(sorted, (at_once, by_names, too_much)), ended]))
"""
RUN = """
objective: clip_higher
rollout: {prompts: 2, group: 2, max_new_tokens: 4}
optimisation: {rollouts: 1}
evaluation: {every: 0}
tracking: {out: train}
"""


@pytest.mark.parametrize("extra", ["", *(pytest.param(extra, marks=pytest.mark.slow) for extra in EXTRAS)])
def test_an_install_with_one_extra_does_what_it_can(extra: str, tmp_path: Path) -> None:
    """Without every package that it does not list: those of the other extras, and what comes with them."""
    if extra and any(importlib.util.find_spec(name) is None for name in OF[extra]):
        pytest.skip(f"{extra} is not installed here")
    (tmp_path / "run.yaml").write_text(RUN)
    there = BASE | OF.get(extra, set())
    there |= set().union(*(COMES_WITH.get(name, set()) for name in there))
    every = set().union(*OF.values(), *COMES_WITH.values())
    paths = {"examples": CLONE / "examples", "run": "run.yaml"}
    commands = {command.format(**paths): code for command, code in {**LIGHT, **WITH.get(extra, {})}.items()}
    look = LOOK.format(**paths)
    lists = sorted(every - there), [*QUICK], look, [*commands]
    program = [sys.executable, "-c", PROGRAM, *map(json.dumps, lists)]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    at_once, by_names, too_much, ended = json.loads(ran.stdout)
    packages_at_once, packages_by_names = ({name.partition(".")[0] for name in some} for some in (at_once, by_names))
    assert packages_at_once - sys.stdlib_module_names == {"rlstab"}
    assert "rlstab" in packages_by_names
    assert not packages_by_names & HEAVY
    assert too_much == []
    for command, begins in QUICK.items():
        code, out, _ = ended.pop(command)
        assert (code, out.startswith(begins)) == (0, True), command
    assert ended.pop(look)[0] == 0
    assert "Answers are cut off" in (tmp_path / "look.html").read_text()
    assert {command: code for command, (code, *_) in ended.items()} == commands, ended
    assert ended[f"check {CLONE}/examples/countdown.yaml"][1].startswith("no conflict: ")
    for code, _, said in ended.values():
        assert "Traceback" not in said
        assert said.count("\n") == 1 or not code
    for lacking, command in (("train", "train run.yaml"), ("report", "report train")):
        if extra == "":
            assert how_to_install(lacking) in ended[command][2]
            assert all(name in ended[command][2] for name in {*EXTRAS[lacking]} - there)
