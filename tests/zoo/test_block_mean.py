"""One vote for each block of a response, of whatever length, in the policy term and under penalties."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from rlstab import BlockMean, KLPenalty, SequenceMean, TokenObjective, compose, make_plan
from rlstab.train.generate import require_provider_names
from tests.core.methods import DropPunished
from tests.core.steps import batch_of, gradients, live_of, random_rows, token

#: Blocks of 3 and 1 tokens with one token of neither between them; a response of one block; one without any.
BLOCKS = [[0, 0, 0, -1, 1], [7, 7], [-1, -2]]


def rows(blocks: list[list[float]], **fields: float) -> list[list[dict[str, float]]]:
    return [[token(block=float(one), **fields) for one in row] for row in blocks]


def slopes(given: list[list[dict[str, float]]], *methods: TokenObjective) -> list[float]:
    batch = batch_of(given)
    policy, leaves = live_of(batch, given)
    compose(*methods)(batch, policy).loss.backward()
    return gradients(batch, leaves)["logp"].tolist()


def test_coefficients_by_hand() -> None:
    expected = [Fraction(-1, 9)] * 3 + [0, Fraction(-1, 3)] + [Fraction(-1, 6)] * 2 + [0, 0]
    assert slopes(rows(BLOCKS), BlockMean()) == pytest.approx([float(one) for one in expected])


def test_under_a_penalty_tokens_without_a_block_are_one_more_block() -> None:
    expected = [Fraction(1, 9)] * 3 + [Fraction(1, 3), Fraction(1, 3)] + [Fraction(1, 6)] * 4
    found = slopes(rows(BLOCKS, A=0.0), BlockMean(), KLPenalty(coefficient=1.0, estimator="k1"))
    assert found == pytest.approx([float(one) for one in expected])


def test_what_is_left_of_a_block_has_all_of_its_weight() -> None:
    given = rows(BLOCKS)
    given[0][1]["A"] = given[0][4]["A"] = -1.0  # dropped: one of three tokens, and the whole of a block
    expected = [Fraction(-1, 6), 0, Fraction(-1, 6), 0, 0] + [Fraction(-1, 6)] * 2 + [0, 0]
    assert slopes(given, BlockMean(), DropPunished()) == pytest.approx([float(one) for one in expected])


def test_of_one_block_each_it_is_the_sequence_mean() -> None:
    given = [[{**one, "block": 3.0} for one in row] for row in random_rows(2, [5, 1, 0, 8])]
    penalty = KLPenalty(coefficient=0.3)
    assert slopes(given, BlockMean(), penalty) == pytest.approx(slopes(given, SequenceMean(), penalty))


def test_large_numbers_of_blocks_do_not_meet_those_of_the_next_response() -> None:
    blocks = [[2.0**24 - 1, 0.0], [0.0, 2.0**24 - 1]] * 3
    assert slopes(rows(blocks), BlockMean()) == pytest.approx([-1 / 6] * 12)


def test_tokens_without_a_block_need_no_live_log_prob() -> None:
    batch = batch_of(rows(BLOCKS))
    assert make_plan(compose(BlockMean()), [batch]).live_rows(batch)["logprobs"].tolist() == [
        one >= 0 for row in BLOCKS for one in row
    ]


def test_blocks_are_the_users_to_tell() -> None:
    def halves(responses: object) -> torch.Tensor:
        return torch.zeros(0)

    require_provider_names({"block_ids": halves})
