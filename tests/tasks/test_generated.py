"""Tasks that generate their problems: scores against an independent checker, splits that never meet, known problems."""

from __future__ import annotations

import itertools
import random
import re
from types import SimpleNamespace

import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.demonstrations import of_chain, of_countdown
from rlstab.config.settings import ReasoningGymSettings
from rlstab.errors import OutOfRange, ScorerError, UnknownName
from rlstab.tasks import ALPHABET, JUNK, Chain, Countdown, Example, ReasoningGym
from rlstab.tasks.chain import Sum
from rlstab.tasks.countdown import Problem

NINE = Example("3 7 8>29:", Problem((3, 7, 8), 29, ()))
FOURTEEN = Example("Q4+7-2+5=", Sum((4, 7, -2, 5)))


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
        sides = step.split("=")
        operands = re.split(r"([-+*])", sides[0])
        if len(sides) != 2 or len(operands) != 3:
            return 0.0
        expressions = []
        for written in (operands[0], operands[2]):
            hits = [i for i, (text, _) in enumerate(available) if text == written]
            if not hits:
                return 0.0
            expressions.append(available.pop(hits[0])[1])
        expression = f"({expressions[0]}{operands[1]}{expressions[1]})"
        if str(eval(expression)) != sides[1] or eval(expression) < 0:
            return 0.0
        available.append((sides[1], expression))
    return float(len(available) == 1 and eval(available[0][1]) == target)


@settings(max_examples=100, deadline=None)
@given(
    index=st.integers(0, 10**6),
    numbers=st.integers(2, 5),
    noise=st.integers(0, 10**6),
    edit=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 2), st.sampled_from(ALPHABET)),
)
def test_countdown_against_an_independent_checker(index, numbers, noise, edit):
    task = Countdown(numbers=numbers)
    example = task.example("train", index)
    text = of_countdown(task, example, random.Random(noise), follow=0.8, wrong=0.1)
    if edit is not None:
        at, remove, insert = edit
        text = text[:at] + insert + text[at + remove :]
    expected = independent_score(list(example.answer.numbers), example.answer.target, text)
    assert task.score(example, text) == expected


def test_answers_of_chain():
    for completion in [
        "4+7=11;11-2=9;9+5=14;A14$", "7+4=11;11-2=9;5+9=14;A14$", "A14$", "4+7=12;12-2=10;10+5=15;A14$",
        "4+7=11;11-2=9;9+5=14;A14$A15$", "4+7=1?1;11-2=9;9+#5=14;A1(4$", "()A~14##$",
    ]:  # fmt: skip
        assert Chain().score(FOURTEEN, completion) == 1.0, completion
    for completion in [
        "", "$", "4+7=11;11-2=9;9+5=14;A14", "$A14$", "4+7=11;11-2=9;9+5=14;14$", "A15$", "A140$", "A1$", "A15A14$",
        "AA14$", "A14;$", "A014$", "A+14$", "A-14$", "A 14$", "A14\n$", "A1_4$", "A\u0661\u0664$",
        "A" + "9" * 5000 + "$",
    ]:  # fmt: skip
        assert Chain().score(FOURTEEN, completion) == 0.0, completion
    zero = Example("Q1-1=", Sum((1, -1)))
    assert [Chain().score(zero, text) for text in ("A0$", "A-0$", "A$")] == [1.0, 0.0, 0.0]
    assert Chain().score(Example("Q1-9+3=", Sum((1, -9, 3))), "1-9=-8;-8+3=-5;A-5$") == 1.0


@settings(max_examples=100, deadline=None)
@given(text=st.text() | st.text(alphabet=ALPHABET), at=st.integers(0, 40), junk=st.sampled_from(JUNK))
@also(text="A14$\ud800", at=2, junk="#")
@also(text="\x00$", at=0, junk="#")
def test_any_text_has_a_score_and_junk_changes_none(text, at, junk):
    assert Countdown().score(NINE, text) in (0.0, 1.0)
    assert Chain().score(FOURTEEN, text) == Chain().score(FOURTEEN, text[:at] + junk + text[at:])


@settings(max_examples=60, deadline=None)
@given(index=st.integers(0, 10**9), seed=st.integers(0, 10**9), count=st.integers(2, 6), high=st.integers(9, 99))
def test_demonstrations_without_noise_score_one(index, seed, count, high):
    countdown, chain = Countdown(numbers=count, low=1, high=high, seed=seed), Chain(terms=count, seed=seed)
    for split in ("train", "eval"):
        example = countdown.example(split, index)
        answer = of_countdown(countdown, example, random.Random(0), follow=1.0, wrong=0.0)
        assert countdown.score(example, answer) == 1.0
        assert set(example.prompt + answer) <= set(ALPHABET)
        example = chain.example(split, index)
        answer = of_chain(chain, example, random.Random(0), wrong=0.0, commuted=0.5, junk=0.05)
        assert chain.score(example, answer) == 1.0
        assert eval(example.prompt[1:-1]) == sum(example.answer.terms)


def test_demonstrations_are_as_noisy_as_they_say():
    countdown, chain, rng = Countdown(), Chain(), random.Random(0)
    examples = [countdown.example("train", i) for i in range(2000)]
    once = [of_countdown(countdown, e, rng, follow=1.0, wrong=0.1) for e in examples]
    share = sum(countdown.score(e, a) for e, a in zip(examples, once, strict=True)) / 2000
    assert share == pytest.approx(0.9**2, abs=0.044)  # five standard errors
    few = [of_chain(chain, chain.example("train", i), rng, junk=0.0) for i in range(2000)]
    steps = [step.split("=") for text in few for step in text.split(";")[:-1]]
    mistakes = sum(eval(left) != int(right) for left, right in steps)
    assert mistakes / len(steps) == pytest.approx(0.15, abs=0.023)


def test_problems_are_known_and_no_eval_problem_is_trained_on():
    known = {
        Countdown: ["2 8 3>9:", "8 1 9>73:", "4 8 3>1:", "4 6 9>11:", "7 9 5>38:", "6 4 1>9:"],
        Chain: ["Q8+4+4-6=", "Q3-3-9-4=", "Q7-8+3+7=", "Q8-9-5+4=", "Q1+1+3-1=", "Q6-5+2-8="],
    }
    for cls, prompts in known.items():
        assert [cls().example(split, i).prompt for split in ("train", "eval") for i in range(3)] == prompts
        assert cls().example("train", 10**12) == cls().example("train", 10**12)
        assert cls().size == {"train": None, "eval": None}

        def problems(split, seed, cls=cls):
            answers = [cls(seed=seed).example(split, i).answer for i in range(1500)]
            return {a.terms if cls is Chain else (tuple(sorted(a.numbers)), a.target) for a in answers}

        held_out = problems("eval", 0)
        assert len(held_out) > 150
        assert all(held_out.isdisjoint(problems("train", seed)) for seed in range(2))


def test_settings_out_of_range():
    for arguments in ({"numbers": 1}, {"low": 5, "high": 4}, {"numbers": 2, "low": 2, "high": 2}):
        with pytest.raises(OutOfRange, match=next(iter(arguments))):
            Countdown(**arguments)


# -- reasoning-gym -----------------------------------------------------------------------------------------------------


def gym(dataset: str, **options) -> ReasoningGym:
    pytest.importorskip("reasoning_gym")
    return ReasoningGym(ReasoningGymSettings(dataset=dataset, **options))


def test_reasoning_gym_examples_and_scores():
    task = gym("chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, eval_size=10)
    assert (task.name, task.size) == ("chain_sum", {"train": None, "eval": 10})
    example = task.example("train", 5)
    left, op, right = re.search(r"(\d) ([-+]) (\d)", example.prompt).groups()
    answer = str(int(left) + int(right) if op == "+" else int(left) - int(right))
    assert [task.score(example, text) for text in (answer, f" {answer}\n", "no idea")] == [1.0, 1.0, 0.0]
    with pytest.raises(ScorerError, match="ValueError"):
        gym("prime_factorization").score(gym("prime_factorization").example("train", 0), "two times x")


def test_reasoning_gym_is_deterministic_in_any_order():
    indices = [0, 1, 63, 64, 200, 10**7, 2**40]
    ahead = [gym("chain_sum", seed=3).example("train", i) for i in indices]
    task = gym("chain_sum", seed=3)
    assert [task.example("train", i) for i in reversed(indices)][::-1] == ahead
    assert gym("chain_sum", seed=4).example("train", 0).prompt != ahead[0].prompt
    random.seed(1)  # a data set that draws from global random numbers
    before = random.getstate()
    first = gym("list_functions").example("train", 1)
    assert random.getstate() == before
    random.seed(2)
    assert gym("list_functions").example("train", 1) == first


def test_reasoning_gym_splits_never_share_a_seed(monkeypatch):
    task = gym("chain_sum")
    made = []
    recorder = SimpleNamespace(create_dataset=lambda name, seed, size: made.append((seed, seed + size - 1)))
    monkeypatch.setattr(task, "_factory", recorder)
    blocks = (0, 1, 2, 1000, 2**25 - 1, 2**25)
    for split, block in itertools.product(("train", "eval"), blocks):
        task._make_block(split, block)
    train, evaluation = made[: len(blocks)], made[len(blocks) :]
    assert all(0 <= first <= last < 2**31 for first, last in train)
    assert all(2**31 <= first <= last < 2**32 for first, last in evaluation)
    for ranges in (train, evaluation):
        assert ranges[-1] == ranges[0]  # after 2^25 blocks (two thousand million examples) they start again
        assert all(before[1] < after[0] for before, after in itertools.pairwise(sorted(ranges[:-1])))


def test_reasoning_gym_template_pattern_and_threshold():
    task = gym("count_bits", prompt_template=r"{question} Put it in \boxed{}.", answer_pattern=r"=> (.*)")
    example = task.example("train", 0)
    assert example.prompt == example.answer["question"] + r" Put it in \boxed{}."
    right = example.answer["answer"]
    assert task.score(example, f"=> 1\n=> {right}\nbye") == 1.0
    assert task.score(example, right) == 0.0  # no match
    assert 0 < task.score(example, f"=> about {right}") < 1  # reasoning-gym's own credit for an answer in words
    strict = gym("count_bits", answer_pattern=r"=> (.*)", threshold=1.0)
    assert [strict.score(example, f"=> {text}{right}") for text in ("about ", "")] == [0.0, 1.0]


def test_reasoning_gym_settings_that_cannot_be_used():
    for options, error, named in [
        ({"dataset": "chainsum"}, UnknownName, "'chain_sum'"),
        ({"dataset": "chain_sum", "options": {"min_term": 2}}, UnknownName, "'min_terms'"),
        ({"dataset": "chain_sum", "options": {"seed": 2}}, UnknownName, "task.seed"),
        ({"dataset": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}, OutOfRange, "task.options"),
        ({"dataset": "chain_sum", "prompt_template": "?"}, OutOfRange, "prompt_template"),
        ({"dataset": "chain_sum", "answer_pattern": "a"}, OutOfRange, "answer_pattern"),
    ]:
        with pytest.raises(error, match=named):
            gym(**options)
