"""Countdown: scores against an independent checker, splits that never meet, known problems."""

import hashlib
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demonstrations import of_countdown
from rlstab.errors import OutOfRange
from rlstab.tasks import ALPHABET, Chain, Countdown, Example
from rlstab.tasks.chain import Expression
from rlstab.tasks.countdown import Problem

NINE = Example("3 7 8>29:", Problem((3, 7, 8), 29, ()))


def test_answers_of_countdown():
    for completion in ("3*7=21,21+8=29$", "7*3=21,8+21=29$", "3*7=21,21+8=29$ and more, 1+1=3$"):
        assert Countdown().score(NINE, completion) == 1.0
    for completion in [
        "", "$", "3*7=21,21+8=29", "$3*7=21,21+8=29$", "3*7=21$", "3*7=21,21+8=29,29*1=29$", "3*7=22,22+8=30$",
        "3*7=22,22+7=29$", "3+7=10,10+8=18$", "3*7=21,21+8=29,$", "21+8=29,3*7=21$", "3*7=21,3+7=10$",
        "8*3=24,24+5=29$", " 3*7=21,21+8=29$", "3*7=21, 21+8=29$", "3*7=21,21+8=29\n$", "03*7=21,21+8=29$",
        "+3*7=21,21+8=29$", "3*7=2_1,21+8=29$", "3*7=21,21+8=29.0$", "٣*7=21,21+8=29$", "\uff13*7=21,21+8=29$",
        "3*7*1=21,21+8=29$", "3*7=" + "9" * 5000 + ",21+8=29$",
    ]:  # fmt: skip
        assert Countdown().score(NINE, completion) == 0.0, completion
    below, equal = Example("", Problem((2, 5, 9), 6, ())), Example("", Problem((4, 4, 2), 10, ()))
    assert [Countdown().score(below, text) for text in ("2-5=-3,9+-3=6$", "5-2=3,9-3=6$")] == [0.0, 1.0]
    assert [Countdown().score(equal, text) for text in ("4*2=8,8+2=10$", "4+4=8,8+2=10$")] == [0.0, 1.0]


def independent_score(numbers: list[int], target: int, completion: str) -> float:
    """Another way to check: rewrite the steps into one expression over named numbers and evaluate that."""
    if "$" not in completion:
        return 0.0
    body = completion[: completion.index("$")]
    if not all(character in "0123456789+-*=," for character in body):
        return 0.0
    available = [(str(number), str(number)) for number in numbers]  # how it is written -> the expression behind it
    for step in body.split(","):
        match = re.fullmatch(r"([^-+*=]*)([-+*])([^-+*=]*)=(.*)", step)
        if match is None:
            return 0.0
        expressions = []
        for written in (match[1], match[3]):
            hits = [i for i, (text, _) in enumerate(available) if text == written]
            if not hits:
                return 0.0
            expressions.append(available.pop(hits[0])[1])
        expression = f"({expressions[0]}{match[2]}{expressions[1]})"
        if str(eval(expression)) != match[4] or eval(expression) < 0:
            return 0.0
        available.append((match[4], expression))
    return float(len(available) == 1 and eval(available[0][1]) == target)


@settings(max_examples=100)
@given(
    index=st.integers(0, 10**9),
    split=st.sampled_from(("train", "eval")),
    numbers=st.integers(2, 6),
    high=st.integers(9, 99),
    noise=st.integers(0, 10**6),
    edit=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 2), st.sampled_from(ALPHABET)),
)
def test_countdown_against_an_independent_checker(index, split, numbers, high, noise, edit):
    task = Countdown(numbers=numbers, high=high, seed=noise)
    example = task.example(split, index)
    right = of_countdown(task, example, random.Random(0), follow=1.0, wrong=0.0)
    assert task.score(example, right) == 1.0
    assert set(example.prompt + right) <= set(ALPHABET)
    text = of_countdown(task, example, random.Random(noise), follow=0.8, wrong=0.1)
    if edit is not None:
        at, remove, insert = edit
        text = text[:at] + insert + text[at + remove :]
    expected = independent_score(list(example.answer.numbers), example.answer.target, text)
    assert task.score(example, text) == expected


def test_problems_and_demonstrations_are_known():
    known = ["2 8 3>9:", "8 1 9>73:", "4 8 3>1:", "4 6 9>11:", "7 9 5>38:", "6 4 1>9:"]
    assert [Countdown().example(split, i).prompt for split in ("train", "eval") for i in range(3)] == known
    task, noise = Countdown(), random.Random(0)
    texts = [of_countdown(task, task.example("train", index), noise) for index in range(2000)]
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    assert digest == "a49d6b1d0f709c93873d373e3c322c94aac0bba390b2825e9366918652ccceda"


def problem(answer):
    """What makes two problems the same."""
    return answer.terms if isinstance(answer, Expression) else (tuple(sorted(answer.numbers)), answer.target)


def test_no_eval_problem_is_trained_on():
    for cls in (Chain, Countdown):
        assert cls().example("train", 10**12) == cls().example("train", 10**12)
        held_out = {problem(cls().example("eval", index).answer) for index in range(800)}
        assert len(held_out) > 100
        trained = {problem(cls(seed=seed).example("train", index).answer) for seed in range(2) for index in range(800)}
        assert not held_out & trained


def test_settings_out_of_range():
    for arguments in ({"numbers": 1}, {"low": 5, "high": 4}, {"numbers": 2, "low": 2, "high": 2}):
        with pytest.raises(OutOfRange, match=next(iter(arguments))):
            Countdown(**arguments)
