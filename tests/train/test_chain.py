"""The chain task: problems, the checker, the junk that it skips, and demonstrations."""

import random
import re

import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab.errors import OutOfRange
from rlstab.tasks import ALPHABET, JUNK, Chain, Example
from rlstab.tasks.chain import Sum

FOURTEEN = Example("Q4+7-2+5=", Sum((4, 7, -2, 5)))
BELOW = Example("Q1-9+3=", Sum((1, -9, 3)))


@pytest.mark.parametrize(
    "completion",
    [
        "4+7=11;11-2=9;9+5=14;A14$",
        "7+4=11;11-2=9;5+9=14;A14$",
        "A14$",
        "4+7=12;12-2=10;10+5=15;A14$",
        "4+7=11;11-2=9;9+5=14;A14$A15$",
        "4+7=1?1;11-2=9;9+#5=14;A1(4$",
        "()A~14##$",
    ],
)
def test_right_answers(completion):
    assert Chain().score(FOURTEEN, completion) == 1.0


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "nothing"),
        ("$", "no answer"),
        ("4+7=11;11-2=9;9+5=14;A14", "no end"),
        ("$A14$", "ends before it begins"),
        ("4+7=11;11-2=9;9+5=14;14$", "no A"),
        ("A15$", "another number"),
        ("A140$", "one digit too many"),
        ("A1$", "one digit too few"),
        ("A15A14$", "two answers"),
        ("AA14$", "two marks"),
        ("A14;$", "something after it"),
        ("A014$", "leading zero"),
        ("A+14$", "plus sign"),
        ("A-14$", "minus sign"),
        ("A 14$", "blank"),
        ("A14\n$", "newline"),
        ("A1_4$", "underscore"),
        ("A\u0661\u0664$", "arabic digits"),
        ("A" + "9" * 5000 + "$", "more digits than int() takes"),
    ],
)
def test_wrong_answers(completion, reason):
    assert Chain().score(FOURTEEN, completion) == 0.0, reason


def test_answers_below_zero():
    assert Chain().score(BELOW, "1-9=-8;-8+3=-5;A-5$") == 1.0
    assert Chain().score(BELOW, "1-9=-8;-8+3=-5;A5$") == 0.0
    zero = Example("Q1-1=", Sum((1, -1)))
    assert [Chain().score(zero, text) for text in ("A0$", "A-0$", "A$")] == [1.0, 0.0, 0.0]


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text(alphabet=ALPHABET))
@also(text="A14$\ud800")
def test_the_checker_takes_any_text(text):
    assert Chain().score(FOURTEEN, text) in (0.0, 1.0)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=ALPHABET, max_size=40), at=st.integers(0, 40), junk=st.sampled_from(JUNK))
@also(text="A14$", at=2, junk="#")
def test_junk_changes_no_score(text, at, junk):
    assert Chain().score(FOURTEEN, text) == Chain().score(FOURTEEN, text[:at] + junk + text[at:])


def test_junk_is_in_the_alphabet_and_in_nothing_else():
    assert len(set(JUNK)) == 5
    task = Chain()
    for index in range(300):
        example = task.example("train", index)
        text = example.prompt + task.demonstration(example, random.Random(index), junk=0.0)
        assert set(text) <= set(ALPHABET) - set(JUNK)


@settings(max_examples=100, deadline=None)
@given(index=st.integers(0, 10**9), seed=st.integers(0, 10**9), terms=st.integers(2, 6), noise=st.integers(0, 999))
def test_demonstrations_without_mistakes_score_one(index, seed, terms, noise):
    task = Chain(terms=terms, seed=seed)
    for split in ("train", "eval"):
        example = task.example(split, index)
        answer = task.demonstration(example, random.Random(noise), wrong=0.0, commuted=0.5, junk=0.05)
        assert task.score(example, answer) == 1.0
        assert set(example.prompt + answer) <= set(ALPHABET)
        assert eval(example.prompt[1:-1]) == sum(example.answer.terms)
        *steps, _ = "".join(one for one in answer if one not in JUNK).split(";")
        assert len(steps) == terms - 1
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right)


def test_demonstrations_are_as_noisy_as_they_say():
    task, rng = Chain(), random.Random(0)
    examples = [task.example("train", i) for i in range(2000)]
    wrong = [task.demonstration(one, rng, wrong=1.0, junk=0.0) for one in examples]
    steps = [step.split("=") for text in wrong for step in text.split(";")[:-1]]
    assert {abs(eval(left) - int(right)) for left, right in steps} == {1, 10}
    few = [task.demonstration(one, rng, junk=0.0) for one in examples]
    steps = [step.split("=") for text in few for step in text.split(";")[:-1]]
    mistakes = sum(eval(left) != int(right) for left, right in steps)
    assert mistakes / len(steps) == pytest.approx(0.15, abs=0.023)  # five standard errors of 6000
    swapped = [task.demonstration(one, rng, wrong=0.0, commuted=0.35, junk=0.0) for one in examples]
    # two different digits in the first step say which one was written first
    first = [(one.answer.terms, text) for one, text in zip(examples, swapped, strict=True)]
    told = [text[0] == str(terms[1]) for terms, text in first if terms[1] > 0 and terms[1] != terms[0]]
    assert sum(told) / len(told) == pytest.approx(0.35, abs=5 * 0.48 / len(told) ** 0.5)
    littered = "".join(task.demonstration(one, rng, junk=0.01)[:-1] for one in examples)
    for symbol in JUNK:  # five standard errors of a share of some 50 000
        assert littered.count(symbol) / len(littered) == pytest.approx(0.01, abs=0.0025)


KNOWN_TRAIN = ["Q8+4+4-6=", "Q3-3-9-4=", "Q7-8+3+7="]
KNOWN_EVAL = ["Q8-9-5+4=", "Q1+1+3-1=", "Q6-5+2-8="]


def test_chain_is_deterministic_and_known():
    assert [Chain().example("train", i).prompt for i in range(3)] == KNOWN_TRAIN
    assert [Chain().example("eval", i).prompt for i in range(3)] == KNOWN_EVAL
    assert Chain().example("train", 10**12) == Chain().example("train", 10**12)
    assert Chain(seed=1).example("train", 0) != Chain(seed=0).example("train", 0)
    assert Chain().size == {"train": None, "eval": None}


def test_chain_never_trains_on_an_eval_problem():
    def problems(split, seed):
        return {Chain(seed=seed).example(split, i).prompt for i in range(3000)}

    held_out = problems("eval", 0)
    assert len(held_out) > 2000
    for seed in range(3):
        assert held_out.isdisjoint(problems("train", seed))


@pytest.mark.parametrize("terms", range(2, 7))
def test_both_splits_have_problems(terms):
    for split in ("train", "eval"):
        assert re.fullmatch(rf"Q[1-9]([-+][1-9]){{{terms - 1}}}=", Chain(terms=terms).example(split, 0).prompt)


@pytest.mark.parametrize("terms", [1, 7])
def test_chain_settings_out_of_range(terms):
    with pytest.raises(OutOfRange) as caught:
        Chain(terms=terms)
    assert str(caught.value) == f"Chain takes 2 to 6 terms, not {terms}. Set `terms` within that range."
