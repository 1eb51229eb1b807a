"""Rewards of one's own: loaded, called and limited in processes of their own, and refused at the start where unfit."""

from __future__ import annotations

import hashlib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.config.settings import RewardSettings
from rlstab.errors import ConfigError, UnknownName
from rlstab.tasks import Chain, Countdown, Example, rewards
from rlstab.tasks.build import require_task
from rlstab.tasks.rewards import Reward, Rewards, Scores, build_rewards, score
from rlstab.tasks.scoring import Workers
from tests.tasks.acts import Acts

FILE = Path(__file__).parent / "reward_file.py"


class Asks:
    """Prompts `0?`, `1?`, ... whose answers are their numbers; a completion scores what it says."""

    name = "asks"
    keeps_special_tokens = False
    workers: Any = None
    size = {"train": None, "eval": 3}

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def example(self, split: str, index: int) -> Example:
        return Example(f"{index}?", index if self.answer is None else self.answer)

    def score(self, example: Example, completion: str) -> float:
        return float(completion)


def of(function: str, **settings: Any) -> RewardSettings:
    """Of the file with the rewards, unless another is named."""
    named = function if function == "task" or ":" in function or "/" in function else f"{FILE}:{function}"
    return RewardSettings.model_validate({"function": named, **settings})


def scored(found: Rewards, *texts: str, task: Any = None) -> Scores:
    task = task or Asks()
    return score(task, [task.example("train", place) for place in range(len(texts))], texts, rewards=found)


@pytest.fixture(scope="module")
def acts():
    return build_rewards([of("acts", time_limit=1.0)], Asks())


def test_the_task_alone_is_as_it_was():
    found = scored(Rewards(), "0.5", "x", "2")
    assert found.rewards.tolist() == [0.5, 0.0, 2.0]
    assert len(found.errors) == 1
    assert "(completion 'x')" in found.errors[0]
    assert found.parts == {}
    assert build_rewards(None, Asks()) == build_rewards([of("task")], Asks()) == Rewards()
    assert Rewards().in_words() == {}


def test_a_weighted_sum():
    found = build_rewards([of("brevity", weight=-0.5), of("task", weight=2.0), of("acts", weight=0.0)], Asks())
    assert found.names == ("brevity", "task", "acts")
    texts = ["1", "22", "333"]
    result = scored(found, *texts)
    assert result.parts["brevity"].tolist() == [1 / 2, 1 / 3, 1 / 4]
    assert result.parts["task"].tolist() == [1.0, 22.0, 333.0]
    assert result.parts["acts"].tolist() == [0.25] * 3
    expected = [-0.5 / (1 + len(one)) + 2 * float(one) for one in texts]
    assert result.rewards.tolist() == pytest.approx(expected, abs=1e-15)
    assert result.rewards.dtype == torch.float64
    assert result.errors == result.timed_out == []


def test_prompt_completion_and_answer_arrive():
    found = build_rewards([of("seen")], Asks())
    assert scored(found, "yes \U0001d7d9", "yes \U0001d7d9", "no").rewards.tolist() == [1.0, 1.0, 0.0]


def test_answers_of_the_shipped_tasks_arrive():
    for task in (Chain(), Countdown()):
        assert scored(build_rewards([of("brevity")], task), "a", task=task).rewards.tolist() == [0.5]


def test_numbers_in_any_range(acts):
    found = scored(acts, "whole", "truth", "negative", "else", "torch")
    assert found.rewards.tolist() == [3.0, 1.0, -12.5, 0.25, 0.0]
    assert found.errors == []


def test_what_goes_wrong_costs_the_sample_this_reward_alone():
    found = build_rewards([of("acts", time_limit=1.0, weight=10.0), of("brevity")], Asks())
    texts = ["raise", "none", "text", "nan", "infinite", "leave", "die", "hang", "power", "else"]
    result = scored(found, *texts)
    brevity = [1 / (1 + len(one)) for one in texts]
    assert result.parts["acts"].tolist() == [0.0] * 9 + [0.25]
    assert result.rewards.tolist() == pytest.approx([*brevity[:9], 2.5 + brevity[9]], abs=1e-15)
    assert [text.partition(":")[0] for text in result.errors] == ["acts"] * 7
    assert all(f"(completion '{name}')" in text for name, text in zip(texts, result.errors, strict=False))
    assert "reward_file.py, line " in result.errors[0]
    assert result.timed_out == [7, 8]


def test_a_task_may_return_what_a_reward_may():
    class Odd(Asks):
        def score(self, example, completion):
            return {"nan": float("nan"), "none": None, "tensor": torch.tensor(0.5), "true": True}.get(completion, 1)

    found = scored(Rewards(), "nan", "tensor", "none", "true", "else", task=Odd())
    assert found.rewards.tolist() == [0.0, 0.5, 0.0, 1.0, 1.0]
    assert ["'nan'" in found.errors[0], "'none'" in found.errors[1], len(found.errors)] == [True, True, 2]


def test_a_task_that_scores_in_workers_keeps_them():
    class Slow(Asks):
        workers = Workers(Acts(), 1, 0.5)

    found = build_rewards([of("task"), of("brevity")], Slow())
    result = scored(found, "say 3", "sleep", task=Slow())
    assert result.parts["task"].tolist() == [3.0, 0.0]
    assert result.timed_out == [1]
    assert result.rewards.tolist() == [3 + 1 / 6, 1 / 6]


def test_an_answer_that_cannot_be_sent_later_is_an_error_of_its_sample():
    class Mixed(Asks):
        def example(self, split, index):
            return Example(f"{index}?", (lambda: 0) if index == 1 else index)

    found = build_rewards([of("seen")], Mixed())
    result = scored(found, "", "", "", task=Mixed())
    assert result.rewards.tolist() == [1.0, 0.0, 1.0]
    assert len(result.errors) == 1
    assert result.errors[0].startswith("seen: ")
    assert "lambda" in result.errors[0]


def test_nobody_waits_once_stop_is_set():
    class Set:
        def is_set(self) -> bool:
            return True

    found = build_rewards([of("task"), of("brevity")], Asks())
    examples = [Asks().example("train", 0)] * 3
    result = score(Asks(), examples, ["1"] * 3, rewards=found, stop=Set())  # type: ignore[arg-type]
    assert result.rewards.shape == (0,)


def test_lists_in_a_row():
    found = build_rewards([of("brevity"), of("acts", time_limit=0.5)], Asks())
    one, two = scored(found, "ab", "hang"), scored(found, "raise", "hang", "c")
    whole = Scores.joined([one, two], found.names)
    assert whole.rewards.tolist() == [*one.rewards.tolist(), *two.rewards.tolist()]
    assert whole.parts["brevity"].tolist() == [1 / 3, 1 / 5, 1 / 6, 1 / 5, 1 / 2]
    assert whole.timed_out == [1, 3]
    assert len(whole.errors) == 1
    empty = Scores.joined([], found.names)  # a rank without responses has the same names
    assert {name: values.tolist() for name, values in empty.parts.items()} == {"brevity": [], "acts": []}


def test_what_can_be_called():
    for function, value in {"Manner.polite": 1.0, "manner": 2.0, "any_number": 3.0}.items():
        assert scored(build_rewards([of(function)], Asks()), "please").rewards.tolist() == [value]


def test_what_cannot_be_called_or_returns_no_number_is_refused_at_the_start(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "raises.py").write_text("x = 0\n\ny = 1 / x\n")
    (tmp_path / "empty.py").write_text("")
    for function, named in {
        "PATH/none.py:f": "none.py",
        "brevty": "'brevity'",
        "Manner.rude": "'Manner.rude'",
        "PI": "float",
        "two": "(prompt, completion, answer)",
        "four": "'level'",
        "PATH/broken.py:f": "(broken.py, line 2)",
        "PATH/raises.py:f": "(raises.py, line 3)",
        "PATH/empty.py:f": "def f(prompt, completion, answer)",
        "nothing": "it returned None",
        "fails_on_nothing": "ZeroDivisionError",
        "slow": "`time_limit`",
    }.items():
        with pytest.raises(ConfigError) as caught:
            build_rewards([of(function.replace("PATH", str(tmp_path)), name="mine", time_limit=1.0)], Asks())
        assert str(caught.value).startswith("reward 'mine'")
        assert named in str(caught.value)


class Local:
    def __reduce__(self):
        raise TypeError("it holds a lock")


def test_answers_that_do_not_pickle_are_refused_at_the_start():
    with pytest.raises(ConfigError, match="it holds a lock"):
        build_rewards([of("brevity")], Asks(answer=Local()))


def test_a_file_may_import_what_lies_beside_it_and_hides_nothing(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "json.py").write_text("raise SystemError('the wrong one')\n")
    (tmp_path / "random.py").write_text(
        "import json, beside\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Seven:\n    one: 'int' = 7\n\n\n"
        "def f(prompt, completion, answer):\n    return beside.VALUE + json.loads('1') - Seven().one\n"
    )
    assert scored(build_rewards([of(f"{tmp_path}/random.py:f")], Asks()), "").rewards.tolist() == [1.0]


def test_a_relative_path_starts_at_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def f(prompt, completion, answer):\n    return 2\n")
    monkeypatch.chdir(tmp_path)
    found = build_rewards([of("mine.py:f")], Asks())
    monkeypatch.chdir("/")
    assert scored(found, "").rewards.tolist() == [2.0]


def test_entry_points(monkeypatch):
    known = [EntryPoint("brief", "tests.tasks.reward_file:brevity", rewards.GROUP)]
    monkeypatch.setattr(rewards, "entry_points", lambda group: known if group == "rlstab.rewards" else [])
    found = build_rewards([RewardSettings.model_validate("brief")], Asks())
    assert found.names == ("brief",)
    assert scored(found, "a").rewards.tolist() == [0.5]
    assert found.in_words() == {"brief": "tests.tasks.reward_file:brevity"}
    with pytest.raises(UnknownName, match="'brief'"):
        build_rewards([RewardSettings.model_validate("brif")], Asks())


def test_in_words():
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()[:12]
    found = build_rewards([of("brevity"), of("task", weight=0.0)], Asks())
    assert found.in_words() == {"brevity": f"{FILE}:brevity (sha256 {digest}...)", "task": "task"}


def test_correctness_is_what_the_task_says():
    assert Rewards().correctness is None  # the sum is the task's own
    assert Rewards((Reward("a", 1.0, Workers(Acts(), 1, 1.0)), Reward("right", 0.5))).correctness == "right"
    assert Rewards((Reward("a", 1.0, Workers(Acts(), 1, 1.0)),)).correctness is None


# --- user-defined tasks ---------------------------------------------------------------------------------------------


def test_a_user_defined_task():
    task = Asks()
    assert require_task(task) is task
    assert require_task(Countdown()).name == "countdown"


def test_what_is_not_a_task_is_named_with_what_it_lacks():
    for changes, named in [
        ({"name": None}, "`name`"),
        ({"size": {"train": 3, "eval": 0}}, "size['eval'] = 0"),
        ({"size": {"train": 3}}, "size['eval'] = 0"),
        ({"workers": 2}, "`workers`"),
        ({"score": None}, "`score`"),
        ({"flaky": 1}, "flaky"),
        ({"example": lambda self, split, index: "1+1="}, "rlstab.tasks.Example"),
        ({"example": lambda self, split, index: 1 / 0}, "ZeroDivisionError"),
    ]:
        with pytest.raises(ConfigError) as caught:
            require_task(type("Mine", (Asks,), changes)())
        assert str(caught.value).startswith("the task Mine ")
        assert named in str(caught.value)
    with pytest.raises(ConfigError, match="`name`"):
        require_task(object())
