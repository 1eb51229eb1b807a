"""User-defined methods, stages and tasks by `file.py:Name`: found, loaded, hashed, refused with a reason."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlstab.bench.file import load_bench
from rlstab.cli import main
from rlstab.config import dump_run, load_objective, load_run, objective_hash, run_hash
from rlstab.config.user_code import changed_files, checksums, is_user_code
from rlstab.errors import ConfigError, UnknownName
from rlstab.report.load import load_runs
from rlstab.report.runs import objective_names
from rlstab.tasks.build import build_task, require_loadable
from tests.train.runs import go, small

CODE = """
import rlstab
from rlstab.stages.stage import AdvantageEstimator
from rlstab.tasks import Example

class Unfinished(rlstab.TokenObjective):
    name = "unfinished"

class Halve(rlstab.TokenObjective):
    'Scale the weight of every token.'

    name, writes = "halve", {"weight"}
    factor: float = 0.5

    def terms(self, batch, stat, state):
        return rlstab.Terms(weight=batch.old_logprobs.new_full(batch.old_logprobs.shape, self.factor))

class Taken(Halve):
    name = "s2t"

class Logged(Halve):
    name = "reward"

class Plain(AdvantageEstimator):
    'Take the reward itself.'

    name = "plain"

    def advantages(self, responses, stat, state):
        return responses.rewards

class Doubling:
    'Prompts like `7+7=`.'

    name, keeps_special_tokens, workers = "doubling", True, None

    def __init__(self, most=9):
        self.size = {"train": most, "eval": most}

    def example(self, split, index):
        number = index % self.size[split] + 1
        return Example(f"{number}+{number}=", number)

    def score(self, example, completion):
        return float(completion == f"{2 * example.answer}$")

CONSTANT = 5
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file into a folder next to the current one."""
    folder, here = tmp_path / "project", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)

    def wrote(name: str, content: Any) -> Path:
        (folder / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return folder / name

    return wrote


def run_of(write: Write, **parts: Any) -> Path:
    return write("run.yaml", {"objective": ["clip_higher"], **parts})


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises((ConfigError, UnknownName)) as caught:
        act()
    return str(caught.value)


def test_what_names_something_in_a_file() -> None:
    assert all(map(is_user_code, ["methods.py:Halve", "/a b/methods.py:Outer.Inner", "../m.py:X"]))
    others = ["s2t", "methods.py", "methods.py:", "methods:Halve", ".py:Halve", "m.py:5", 5, None]
    assert not any(map(is_user_code, others))


def test_a_method_is_found_beside_the_yaml_file_then_in_the_current_folder(write: Write) -> None:
    Path("mine.py").write_text(CODE)
    for source in (["mine.py:Halve"], run_of(write, objective="mine.py:Halve")):
        assert list(load_objective(source).keyed) == ["halve"]
    path = write("mine.py", CODE + "# another\n")
    inside = {"name": "observe", "method": {"name": "within", "outer": "s2t", "inner": "mine.py:Halve"}}
    run = load_run(run_of(write, objective=["clip_higher", {"name": "mine.py:Halve", "factor": 0.25}, inside]))
    assert run.objective[1] == {"name": f"{path}:Halve", "factor": 0.25}
    assert run.composition.keyed["halve"].factor == 0.25  # type: ignore[attr-defined]  # a class of a file
    again = load_run(yaml.safe_load(dump_run(run)))  # from anywhere
    assert again == run
    assert run_hash(again) == run_hash(run)


def test_every_path_is_looked_up_beside_the_file_first(write: Write, tmp_path: Path) -> None:
    file = run_of(
        write,
        model={"name": "policy", "adapter": "lora", "reference": "countdown-tiny", "teacher": "policy"},
        task={"name": "jsonl", "path": "a.jsonl", "eval_path": "none.jsonl"},
        reward="own.py:f",
    )
    for folder in ("project/policy", "here/policy", "here/lora"):
        (tmp_path / folder).mkdir()
    data, _ = write("a.jsonl", "one"), write("own.py", "def f(prompt, completion, answer): return 1\n")
    run = load_run(file)
    assert run.model.name == run.model.teacher == str(tmp_path / "project/policy")
    assert run.model.adapter is not None
    assert run.model.adapter.path == str(tmp_path / "here/lora")
    assert run.model.reference == "countdown-tiny"
    assert run.task.model_dump(include={"path", "eval_path"}) == {"path": str(data), "eval_path": "none.jsonl"}
    assert run.reward is not None
    assert run.reward[0].function == f"{tmp_path}/project/own.py:f"
    before = run_hash(run)
    data.write_text("another")
    assert run_hash(load_run(file)) != before


def test_a_stage_and_a_task(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("own.py", CODE)
    file = run_of(write, stages=["own.py:Plain"], task={"name": "own.py:Doubling", "most": 5})
    run = load_run(file)
    assert run.pipeline.estimator.name == "plain"
    assert run.task.model_dump() == {"name": "own", "code": f"{path}:Doubling", "options": {"most": 5}}
    require_loadable(run.task)
    assert build_task(run.task).example("train", 6).prompt == "2+2="
    assert load_run(yaml.safe_load(dump_run(run))) == run
    assert main(["check", str(file)]) == main(["explain", f"clip_higher,{path}:Halve", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert "plain" in printed
    assert "`halve`: Scale the weight of every token." in printed.replace("**", "`")


def test_a_file_that_changed_is_another_run_and_one_in_another_folder_is_not(write: Write) -> None:
    path = write("own.py", CODE)
    file = run_of(write, objective="own.py:Halve", stages="own.py:Plain", task={"name": "own.py:Doubling"})
    run = load_run(file)
    elsewhere = Path("own.py")
    elsewhere.write_text(CODE)
    moved = load_run({"objective": f"{elsewhere.absolute()}:Halve"})
    assert moved.objective != run.objective
    assert objective_hash(moved.composition) == objective_hash(run.composition)
    before = checksums(run.model_dump(mode="json"))
    assert [*before] == ["own.py:Doubling", "own.py:Halve", "own.py:Plain"]
    path.write_text(path.read_text() + "\n# a comment\n")
    again = load_run(file)
    assert len([*changed_files(before, checksums(again.model_dump(mode="json")))]) == 3
    assert run_hash(run) == run_hash(again)  # both read the file now
    assert objective_hash(again.composition) == objective_hash(run.composition)


def test_what_a_file_imports_from_its_folder_counts_also_where_it_comes_later(write: Write) -> None:
    write("own.py", f"try:\n    import first\nexcept ImportError:\n    pass\n{CODE}")
    hashes = [run_hash(run := load_run(run_of(write, objective="own.py:Halve")))]
    for name, text in (("first.py", "import second\n"), ("second.py", "A = 1\n"), ("second.py", "A = 23\n")):
        write(name, text)
        hashes.append(run_hash(run))
    (write("other.py", "A = 1\n"), write("second.py", "A = 1\n"))
    assert len({*hashes}) == 4
    assert run_hash(run) == hashes[2]


def test_in_a_bench(write: Write) -> None:
    path = write("methods.py", CODE)
    write("base.yaml", {"objective": ["clip_higher", "methods.py:Halve"]})
    methods = {"own": {}, "two": ["methods.py:Halve"]}
    file = write("bench.yaml", {"name": "b", "base": "base.yaml", "methods": methods, "seeds": 1})
    bench = load_bench(file)
    objectives = [[item["name"] for item in run.config.objective] for run in bench.runs]
    assert objectives == [["clip_higher", f"{path}:Halve"], [f"{path}:Halve"]]
    assert [run.hash for run in load_bench(bench.resolved).runs] == [run.hash for run in bench.runs]


def test_a_report_runs_no_code_of_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(small(tmp_path / "run", optimisation__rollouts=1))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')\n")
    config = tmp_path / "run" / "config.yaml"
    data = yaml.safe_load(config.read_text())
    data |= {"objective": [{"name": f"{tmp_path}/own.py:Halve"}], "task": {"name": f"{tmp_path}/own.py:Halve"}}
    config.write_text(yaml.safe_dump(data))
    monkeypatch.chdir(tmp_path)
    (run,) = load_runs(tmp_path / "run").runs
    assert objective_names(run.config) == ["own.py:Halve"]
    assert main(["runs", str(tmp_path / "run")]) == 0


def test_what_cannot_be_used_is_named_with_the_reason(write: Write, tmp_path: Path) -> None:
    for content, item, named in [
        (CODE, "Halv", "'Halve'"),
        ("", "Halve", "has no class 'Halve'"),
        (CODE, "CONSTANT", "an int"),
        (CODE, "Doubling", "TokenObjective"),
        (CODE, "Unfinished", "terms"),
        (CODE, "Taken", "'s2t'"),
        ("1 / 0", "X", "ZeroDivisionError: division by zero (methods.py, line 1)"),
        ("import sys\nsys.exit(3)", "X", "SystemExit: 3 (methods.py, line 2)"),
        ("def f(:\n  pass", "X", "SyntaxError: invalid syntax (methods.py, line 1)"),
        ("import nothing_such", "X", "'nothing_such' (methods.py, line 1)"),
        ("import rlstab\nclass X(rlstab.TokenObjective):\n    def terms(self, batch, stat, state): ...", "X", "name"),
    ]:
        path = write("methods.py", content)
        said = refusal(partial(load_run, run_of(write, objective=["clip_higher", {"name": f"methods.py:{item}"}])))
        assert said.startswith(f"{path.parent}/run.yaml:3: objective.1.name: ")
        assert named in said
        assert "\n" not in said
    write("methods.py", CODE)
    for parts, named in [
        ({"objective": {"name": "methods.py:Halve", "facto": 1}}, "'factor'"),
        ({"objective": {"name": "methods.py:Logged"}}, ": objective: 'reward' is the name of metrics"),
        (
            {"stages": ["none.py:X"]},
            f":4: stages.0.name: there is no file {tmp_path}/project/none.py or {tmp_path}",
        ),
        ({"task": {"name": "methods.py:Doubling", "least": 2}}, "Doubling(least=2) raised TypeError: "),
        ({"task": {"name": "methods.py:Nothing"}}, "has no class 'Nothing'"),
        ({"task": {"name": "own", "code": "nothing"}}, "task.code: "),
        ({"task": {"name": "methods.py:Plain"}}, "`keeps_special_tokens`"),
    ]:
        file = run_of(write, **parts)
        assert named in refusal(lambda: build_task(load_run(file).task))  # noqa: B023  # called at once


def test_an_installed_task(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("package.py", CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    # a task that ships keeps its name
    points = EntryPoints([EntryPoint(name, "package:Doubling", "rlstab.tasks") for name in ("doubling", "countdown")])
    for room in ("config.settings", "tasks.build"):
        monkeypatch.setattr(f"rlstab.{room}.entry_points", points.select)
    run = load_run(run_of(write, task={"name": "doubling", "most": 3}))
    assert run.task.model_dump() == {"name": "own", "code": "doubling", "options": {"most": 3}}
    assert build_task(run.task).size["train"] == 3
    assert load_run(run_of(write, task={"name": "countdown"})).task.name == "countdown"


MINE = """
import torch, rlstab, numpy
from rlstab.stages.stage import RewardShaper

class Mine(rlstab.TokenObjective):
    'Changes nothing.'

    name, writes = "mine", {"weight"}

    def terms(self, batch, stat, state):
        return rlstab.Terms(weight=torch.ones_like(batch.old_logprobs))

class Shaper(RewardShaper):
    'Changes nothing.'

    name = "shaper"

    def shape(self, responses, stat, state):
        return torch.zeros_like(responses.rewards)
"""


@pytest.mark.parametrize("kind", ["Mine", "Shaper"])
def test_a_class_that_raises_or_keeps_what_no_checkpoint_holds_is_named(kind: str, write: Write) -> None:
    def states(first: str, after: str = "state") -> str:
        return f"def init_state(self): return {first}\n    def advance(self, state, stat): return {after}"

    for body, named in [
        ("def __post_init__(self): raise ValueError('boom')", "__init__ raised ValueError: boom (methods.py, line "),
        ("@property\n    def needs(self): return {}['boom']", "needs raised KeyError: 'boom' (methods.py, line "),
        ("@property\n    def excludes(self): raise SystemExit('bye')", "excludes raised SystemExit: bye"),
        ("def init_state(self): return 1 / 0", "init_state raised ZeroDivisionError"),
        (states("[1.0]"), "init_state returned a list"),
        (states("{'seen': 10**5000}"), "init_state returned a state whose 'seen' is an int"),
        (states("{'seen': object()}"), "init_state returned a state whose 'seen' is an object"),
        (states("{'seen': numpy.float32(1)}"), "'seen' is a float32"),
        (states("{'seen': {1: 0.5}}"), "'seen' is a dict"),
        (states("{'seen': (1, 2)}"), "'seen' is a tuple"),
        (states("{'seen': 0}", "{'seen': {1, 2}}"), "advance returned a state whose 'seen' is a set"),
        (states("{'seen': torch.zeros(2), 'b': [True, None], 'c': {'d': float('nan')}, 'e': 2**70}"), None),
    ]:
        code = MINE + "\n" + f"class Bad({kind}):\n    'Bad.'\n    name = 'bad'\n    {body}\n"
        name = {"name": f"{write('methods.py', code)}:Bad"}
        data = {"objective": ["clip_higher", *([name] if kind == "Mine" else [])]}
        data |= {} if kind == "Mine" else {"stages": [name]}
        if named is None:
            load_run(data)
            continue
        with pytest.raises(ConfigError, match="'bad': ") as caught:
            load_run(data)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_folder_of_data_has_a_checksum_over_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a.parquet").write_bytes(b"one")
    run = {"task": {"name": "dataset", "path": str(folder)}}
    before = checksums(run)
    assert before.keys() == {"data"}
    (folder / ".cache").write_bytes(b"hidden")
    (folder / "cache-12.arrow").write_bytes(b"made by a reader")
    assert checksums(run) == before
    for change in (
        lambda: (folder / "train" / "a.parquet").write_bytes(b"two"),
        lambda: (folder / "b.parquet").write_bytes(b"one"),
        lambda: (folder / "b.parquet").rename(folder / "c.parquet"),
        lambda: (folder / "c.parquet").unlink(),
    ):
        known = checksums(run)
        change()
        assert list(changed_files(known, checksums(run))) == ["data has changed since the run was last started"]


@pytest.mark.parametrize("path", ["~0", "~nobody-of-this-name/x", "~\0"])
def test_the_home_of_an_unknown_user_is_a_path_like_any_other(path: str, write: Write) -> None:
    assert load_run(run_of(write, model={"name": path})).model.name == path
