"""Rewards of one's own: loaded, called and limited in processes of their own, and refused at the start where unfit."""

from __future__ import annotations

import hashlib
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.config.settings import RewardSettings
from rlstab.errors import ConfigError, UnknownName
from rlstab.tasks import Chain, Countdown, Example, rewards
from rlstab.tasks.own_task import require_task
from rlstab.tasks.rewards import Reward, Rewards, build_rewards
from rlstab.tasks.scores import Scores, score
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
    assert found.errors == ["ValueError: could not convert string to float: 'x' (completion 'x')"]
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
    start = time.monotonic()
    result = scored(found, *texts)
    assert time.monotonic() - start < 60
    brevity = [1 / (1 + len(one)) for one in texts]
    assert result.parts["acts"].tolist() == [0.0] * 9 + [0.25]
    assert result.rewards.tolist() == pytest.approx([*brevity[:9], 2.5 + brevity[9]], abs=1e-15)
    line = FILE.read_text().splitlines().index('            raise ValueError("odd [completion]")') + 1
    assert result.errors == [
        f"acts: ValueError: odd [completion] (reward_file.py, line {line}) (completion 'raise')",
        "acts: it returned None of type NoneType, expected a number (completion 'none')",
        "acts: it returned '1' of type str, expected a number (completion 'text')",
        "acts: it returned nan, expected a finite number (completion 'nan')",
        "acts: it returned -inf, expected a finite number (completion 'infinite')",
        "acts: SystemExit: bye (completion 'leave')",
        "acts: the process that scored it was ended by SIGKILL (completion 'die')",
    ]
    assert result.timed_out == [7, 8]


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


@pytest.mark.parametrize(("function", "value"), [("Manner.polite", 1.0), ("manner", 2.0), ("any_number", 3.0)])
def test_what_can_be_called(function, value):
    assert scored(build_rewards([of(function)], Asks()), "please").rewards.tolist() == [value]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("PATH/none.py:f", "PATH/none.py is no file. A relative path starts at the current folder: change `function`, "
         "or go to the folder that it is meant from."),
        ("brevty", "FILE has no function 'brevty'. Did you mean 'brevity'?"),
        ("Manner.rude", "FILE has no function 'Manner.rude'. Known: polite."),
        ("PI", "'PI' in FILE is of type float, which cannot be called. Name a function."),
        ("two", "'two' in FILE cannot be called with (prompt, completion, answer): too many positional arguments. Let "
         "it take these three."),
        ("four", "'four' in FILE cannot be called with (prompt, completion, answer): missing a required argument: "
         "'level'. Let it take these three."),
        ("PATH/broken.py:f", "PATH/broken.py cannot be loaded: SyntaxError: invalid syntax (broken.py, line 2). Mend "
         "it."),
        ("PATH/raises.py:f", "PATH/raises.py cannot be loaded: ZeroDivisionError: division by zero (raises.py, line "
         "3). Mend it."),
        ("PATH/empty.py:f", "PATH/empty.py has no function 'f'. Define it: def f(prompt, completion, answer)."),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_at_the_start(tmp_path, function, message):
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "raises.py").write_text("x = 0\n\ny = 1 / x\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError) as caught:
        build_rewards([of(function.replace("PATH", str(tmp_path)), name="mine")], Asks())
    assert str(caught.value) == f"reward 'mine': {message.replace('PATH', str(tmp_path)).replace('FILE', str(FILE))}"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "it returned None of type NoneType, expected a number. It has to return a number for every text, "
         "and a completion may be empty."),
        ("fails_on_nothing", "ZeroDivisionError: division by zero (reward_file.py, line LINE). It has to return a "
         "number for every text, and a completion may be empty."),
        ("slow", "it took longer than 0.5 s. Raise its `time_limit`, or make it faster."),
    ],
)  # fmt: skip
def test_what_returns_no_number_is_refused_at_the_start(function, message):
    line = FILE.read_text().splitlines().index("    return 1 / len(completion)") + 1
    with pytest.raises(ConfigError) as caught:
        build_rewards([of(function, time_limit=0.5)], Asks())
    trial = f"reward '{function}', tried with an empty completion of the first training prompt: "
    assert str(caught.value) == trial + message.replace("LINE", str(line))


class Local:
    def __reduce__(self):
        raise TypeError("it holds a lock")


def test_answers_that_do_not_pickle_are_refused_at_the_start():
    with pytest.raises(ConfigError) as caught:
        build_rewards([of("brevity")], Asks(answer=Local()))
    assert str(caught.value) == (
        "reward 'brevity': the answer of the task's first example cannot be sent to the process that scores: "
        "TypeError: it holds a lock. Make it plain data, such as texts, numbers, lists and dicts."
    )


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
    with pytest.raises(UnknownName) as caught:
        build_rewards([RewardSettings.model_validate("brif")], Asks())
    assert str(caught.value) == (
        "reward 'brif': no installed package has an entry point 'brif' in rlstab.rewards. Did you mean 'brief'? A "
        "function of your own is path/to/file.py:function."
    )


def test_in_words():
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()[:12]
    found = build_rewards([of("brevity"), of("task", weight=0.0)], Asks())
    assert found.in_words() == {"brevity": f"{FILE}:brevity (sha256 {digest}...)", "task": "task"}


def test_correctness_is_what_the_task_says():
    assert Rewards().correctness is None  # the sum is the task's own
    assert Rewards((Reward("a", 1.0, Workers(Acts(), 1, 1.0)), Reward("right", 0.5))).correctness == "right"
    assert Rewards((Reward("a", 1.0, Workers(Acts(), 1, 1.0)),)).correctness is None


# --- tasks of one's own ------------------------------------------------------------------------------------------


def test_a_task_of_ones_own():
    task = Asks()
    assert require_task(task) is task
    assert require_task(Countdown()).name == "countdown"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, "needs the attribute `name`, a short text for logs; it has None. Add it to the class."),
        (
            {"size": {"train": 3, "eval": 0}},
            "has size['eval'] = 0, expected an int of at least 1, or None. Set it.",
        ),
        ({"size": {"train": 3}}, "has size['eval'] = 0, expected an int of at least 1, or None. Set it."),
        ({"workers": 2}, "needs the attribute `workers`, None, or the Workers that score; it has an int. Add it to the "
         "class."),
        ({"score": None}, "has no method `score`. Add it to the class: def score(self, example, completion)."),
        (
            {"example": lambda self, split, index: "1+1="},
            "gave a str as example 0 of 'train', expected a rlstab.tasks.Example whose prompt is a text. Return "
            "Example(prompt, answer), or Example.chat(messages, answer).",
        ),
    ],
)  # fmt: skip
def test_what_is_no_task(changes, message):
    with pytest.raises(ConfigError) as caught:
        require_task(type("Mine", (Asks,), changes)())
    assert str(caught.value) == f"the task Mine {message}"


def test_an_object_that_is_nothing_like_a_task():
    with pytest.raises(ConfigError, match=r"^the task object needs the attribute `name`, .*; it has none\. Add it"):
        require_task(object())
