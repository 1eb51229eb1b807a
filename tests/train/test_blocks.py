"""Blocks of characters become blocks of tokens, whatever a token is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlstab.core.stats import Settled
from rlstab.errors import MissingSignal
from rlstab.stages.blockwise import Blockwise
from rlstab.tasks import Block, Chain, Countdown, Example
from rlstab.tasks.blocks import block_evidence, require_blocks, token_blocks, told_blocks
from rlstab.train.policy import load_policy
from tests.stages.estimating import batch


def cut(*pieces: str) -> tuple[list[int], Callable[[list[int]], str]]:
    """Tokens that are these pieces of text."""
    return list(range(len(pieces))), lambda ids: "".join(pieces[one] for one in ids)


def as_bytes(text: str) -> tuple[list[int], Callable[[list[int]], str]]:
    """Tokens that are bytes of UTF-8: several of them make a character."""
    return list(text.encode()), lambda ids: bytes(ids).decode(errors="replace")


def spans(*edges: tuple[int, int]) -> list[Block]:
    return [Block(start, stop, 0.0, 0) for start, stop in edges]


def test_one_character_a_token() -> None:
    tokens, decode = cut(*"1+2=3;A3$")
    assert token_blocks(tokens, "1+2=3;A3$", spans((0, 6), (6, 9)), decode) == [0] * 6 + [1] * 3


def test_several_characters_a_token() -> None:
    tokens, decode = cut("1+2", "=3", ";", "A3$")
    assert token_blocks(tokens, "1+2=3;A3$", spans((0, 6), (6, 9)), decode) == [0, 0, 0, 1]


def test_a_token_over_an_edge_belongs_to_the_block_before() -> None:
    tokens, decode = cut("1+2=", "3;A", "3$")
    assert token_blocks(tokens, "1+2=3;A3$", spans((0, 6), (6, 9)), decode) == [0, 0, 1]


def test_a_block_inside_a_token_of_another_has_none() -> None:
    tokens, decode = cut("ab", "cde", "f")
    assert token_blocks(tokens, "abcdef", spans((0, 3), (3, 4), (4, 6)), decode) == [0, 0, 2]


def test_characters_between_blocks_belong_to_none() -> None:
    tokens, decode = cut(*"ab--cd--")
    assert token_blocks(tokens, "ab--cd--", spans((0, 2), (4, 6)), decode) == [0, 0, -1, -1, 1, 1, -1, -1]


def test_a_token_that_begins_between_blocks_belongs_to_the_one_that_it_reaches() -> None:
    tokens, decode = cut("ab", "--", "-cd", "e")
    assert token_blocks(tokens, "ab---cde", spans((0, 2), (5, 8)), decode) == [0, -1, 1, 1]


def test_several_tokens_a_character() -> None:
    tokens, decode = as_bytes("aé€😀b")
    # 1, 2, 3, 4 and 1 bytes
    assert token_blocks(tokens, "aé€😀b", spans((0, 1), (1, 3), (3, 5)), decode) == [0] + [1] * 5 + [2] * 5


def test_bytes_that_are_no_text() -> None:
    tokens = [0x61, 0xFF, 0xE2, 0x82, 0x62]
    text = bytes(tokens).decode(errors="replace")
    found = token_blocks(tokens, text, spans((0, 1), (1, len(text))), lambda ids: bytes(ids).decode(errors="replace"))
    assert found == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(("edges", "expected"), [(((0, 1), (1, 3)), [0, 1, 1, 1]), (((0, 1), (1, 2)), [0, 1, -1, -1])])
def test_tokens_without_text_at_the_end(edges: tuple[tuple[int, int], ...], expected: list[int]) -> None:
    tokens, decode = cut("a", "b", "c", "")
    assert token_blocks(tokens, "abc", spans(*edges), decode) == expected


def test_a_token_without_text_belongs_to_what_follows() -> None:
    tokens, decode = cut("", "a", "", "bc")
    assert token_blocks(tokens, "abc", spans((0, 1), (1, 3)), decode) == [0, 0, 1, 1]


def test_nothing() -> None:
    assert token_blocks([], "", [], lambda ids: "") == []
    assert token_blocks([5], "", [], lambda ids: "") == [-1]


@pytest.fixture(scope="module")
def pairs() -> Tokenizer:
    """A tokenizer of pairs of bytes, some of which are several characters and some a part of one."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["the theory of the thing; then there; and €uro €; 12=12; 123=123"] * 9, trainer)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_every_token_against_a_loop_over_all_prefixes(pairs: Tokenizer, seed: int) -> None:
    dice = random.Random(seed)
    words = ["theory", "é", *dice.choices(["the ", "theory", "€", "é", "12=", "; ", "😀", "x"], k=10)]
    dice.shuffle(words)
    text = "".join(words)
    tokens = pairs.encode(text).ids
    assert pairs.decode(tokens) == text
    edges = sorted(dice.sample(range(len(text) + 1), 6))
    blocks = spans(*((edges[place], edges[place + 1]) for place in dice.choice([(0, 1, 2, 3, 4), (0, 2, 4), (1, 3)])))
    # characters that the first n tokens spell out in full
    done = [0]
    for count in range(1, len(tokens) + 1):
        prefix = pairs.decode(tokens[:count])
        same = 0
        while same < min(len(prefix), len(text)) and prefix[same] == text[same]:
            same += 1
        done.append(same)
    steps = {after - before for before, after in itertools.pairwise(done)}
    assert 0 in steps, "no token is a part of a character"
    assert max(steps) > 1, "no token is several characters"
    expected = []
    for count in range(len(tokens)):
        own = range(done[count], max(done[count + 1], done[count] + 1))
        of = [place for place, one in enumerate(blocks) if any(one.start <= character < one.stop for character in own)]
        expected.append(min(of, default=-1))
    assert token_blocks(tokens, text, blocks, pairs.decode) == expected


def test_the_steps_of_chain_in_the_tokens_of_its_model() -> None:
    policy, task = load_policy("chain-tiny"), Chain(terms=4)
    example = task.example("train", 0)
    first, *rest = example.answer.terms
    total, text = first, ""
    for term in rest:
        text, total = f"{text}{total}{term:+d}={total + term};", total + term
    text += f"A{total}$"
    tokens = policy.tokenizer(text)["input_ids"]
    blocks, errors = told_blocks(task, [example], [text])
    assert errors == []
    found = block_evidence(blocks, [text], [tokens], [0], len(tokens) + 2, policy.decode)
    ends = [place for place, one in enumerate(text) if one in ";$"]
    assert [found.ids[0].tolist().index(number + 1) - 1 for number in range(3)] == ends[:3]
    assert found.ids[0, -2:].tolist() == [-1, -1]
    assert found.rewards.tolist() == [[1.0] * 4]
    assert found.outcomes.tolist() == [[2] * 4]


def test_evidence_of_several_responses() -> None:
    tokens, decode = cut(*"abcdef")
    found = block_evidence(
        [[Block(0, 2, 1.0, 0), Block(2, 6, 0.5, 3)], [], [Block(1, 3, 0.25, 1)]],
        ["abcdef", "abc", "abc"],
        [tokens, tokens[:3], tokens[:3]],
        [3, 0, 0],
        4,
        decode,
    )
    assert found.ids.tolist() == [[1, 1, 1, -1], [-1] * 4, [-1, 0, 0, -1]]
    assert found.rewards.tolist() == [[1.0, 0.5], [0.0, 0.0], [0.25, 0.0]]
    assert found.outcomes.tolist() == [[1, 4], [0, 0], [2, 0]]
    given = batch(
        [0.0] * 3,
        extra={"block_ids": found.ids, "block_rewards": found.rewards, "block_outcomes": found.outcomes},
    )
    assert Blockwise().advantages(given, Settled(), {})[0].tolist() == [0.0] * 4  # its second block has no sibling
    assert Blockwise().advantages(given, Settled(), {})[2].tolist() == [0.0, -0.375, -0.375, 0.0]


def test_no_responses() -> None:
    found = block_evidence([], [], [], [], 4, str)
    assert (found.ids.shape, found.rewards.shape, found.outcomes.shape) == ((0, 4), (0, 0), (0, 0))
    assert found.outcomes.dtype == torch.int64


class Bad:
    """A task whose blocks are what the example says."""

    name = "bad"

    def blocks(self, example: Example, completion: str) -> object:
        if isinstance(example.answer, Exception):
            raise example.answer
        return example.answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ValueError("no"), "ValueError: no"),
        (None, "TypeError: 'NoneType' object is not iterable"),
        ([3], "DataError: `blocks` returned an int among the blocks. Return a list of rlstab.tasks.Block."),
        (
            spans((0, 2), (1, 3)),
            "DataError: `blocks` returned a block from 1 to 3 after one that ends at 2, in a text of 4 characters. "
            "Return blocks in the order of the text that do not overlap and are not empty.",
        ),
        (
            spans((0, 5)),
            "DataError: `blocks` returned a block from 0 to 5 after one that ends at 0, in a text of 4 characters. "
            "Return blocks in the order of the text that do not overlap and are not empty.",
        ),
        (
            [Block(0, 1, float("nan"), 0)],
            "DataError: `blocks` returned the reward nan and the outcome 0. Return a finite reward and a whole number "
            "of at least 0.",
        ),
        (
            [Block(0, 1, 0.0, -1)],
            "DataError: `blocks` returned the reward 0.0 and the outcome -1. Return a finite reward and a whole number "
            "of at least 0.",
        ),
    ],
)
def test_what_goes_wrong_in_a_task_costs_its_response(answer: object, error: str) -> None:
    good = spans((0, 4))
    blocks, errors = told_blocks(Bad(), [Example("", answer), Example("", good)], ["text", "text"])
    assert blocks == [[], good]
    assert errors == [f"{error} (completion 'text')"]


def test_a_task_without_blocks_is_refused() -> None:
    require_blocks(Chain(), "the stage 'blockwise'")
    with pytest.raises(MissingSignal) as caught:
        require_blocks(Countdown(), "the stage 'blockwise'")
    assert str(caught.value) == (
        "the stage 'blockwise' needs blocks, and the task 'countdown' says of none. Give the task a method `blocks` "
        "(rlstab.tasks.HasBlocks), or take another task or another advantage estimator."
    )
