"""What users start from: the examples, in which nothing is idle, and the run files that ``rlstab init`` writes."""

import itertools
import re
from pathlib import Path

import pytest

import rlstab
from rlstab.cli import main
from rlstab.config import load_run, objective_hash, run_hash
from rlstab.config.bundled_examples import examples
from rlstab.explain.run_file import AROUND, recipes, run_file
from rlstab.presets import PRESETS
from tests.train.runs import go

ROOT = Path(rlstab.__file__).parents[1]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the clone."""
    monkeypatch.chdir(tmp_path)


def commented(above: str, line: str) -> bool:
    """Whether a line is empty, a comment, has one next to it or above, or only opens what it holds."""
    opens = re.fullmatch(r" *(outer|inner|method):", line)
    return not line or bool(opens) or " # " in f" {line}" or above.lstrip().startswith("# ")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_recipe_becomes_a_file_that_means_the_same(every: int) -> None:
    around = load_run(examples()[AROUND].path)
    for name, about in [*recipes().items()][::every]:
        text = run_file(name)
        Path(f"{name}.yaml").write_text(text)
        run, example = load_run(f"{name}.yaml"), examples().get(name)
        if example is not None and example.kind == "run":
            assert run_hash(run) == run_hash(load_run(example.path))
            assert run.tracking == load_run(example.path).tracking
        else:
            assert objective_hash(run.composition) == objective_hash(PRESETS[name].objective)
            assert run.pipeline == load_run({"objective": {"preset": name}}).pipeline
            assert (run.model, run.task, run.rollout) == (around.model, around.task, around.rollout)
            assert run.tracking.out == f"runs/{name}"
        lines = text.splitlines()
        assert about in lines[0]
        assert [line for above, line in itertools.pairwise(lines) if not commented(above, line)] == []
        assert max(map(len, lines[1:])) <= 120


def test_a_file_is_written_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "stapo"]) == main(["check", "stapo.yaml"]) == 0
    small = {
        "rollout.prompts": 4, "rollout.group": 2, "optimisation.rollouts": 2, "optimisation.mini_batches": 1,
        "evaluation.prompts": 4, "evaluation.samples": 1, "evaluation.pass_at": [1], "tracking.dump_every": 0,
    }  # fmt: skip
    assert [record["rollout"] for record in go(load_run("stapo.yaml", small)).records] == [0, 1, 2]


def test_an_example_is_taken_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert examples().keys() <= {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    assert {example.kind for example in examples().values()} == {"run", "objective", "bench"}
    assert main(["explain", "--example", "countdown", "--markdown"]) == 0
    by_name = capsys.readouterr().out
    assert main(["explain", str(examples()["countdown"].path), "--markdown"]) == 0
    assert capsys.readouterr().out == by_name


def test_the_demo_moves_the_ratio_and_is_recorded() -> None:
    run = load_run(examples()["countdown"].path)
    assert run.optimisation.optimizer_steps_per_rollout > 1
    assert run.tracking.dump_every
