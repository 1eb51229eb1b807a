"""The blocks of chain: steps and answer, each right or wrong given what stands before it."""

from __future__ import annotations

import random

import pytest

from examples.demonstrations import of_chain
from rlstab.tasks import JUNK, Chain, Example
from rlstab.tasks.chain import Sum

EXAMPLE = Example("Q4+7-2=", Sum((4, 7, -2)))


def told(completion: str) -> list[tuple[str, float, int]]:
    blocks = Chain(terms=3).blocks(EXAMPLE, completion)
    return [(completion[one.start : one.stop], one.reward, one.outcome) for one in blocks]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("4+7=11;11-2=9;A9$", [("4+7=11;", 1, 1), ("11-2=9;", 1, 1), ("A9$", 1, 1)]),
        ("7+4=11;11-2=9;A9$", [("7+4=11;", 1, 1), ("11-2=9;", 1, 1), ("A9$", 1, 1)]),
        # what follows a mistake can be right
        ("4+7=12;12-2=10;A10$", [("4+7=12;", 0, 0), ("12-2=10;", 1, 0), ("A10$", 1, 0)]),
        # the right value, but not what was written before
        ("4+7=12;11-2=9;A9$", [("4+7=12;", 0, 0), ("11-2=9;", 0, 0), ("A9$", 1, 0)]),
        ("4+7=11;11-2=9;A8$", [("4+7=11;", 1, 1), ("11-2=9;", 1, 1), ("A8$", 0, 0)]),
        # steps left out: what is left has to be in the answer
        ("A9$", [("A9$", 1, 1)]),
        ("4+7=11;A9$", [("4+7=11;", 1, 1), ("A9$", 1, 1)]),
        ("4+7=11;A11$", [("4+7=11;", 1, 1), ("A11$", 0, 0)]),
        # one step too many
        ("4+7=11;11-2=9;9+1=10;A10$", [("4+7=11;", 1, 1), ("11-2=9;", 1, 1), ("9+1=10;", 0, 0), ("A10$", 1, 0)]),
        # cut off
        ("4+7=11;11-2", [("4+7=11;", 1, 1), ("11-2", 0, 0)]),
        ("4+7=11;", [("4+7=11;", 1, 1)]),
        ("4+7=11;11-2=9;A9", [("4+7=11;", 1, 1), ("11-2=9;", 1, 1), ("A9", 0, 0)]),
        # nothing that can be read: the answer goes on as after a right step
        ("junk;A9$", [("junk;", 0, 0), ("A9$", 1, 0)]),
        (";$", [(";", 0, 0), ("$", 0, 0)]),
        ("", []),
        # junk does not count, and belongs to the block that it stands in
        ("4(+7=1?1;11-2=9;#A9$", [("4(+7=1?1;", 1, 1), ("11-2=9;", 1, 1), ("#A9$", 1, 1)]),
        # what follows the first $ is in no block
        ("4+7=11;11-2=9;A9$;;A9$", [("4+7=11;", 1, 1), ("11-2=9;", 1, 1), ("A9$", 1, 1)]),
        # a term subtracted has one order
        ("4+7=11;-2+11=9;A9$", [("4+7=11;", 1, 1), ("-2+11=9;", 0, 0), ("A9$", 1, 0)]),
    ],
)
def test_blocks_by_hand(completion: str, expected: list[tuple[str, float, int]]) -> None:
    assert told(completion) == expected


@pytest.mark.parametrize("terms", [2, 4, 6])
def test_a_demonstration_without_mistakes_is_right_in_every_block(terms: int) -> None:
    task, dice = Chain(terms=terms), random.Random(terms)
    for index in range(50):
        example = task.example("train", index)
        text = of_chain(task, example, dice, wrong=0.0, junk=0.01)
        blocks = task.blocks(example, text)
        assert [(one.reward, one.outcome) for one in blocks] == [(1.0, 1)] * terms
        assert "".join(text[one.start : one.stop] for one in blocks) == text


def test_blocks_cover_any_text_and_an_answer_of_outcome_1_scores_1() -> None:
    task, dice = Chain(terms=3), random.Random(0)
    seen = set()
    for index in range(2000):
        example = task.example("train", index % 20)
        text = of_chain(task, example, dice, wrong=0.3)
        for _ in range(dice.randint(0, 3)):  # spoil it
            place = dice.randrange(len(text) + 1)
            text = text[:place] + dice.choice("0123456789+-=;A$" + JUNK) + text[place + dice.randint(0, 1) :]
        blocks = task.blocks(example, text)
        end = text.find("$") + 1 or len(text)
        assert "".join(text[one.start : one.stop] for one in blocks) == text[:end]
        outcomes = [one.outcome for one in blocks]
        assert outcomes == sorted(outcomes, reverse=True)  # once wrong, always wrong
        score = task.score(example, text)
        if blocks and text[end - 1 : end] == "$" and outcomes[-1]:
            assert score == 1.0
        seen.add((score, outcomes[-1]))
    assert seen == {(0.0, 0), (1.0, 0), (1.0, 1)} or seen == {(0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1)}


@pytest.mark.parametrize("text", ["9" * 5000 + ";A1$", "\u0663+\u0664=\u0667;A7$", "\x00;\ud800;$", ";" * 400, "$" * 9])
def test_no_text_raises(text: str) -> None:
    assert all(one.reward == 0 or one.reward == 1 for one in Chain(terms=3).blocks(EXAMPLE, text))
