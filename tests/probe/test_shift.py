"""The task of the probes: what scores, and what its settings break in training alone."""

import random

import pytest

from examples.demonstrations import demonstration
from rlstab.errors import OutOfRange
from rlstab.probe.suite.shift import Shift
from rlstab.tasks import Example
from rlstab.tasks.task import Split


def shown(task: Shift, answer: str) -> float:
    return task.score(Example("352791=", task.example("train", 0).answer.__class__((8, 5, 0, 2, 4))), answer)


def test_a_digit_or_its_letter_is_right_and_the_end_belongs_to_it() -> None:
    task = Shift()
    scores = {text: shown(task, text) for text in ("85024$", "ifa24$", "85024$x", "85024", "85025$", "8502$", "", "$")}
    assert [text for text, score in scores.items() if score] == ["85024$", "ifa24$", "85024$x"]
    example = task.example("eval", 3)
    key, digits = int(example.prompt[0]), map(int, example.prompt[1:-1])
    assert example.answer.digits == tuple((key + digit) % 10 for digit in digits)
    prompts = {split: {task.example(split, k).prompt for k in range(200)} for split in ("train", "eval")}
    assert not prompts["train"] & prompts["eval"]


def test_what_is_broken_is_broken_in_training_alone() -> None:
    sparse, switch = Shift(solvable=0.25), Shift(switch=100)

    def score(task: Shift, split: Split, index: int, wrong: float = 0.0, letters: float = 0.0) -> float:
        example = task.example(split, index)
        return task.score(example, demonstration(task, example, random.Random(index), wrong=wrong, letters=letters))

    splits: tuple[Split, ...] = ("train", "eval")
    shares = {split: sum(score(sparse, split, k) for k in range(400)) / 400 for split in splits}
    assert shares["train"] == pytest.approx(0.25, abs=0.05)
    assert shares["eval"] == 1
    first = {letters: [score(switch, "train", k, letters=letters) for k in (0, 99, 100)] for letters in (0.0, 1.0)}
    assert first == {0.0: [1, 1, 0], 1.0: [0, 0, 1]}
    assert [score(switch, "eval", 0, letters=letters) for letters in (0.0, 1.0)] == [0, 1]
    with pytest.raises(OutOfRange, match="solvable"):
        Shift(solvable=2.0)


def test_demonstrations_are_as_wrong_as_they_say() -> None:
    task = Shift()
    examples = [task.example("train", index) for index in range(500)]
    answers = [demonstration(task, example, random.Random(k)) for k, example in enumerate(examples)]
    right = sum(map(task.score, examples, answers)) / len(answers)
    assert right == pytest.approx((1 - 0.15 * (1 - 0.3 / 10)) ** 5, abs=0.06)
    assert sum(map(str.isalpha, "".join(answers))) / (5 * len(answers)) == pytest.approx(0.3, abs=0.04)
