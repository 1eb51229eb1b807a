"""Runs that learn from rewards, tasks and chats of the user's own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlstab.cli import main
from rlstab.config import load_run
from rlstab.errors import CheckpointError, ConfigError, ModelError
from rlstab.tasks import Countdown, Example
from rlstab.models import SHIPPED
from tests.train.runs import go, largest_difference, quiet, small, train, without_times

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "rewards-and-tasks.md"
FILE = ROOT / "tests" / "tasks" / "reward_file.py"
EVALUATE = {"every": 2, "prompts": 4, "samples": 2, "pass_at": [2]}


def rewards(*parts: Any) -> list[Any]:
    """Rewards of the file of tests, by name and weight."""
    return [{"function": one if one == "task" else f"{FILE}:{one}", "weight": weight} for one, weight in parts]


def samples(out: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in (out / "samples.jsonl").read_text().splitlines()]


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    changes = {
        "tracking.out": str(tmp_path / "out"),
        "optimisation.rollouts": 2,
        "evaluation": {"every": 2, "prompts": 8, "samples": 2, "pass_at": [2]},
    }
    records = go(load_run("examples/own_reward.yaml", changes)).records
    for record in records:
        for stem in ("reward/", "eval/reward/"):
            if f"{stem}task" in record:
                mean = record["eval/mean" if stem.startswith("eval") else "reward/mean"]
                parts = {name: record[f"{stem}{name}"] for name in ("task", "closeness", "steps")}
                expected = parts["task"] + 0.2 * parts["closeness"] + 0.1 * parts["steps"]
                assert mean == pytest.approx(expected, abs=1e-12)
                assert parts["task"] <= parts["closeness"] <= 1
    assert sum("reward/closeness" in one for one in records) == 2
    assert sum("eval/reward/closeness" in one for one in records) == 2
    for one in samples(tmp_path / "out"):
        parts = one["reward/task"] + 0.2 * one["reward/closeness"] + 0.1 * one["reward/steps"]
        assert one["reward"] == pytest.approx(parts, abs=1e-12)
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["rewards"]["task"] == "task"
    assert "own_reward.py:closeness (sha256 " in about["rewards"]["closeness"]


def test_weights_decide_what_is_learnt(tmp_path: Path) -> None:
    """The task with the whole weight is a run without rewards; other weights are another run."""
    go(small(tmp_path / "alone"))
    go(small(tmp_path / "measured", reward=rewards(("task", 1.0), ("brevity", 0.0))))
    go(small(tmp_path / "other", reward=rewards(("task", 1.0), ("brevity", 0.3))))
    assert largest_difference(tmp_path / "alone", tmp_path / "measured") == 0
    assert largest_difference(tmp_path / "alone", tmp_path / "other") > 1e-6
    measured = samples(tmp_path / "measured")
    assert measured
    assert all(one["reward"] == one["reward/task"] for one in measured)
    assert all(one["reward/brevity"] == 1 / (1 + len(one["text"])) for one in measured)


def test_correct_is_what_the_task_says(tmp_path: Path) -> None:
    """pass@k is that of the task, though no weighted sum reaches 1."""
    alone = go(small(tmp_path / "alone", optimisation__rollouts=2, evaluation=EVALUATE)).records
    shaped = small(
        tmp_path / "shaped",
        optimisation__rollouts=2,
        evaluation=EVALUATE,
        reward=rewards(("brevity", 0.001), ("task", 0.5)),
    )
    assert go(shaped).records[0]["eval/pass@2"] == alone[0]["eval/pass@2"]


def test_a_continued_run_is_one_that_never_stopped(tmp_path: Path) -> None:
    own = {"reward": rewards(("brevity", 1.0), ("task", 0.5)), "evaluation": EVALUATE, "tracking__checkpoint_every": 1}
    go(small(tmp_path / "whole", optimisation__rollouts=3, **own))
    go(small(tmp_path / "parts", optimisation__rollouts=1, **own))
    go(small(tmp_path / "parts", optimisation__rollouts=3, **own), resume=True)
    assert largest_difference(tmp_path / "whole", tmp_path / "parts") == 0
    other = small(tmp_path / "parts", optimisation__rollouts=4, **{**own, "reward": rewards(("brevity", 1.0))})
    with pytest.raises(CheckpointError, match="was started with reward"):
        go(other, resume=True)


def test_a_reward_that_cannot_be_used_ends_the_run_at_its_start(tmp_path: Path) -> None:
    run = small(tmp_path / "out", reward=rewards(("brevty", 1.0)))
    with pytest.raises(ConfigError, match=r"has no function 'brevty'\. Did you mean 'brevity'\?$"):
        go(run)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_check_and_bench_look_for_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"objective": "token_mean", "reward": f"{FILE}:brevity"}
    for name, data in (("run", run), ("bench", {"name": "b", "base": run, "methods": {"one": {}}})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(data))
        (tmp_path / f"none-{name}.yaml").write_text(yaml.safe_dump(data).replace("reward_file.py", "none.py"))
    for command in (["check", "run.yaml"], ["bench", "--dry-run", "bench.yaml"]):
        *before, file = command
        assert main([*before, str(tmp_path / file)]) == 0
        assert main([*before, str(tmp_path / f"none-{file}")]) != 0
        assert "none.py is no file. A relative path starts at the current folder" in "".join(capsys.readouterr())


class Ones(Countdown):
    """Countdown of which every completion is right."""

    def score(self, example: Example, completion: str) -> float:
        return 1.0


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    run = small(tmp_path / "out", optimisation__rollouts=2, evaluation=EVALUATE)
    records = train(run, console=quiet(), task=Ones()).records
    assert all(one["eval/mean"] == 1.0 for one in records if "eval/mean" in one)
    assert all(one["reward/mean"] == 1.0 for one in records if "reward/mean" in one)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["providers"]["task"] == "Ones"
    again = small(tmp_path / "out", optimisation__rollouts=3, evaluation=EVALUATE)
    with pytest.raises(CheckpointError, match=r"was started with the providers .*'task': 'Ones'"):
        go(again, resume=True)
    with pytest.raises(ConfigError, match=r"^the task object needs the attribute `name`"):
        train(small(tmp_path / "none"), console=quiet(), task=object())  # type: ignore[arg-type]


TEMPLATE = (
    "{% for one in messages %}{{ {'system': '*', 'user': ''}[one['role']] }}{{ one['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def test_chats_of_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{one} 7 8>29"}], "answer": str(one)} for one in range(1, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    shutil.copytree(SHIPPED["countdown-tiny"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    changes = {
        "task": {"name": "jsonl", "path": str(tmp_path / "rows.jsonl"), "eval_size": 2, "system": "1"},
        "model__name": str(tmp_path / "model"),
        "rollout__chat": True,
        "tracking__trace_every": 1,
        "evaluation": EVALUATE,
        "reward": rewards(("brevity", 1.0)),
    }
    go(small(tmp_path / "out", **changes))
    prompts = {one["prompt"] for one in samples(tmp_path / "out")}
    assert prompts
    assert all(re.fullmatch(r"system: 1\nuser: [1-7] 7 8>29", one) for one in prompts)
    traced = [json.loads(one)["prompt"] for one in (tmp_path / "out" / "tokens.jsonl").read_text().splitlines()]
    assert traced
    assert set(traced) <= {f"system: 1\nuser: {one} 7 8>29" for one in range(1, 8)}
    with pytest.raises(ModelError, match="has no chat template"):
        go(small(tmp_path / "plain", **{**changes, "model__name": "countdown-tiny"}))
    with pytest.raises(ConfigError, match=r"task\.system: a system message needs a chat template"):
        small(tmp_path / "none", **{**changes, "rollout__chat": False})
    without = {**changes["task"], "system": None}
    with pytest.raises(ConfigError, match="are lists of messages"):
        go(small(tmp_path / "none", **{**changes, "rollout__chat": False, "task": without}))


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    function, *rest = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "rewards.py").write_text(function)
    (tmp_path / "tasks.py").write_text(rest[0])
    for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL):
        fast = {
            "rollout": {"prompts": 2, "group": 2, "max_new_tokens": 8},
            "optimisation": {"rollouts": 1},
            "evaluation": {"every": 0},
            "tracking": {"checkpoint_every": 0},
        }
        run = load_run({**yaml.safe_load(block), **fast})
        (record,) = go(run, overwrite=True).records
        assert run.reward is None or 0 < record["reward/brevity"] <= 1
        assert (run.task.name in ("own", "chain")) == (run.reward is None)
        assert ("reward/true" in record) == ("flaky" in block)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in rest:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    assert len(without_times(tmp_path / "runs" / "doubling")) == 2
