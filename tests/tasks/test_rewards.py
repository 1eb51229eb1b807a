"""User-defined rewards and tasks: loaded, called and limited in separate processes, refused early where unfit."""

import hashlib
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from rlstab.config.settings import RewardSettings
from rlstab.errors import ConfigError, UnknownName
from rlstab.tasks import Chain, Example
from rlstab.tasks.build import require_task
from rlstab.tasks.rewards import GROUP, Rewards, Scores, build_rewards, score
from rlstab.tasks.workers import Workers
from tests.tasks.acts import Acts

FILE = Path(__file__).parent / "acts.py"


class Asks:
    """Prompts `0?`, `1?`, ... whose answers are their numbers; a completion scores what it says."""

    name = "asks"
    keeps_special_tokens = False
    workers: Any = None
    size = {"train": None, "eval": 3}

    def example(self, split: str, index: int) -> Example:
        return Example(f"{index}?", index)

    def score(self, example: Example, completion: str) -> Any:
        return float(completion)


def build(*functions: str | dict[str, Any], task: Any = None) -> Rewards:
    """Of the file with the rewards, unless another is named."""
    settings = []
    for given in functions:
        reward = {"function": given} if isinstance(given, str) else given
        own = reward["function"] == "task" or ":" in reward["function"]
        named = reward["function"] if own else f"{FILE}:{reward['function']}"
        settings.append(RewardSettings.model_validate({**reward, "function": named}))
    return build_rewards(settings, task or Asks())


def scored(rewards: Rewards, *texts: str, task: Any = None) -> Scores:
    task = task or Asks()
    return score(task, [task.example("train", place) for place in range(len(texts))], texts, rewards=rewards)


def test_the_task_alone_may_return_what_a_reward_may():
    class Odd(Asks):
        def score(self, example, completion):
            return eval(completion)

    scores = scored(Rewards(), "2", "x", "1e999", "torch.tensor(0.5)", "None", "True", "0 * 1e999", task=Odd())
    assert scores.rewards.tolist() == [2.0, 0.0, 0.0, 0.5, 0.0, 1.0, 0.0]
    assert scores.parts["task"].tolist() == scores.rewards.tolist()
    assert "(completion 'x')" in scores.errors[0]
    assert [error.split()[2] for error in scores.errors[1:]] == ["inf,", "None", "nan,"]
    assert build_rewards(None, Asks()) == build("task") == Rewards()
    assert (Rewards().in_words(), Rewards().correctness) == ({}, None)


def test_a_weighted_sum_of_what_each_reward_says():
    rewards = build({"function": "brevity", "weight": -0.5}, {"function": "task", "weight": 2.0}, "seen")
    scores = scored(rewards, "1", "22", "\U0001d7d9")
    assert (rewards.names, rewards.correctness) == (("brevity", "task", "seen"), "task")
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "brevity": [1 / 2, 1 / 3, 1 / 2],
        "task": [1.0, 22.0, 1.0],
        "seen": [0.0, 0.0, 1.0],  # that prompt, completion and answer arrive
    }
    assert scores.rewards.tolist() == pytest.approx([1.75, 44 - 1 / 6, 2.75], abs=1e-15)
    assert scores.rewards.dtype == torch.float64
    task = Chain()  # whose answers are objects
    for function, text, value in [("brevity", "a", 0.5), ("Manner.polite", "please", 1.0), ("any_number", "", 3.0)]:
        assert scored(build(function, task=task), text, task=task).rewards.tolist() == [value]


def test_what_goes_wrong_costs_the_sample_this_reward_alone():
    rewards = build({"function": "acts", "time_limit": 2.0, "weight": 10.0}, "brevity")
    wrong = ["complain odd", "python None", "python [1]", "say nan", "sleep"]
    right = {"python 3": 3.0, "python True": 1.0, "say -12.5": -12.5}
    scores = scored(rewards, *wrong, *right)
    assert scores.parts["acts"].tolist() == [0.0] * 5 + [*right.values()]
    brevity = [1 / (1 + len(text)) for text in [*wrong, *right]]
    sums = [10 * acts + short for acts, short in zip(scores.parts["acts"].tolist(), brevity, strict=True)]
    assert scores.rewards.tolist() == pytest.approx(sums, abs=1e-14)
    for name, text in zip(wrong[:4], scores.errors, strict=True):
        assert text.startswith("acts: ")
        assert f"(completion '{name}')" in text
    assert "acts.py, line " in scores.errors[0]
    assert scores.timed_out.tolist() == [False] * 4 + [True] + [False] * 3
    other = scored(rewards, "python None", "say 1")
    joined = Scores.joined([scores, other], rewards)
    for mine, first, second in [
        (joined.rewards, scores.rewards, other.rewards),
        (joined.timed_out, scores.timed_out, other.timed_out),
        *((joined.parts[name], scores.parts[name], other.parts[name]) for name in rewards.names),
    ]:
        assert mine.tolist() == first.tolist() + second.tolist()
    assert joined.errors == scores.errors + other.errors
    empty = Scores.joined([], rewards)  # a rank without responses has the same names
    assert {name: part.tolist() for name, part in empty.parts.items()} == {"acts": [], "brevity": []}


def test_a_task_that_scores_in_workers_keeps_them():
    class Slow(Asks):
        workers = Workers(Acts(), 1, 1.0)

    scores = scored(build("task", "brevity", task=Slow()), "say 3", "sleep", task=Slow())
    assert scores.timed_out.tolist() == [False, True]
    assert scores.rewards.tolist() == [3 + 1 / 6, 1 / 6]


class Unreadable:
    """Can be sent and not be read."""

    def __reduce__(self) -> Any:
        return (int, ("one",))


def test_an_answer_that_does_not_arrive_is_an_error_of_its_sample_or_of_the_start():
    class Mixed(Asks):
        answers: Any = [0, lambda: 0, 2, Unreadable()]

        def example(self, split, index):
            return Example(f"{index}?", self.answers[index])

    scores = scored(build("seen", task=Mixed()), "", "", "", "", task=Mixed())
    assert scores.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert ["lambda" in scores.errors[0], "ValueError" in scores.errors[1], len(scores.errors)] == [True, True, 2]
    Mixed.answers = [lambda: 0]
    with pytest.raises(ConfigError, match=r"reward 'seen': the answer cannot be sent .*lambda"):
        build("seen", task=Mixed())


def test_nobody_waits_once_stop_is_set():
    stop = threading.Event()
    stop.set()
    for rewards in (Rewards(), build("brevity"), build("task", "brevity")):
        examples = [Asks().example("train", 0)] * 3
        assert score(Asks(), examples, ["1"] * 3, rewards=rewards, stop=stop).rewards.shape == (0,)


def test_what_cannot_be_called_or_returns_no_number_is_refused_at_the_start(tmp_path):
    file = tmp_path / "mine.py"
    for code, function, named in [
        (None, "f", "mine.py"),
        ("", "f", "def f(prompt, completion, answer)"),
        ("def brevity(*_): pass", "brevty", "'brevity'"),
        ("x = 1\ndef f(:\n", "f", "(mine.py, line 2)"),
        ("x = 0\n\ny = 1 / x\n", "f", "(mine.py, line 3)"),
        ("f = 3.14", "f", "3.14"),
        ("def f(prompt, completion): pass", "f", "(prompt, completion, answer)"),
        ("def f(*_): pass", "f", "it returned None"),
        ("def f(prompt, completion, answer): return 1 / len(completion)", "f", "ZeroDivisionError"),
        ("import time\ndef f(*_): time.sleep(99)", "f", "`time_limit`"),
    ]:
        if code is not None:
            file.write_text(code)
        with pytest.raises(ConfigError, match=r"^reward 'mine'") as caught:
            build({"function": f"{file}:{function}", "name": "mine", "time_limit": 1.0})
        assert named in str(caught.value)


def test_limits_of_a_scorer_are_named_and_can_be_raised(tmp_path, monkeypatch):
    file, allocate = tmp_path / "mine.py", "def f(*_): return len(bytes(700 * 2**20)) / 2**20"
    monkeypatch.setenv("JUDGE_KEY", "12345")
    monkeypatch.setenv("OTHER_KEY", "1")
    read = "import os\ndef f(*_): return len(os.environ['JUDGE_KEY'])"
    for code, settings, result in [
        (read, {}, "`environment`"),
        (read, {"environment": ["OTHER_KEY", "JUDGE_KEY"]}, 5.0),
        (read, {"environment": ["NOT_SET"]}, "NOT_SET is not set"),
        ("import os\nKEY = os.environ['JUDGE_KEY']\ndef f(*_): return 1", {}, "`environment`"),
        ("def f(*_): raise OSError('set JUDGE_KEY first')", {}, "does not inherit JUDGE_KEY"),
        ("def f(*_): raise KeyError('NOWHERE')", {}, "does not inherit NOWHERE"),
        ("def f(*_): raise KeyError('lower')", {}, "also an empty one"),
        (allocate, {"memory": 0.5}, "0.5 GiB"),
        (allocate, {"memory": 3.0}, 700.0),
        ("import tempfile\ndef f(*_): return len(tempfile.gettempdir()) * 0", {}, "cannot write files"),
    ]:
        file.write_text(code)
        reward = {"function": f"{file}:f", "time_limit": 30.0, **settings}
        if isinstance(result, float):
            assert scored(build(reward), "").rewards.tolist() == [result]
            continue
        with pytest.raises(ConfigError, match=r"^reward 'f'") as caught:
            build(reward)
        assert result in str(caught.value)
    file.write_text(read)
    of_task = build_rewards([RewardSettings.model_validate(f"{file}:f")], Asks(), ["JUDGE_KEY"])
    assert scored(of_task, "").rewards.tolist() == [5.0]


def test_a_file_is_found_from_where_the_run_began_and_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "json.py").write_text("raise SystemError('the wrong one')\n")
    (tmp_path / "random.py").write_text(
        "import json, beside\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Six:\n    six: 'int' = 6\n\n\n"
        "def f(prompt, completion, answer):\n    return beside.VALUE + json.loads('1') - Six().six\n"
    )
    monkeypatch.chdir(tmp_path)
    rewards = build("random.py:f")
    monkeypatch.chdir("/")
    assert scored(rewards, "").rewards.tolist() == [2.0]


def test_entry_points_and_files_say_what_they_are(monkeypatch):
    known = [EntryPoint("brief", "tests.tasks.acts:brevity", GROUP)]
    monkeypatch.setattr("rlstab.tasks.build.entry_points", lambda group: known if group == "rlstab.rewards" else [])
    rewards = build_rewards([RewardSettings.model_validate("brief")], Asks())
    assert rewards.correctness is None
    assert rewards.in_words() == {"brief": "tests.tasks.acts:brevity"}
    assert scored(rewards, "a").rewards.tolist() == [0.5]
    with pytest.raises(UnknownName, match="'brief'"):
        build_rewards([RewardSettings.model_validate("brif")], Asks())
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()[:12]
    files = build("brevity", {"function": "task", "weight": 0.0})
    assert files.in_words() == {"brevity": f"{FILE}:brevity (sha256 {digest}...)", "task": "task"}


def test_what_is_not_a_task_is_named_with_what_it_lacks():
    for changes, named in [
        ({"name": None}, "`name`"),
        ({"size": {"train": 3, "eval": 0}}, "size['eval'] = 0"),
        ({"workers": 2}, "`workers`"),
        ({"score": None}, "`score`"),
        ({"flaky": 1}, "flaky"),
        ({"example": lambda self, split, index: "1+1="}, "rlstab.tasks.Example"),
        ({"example": lambda self, split, index: 1 / 0}, "ZeroDivisionError"),
    ]:
        with pytest.raises(ConfigError, match=r"^the task Mine") as caught:
            require_task(type("Mine", (Asks,), changes)())
        assert named in str(caught.value)
