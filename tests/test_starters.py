"""What one starts from: examples by name, and run files that `rlstab init` writes."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import rlstab
from rlstab.cli import _parser, main
from rlstab.config import load_run, objective_hash, run_hash
from rlstab.config.bundled_examples import examples
from rlstab.config.runs import RunConfig
from rlstab.explain.run_file import AROUND, recipes, run_file
from rlstab.presets import PRESETS
from tests.train.runs import go

ROOT = Path(rlstab.__file__).parents[1]
RECIPES = sorted(recipes())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, far from the clone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The settings below an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation)
    for one in get_args(annotation):
        yield from models(one)


def test_every_setting_of_a_run_says_what_it_is() -> None:
    sections = {name for name, field in RunConfig.model_fields.items() if [*models(field.annotation)]}
    silent = [
        f"{cls.__name__}.{name}"
        for cls in models(RunConfig)
        for name, field in cls.model_fields.items()
        if not field.description
        and not (cls is RunConfig and name in {*sections, "stages", "objective"})
        and name != "name"  # of a task: its key
    ]
    assert silent == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_becomes_a_file_that_means_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name]) == 0
    assert capsys.readouterr() == (f"{name}.yaml\n", "")
    found = load_run(f"{name}.yaml")
    shipped = examples().get(name)
    if shipped is not None and shipped.kind == "run":
        assert run_hash(found) == run_hash(load_run(shipped.path))
        assert found.tracking == load_run(shipped.path).tracking
    else:
        assert objective_hash(found.composition) == objective_hash(PRESETS[name].objective)
        assert found.pipeline == load_run({"objective": {"preset": name}}).pipeline
        around = load_run(examples()[AROUND].path)
        assert (found.model, found.task, found.rollout) == (around.model, around.task, around.rollout)
        assert found.tracking.out == f"runs/{name}"
    assert main(["check", f"{name}.yaml"]) == 0
    assert "no conflict" in capsys.readouterr().out
    lines = Path(f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"# {name}: {recipes()[name]}"
    assert [line for above, line in itertools.pairwise(lines) if not commented(above, line)] == []
    assert max(map(len, lines[1:])) <= 120


def commented(above: str, line: str) -> bool:
    """Whether a line is empty, a comment, has one beside it or above, or only opens what it holds."""
    opens = re.fullmatch(r" *(outer|inner|method):", line)
    return not line or bool(opens) or " # " in f" {line}" or above.lstrip().startswith("# ")


def test_the_comments_are_those_of_the_fields_and_cards() -> None:
    text = " ".join(re.sub(r"(?m)^ *#|#", " ", run_file("stapo")).split())
    for field in next(models(RunConfig.model_fields["optimisation"].annotation)).model_fields.values():
        assert field.description
        assert " ".join(field.description.split()) in text
    assert "Whose entropies give the threshold" in text  # the card of s2t
    assert "arXiv 2602.15620 v4-v5: rewarded tokens below max_prob" in text  # the preset
    assert "old_logprobs: null" in text  # left to what the other settings say, as the recipe does
    assert "trackers: [] metrics.jsonl is always written; wandb | tensorboard" in text


def test_a_file_that_exists_stays(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "dapo.yaml").write_text("mine")
    assert main(["init", "dapo"]) == 2
    assert capsys.readouterr().err == "ConfigError: dapo.yaml exists, and stays as it is. Give --out another file.\n"
    assert (elsewhere / "dapo.yaml").read_text() == "mine"
    assert main(["init", "dapo", "--out", "no/such/folder.yaml"]) == 2
    assert "cannot be written: no such file or directory. Give --out" in capsys.readouterr().err
    assert main(["init", "dapo", "--out", "other.yaml"]) == 0
    assert (elsewhere / "other.yaml").read_text().splitlines()[-1].startswith("seed: 0  # ")
    assert "rlstab train other.yaml" in (elsewhere / "other.yaml").read_text()


def test_what_is_unknown_is_told_with_the_nearest(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "dapoo"]) == 2
    assert main(["train", "--example", "countdwn"]) == 2
    assert capsys.readouterr().err == (
        "UnknownName: no recipe is called 'dapoo'. Did you mean 'dapo'?\n"
        "UnknownName: no example (run) is called 'countdwn'. Did you mean 'countdown'?\n"
    )
    assert not any(elsewhere.iterdir())


def test_without_a_name_the_recipes_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["init"]) == 0
    lines = {line.split("  ")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    for name, about in recipes().items():
        assert about in lines[name]


def test_list_names_the_examples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["list"]) == 0
    listed = capsys.readouterr().out.partition("examples, for --example")[2]
    for name, one in examples().items():
        assert re.search(rf"^  {one.kind} .*\b{name}\b", listed, flags=re.MULTILINE)


def test_a_file_that_was_written_trains(elsewhere: Path) -> None:
    assert main(["init", "stapo"]) == 0
    small = {
        "rollout.prompts": 4, "rollout.group": 2, "optimisation.rollouts": 2, "optimisation.mini_batches": 1,
        "evaluation.prompts": 4, "evaluation.samples": 1, "evaluation.pass_at": [1], "tracking.trace_every": 0,
    }  # fmt: skip
    result = go(load_run("stapo.yaml", small))
    assert [one["rollout"] for one in result.records] == [0, 1, 2]
    assert result.out == Path("runs/stapo")


def test_the_examples_are_those_of_the_repository_that_stand_alone() -> None:
    files = {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    assert examples().keys() <= files
    assert files - examples().keys() >= {"jsonl_math", "own_reward", "smollm2_chain_sum"}  # files, or a download
    assert {"chain", "countdown", "grpo_countdown", "stack"} <= {
        name for name, one in examples().items() if one.kind == "run"
    }
    assert examples()["objective"].kind == "objective"
    assert any(one.kind == "bench" for one in examples().values())
    for one in examples().values():
        assert re.fullmatch(r"\S.{10,}\.", one.about)


@pytest.mark.parametrize("name", [name for name, one in examples().items() if one.kind != "bench"])
def test_an_example_is_taken_by_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--example", name]) == 0
    by_name = capsys.readouterr().out
    assert main(["check", str(examples()[name].path)]) == 0
    assert capsys.readouterr().out == by_name


def test_a_bench_is_taken_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    name = next(name for name, one in examples().items() if one.kind == "bench")
    assert main(["bench", "--example", name, "--dry-run"]) == 0
    assert "optimizer steps" in capsys.readouterr().out
    assert main(["explain", "--example", name, "--markdown"]) == 0
    assert f"{name}.yaml" in capsys.readouterr().out


def test_where_a_run_is_stopped_the_example_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlstab.train import loop
    from rlstab.train.loop import Stopped

    def stop(*_: object, **__: object) -> None:
        raise Stopped(2, 3, 200, None)

    monkeypatch.setattr(loop, "train", stop)
    assert main(["train", "--example", "countdown", "--set", "seed=3"]) == 130
    assert capsys.readouterr().err.endswith("Continue with: rlstab train --example countdown --set=seed=3 --resume\n")


def completer(parser: argparse.ArgumentParser, command: str, option: str) -> list[str]:
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    found = next(one for one in commands.choices[command]._actions if option in (*one.option_strings, one.dest))
    return found.completer(prefix="", parsed_args=None)  # type: ignore[no-any-return]


def test_the_shell_is_told_names() -> None:
    runs = {name for name, one in examples().items() if one.kind == "run"}
    assert set(completer(_parser(), "train", "--example")) == runs
    assert set(completer(_parser(), "explain", "--example")) == set(examples())
    assert set(completer(_parser(), "init", "recipe")) == set(recipes())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("argcomplete") is None, reason="argcomplete is not installed")
def test_argcomplete_answers_with_them(elsewhere: Path) -> None:
    line = "rlstab train --example gr"
    asked = {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": "answer",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }  # fmt: skip
    program = "import sys; from rlstab.cli import main; sys.argv[0] = 'rlstab'; main()"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **asked}, check=True)
    assert (elsewhere / "answer").read_text().strip() == "grpo_countdown"
