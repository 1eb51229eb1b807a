"""What credit by turn does in the two-turn task, by enumeration: no training, no seed, no sampling error."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from rlstab import PolicyOutputs, TokenBatch, TokenMean, TurnCredit, compose
from rlstab.core.turns import turns_of
from rlstab.stages.group_relative import grpo
from rlstab.tasks.lottery import Lottery

#: The numbers that the policy may write in either turn, two of them even, and how likely it writes each.
DIGITS = [2, 3, 4, 5]
POLICY = torch.tensor([-0.5, -0.1, 0.3, 0.7]).double().softmax(-1)
PROMPTS, GROUP = 8, 2


@cache
def gradients(normalise: bool, credited: bool, **task: Any) -> tuple[Tensor, Tensor]:
    """``(N, 2, 4)`` gradient by the logits of each turn of every group that can be drawn; ``(N,)`` how likely each is.

    A group is ``GROUP`` of the 16 answers to one of the prompts. The advantage is GRPO's, of the score.
    """
    lottery, answers = Lottery(**task), list(product(range(len(DIGITS)), repeat=2))
    groups = torch.tensor(list(product(range(len(answers)), repeat=GROUP)))
    prompts = [lottery.example("train", index) for index in range(PROMPTS)]
    rewards = (
        torch.stack(
            [
                torch.tensor(
                    [lottery.turn_rewards(prompt, f"{DIGITS[first]}$A{DIGITS[second]}$") for first, second in answers]
                )
                for prompt in prompts
            ]
        )[:, groups]
        .double()
        .reshape(-1, 2)
    )
    group_ids = torch.arange(PROMPTS * len(groups)).repeat_interleave(GROUP)
    mask = torch.tensor([1, 0, 1]).expand(len(rewards), 3)
    turn, logprobs = turns_of(mask), torch.full(mask.shape, -1.0, dtype=torch.float64)
    batch = TokenBatch.from_padded(
        response_mask=mask,
        advantages=grpo(rewards.sum(-1), group_ids, std=normalise, epsilon=1e-9),
        old_logprobs=logprobs,
        group_ids=group_ids,
        turn=turn,
        turn_reward=rewards.gather(1, turn),
    )
    live = logprobs.clone().requires_grad_()
    credit = [TurnCredit(normalise=normalise, epsilon=1e-9)] if credited else []
    compose(TokenMean(), *credit)(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
    written = torch.tensor(answers)[groups].repeat(PROMPTS, 1, 1).reshape(-1, 2)
    score = torch.nn.functional.one_hot(written, len(DIGITS)).double() - POLICY
    by_token = -live.grad[:, ::2, None] * len(batch) * score
    likely = POLICY[torch.tensor(answers)].prod(-1)[groups].prod(-1).repeat(PROMPTS) / PROMPTS
    return by_token.reshape(len(likely), GROUP, 2, -1).sum(1), likely


def noise(of_groups: Tensor, likely: Tensor) -> float:
    """The variance of the gradient of a group, as a multiple of the squared length of its mean."""
    mean, square = likely @ of_groups, likely @ of_groups.square().sum(-1)
    return float(square / mean.square().sum() - 1)


def ratios(normalise: bool, **task: Any) -> tuple[float, float]:
    """By which factor credit by turn changes the noise: by weights of the first turn alone, and of both turns."""
    plain, likely = gradients(normalise, False, **task)
    credited, _ = gradients(normalise, True, **task)
    first, both = (noise(credited[:, 0], likely) / noise(plain[:, 0], likely)), noise(credited.sum(1), likely)
    return first, both / noise(plain.sum(1), likely)


@pytest.mark.parametrize("normalise", [False, True])
def test_credit_by_turn_lowers_the_noise_of_the_gradient_where_a_draw_drowns_the_first_turn(normalise: bool) -> None:
    assert ratios(normalise) == pytest.approx((0.318, 0.396) if normalise else (0.301, 0.685), abs=1e-3)


def test_without_a_draw_it_changes_nothing_in_the_first_turn_but_clears_the_second() -> None:
    """The luck of the first turn is noise on the tokens of the second, which earn nothing."""
    assert ratios(True, stake=0.0) == pytest.approx((1, 0.631), abs=1e-3)


@pytest.mark.parametrize("normalise", [False, True])
def test_where_rewards_of_turns_say_nothing_every_gradient_is_only_longer(normalise: bool) -> None:
    plain, _ = gradients(normalise, False, shared=True)
    credited, _ = gradients(normalise, True, shared=True)
    assert torch.allclose(credited, plain * (2.0 if normalise else 1.5), rtol=1e-6, atol=1e-9)
    assert float(plain.abs().max()) > 0.1


def test_credit_of_every_turn_is_twice_the_expected_gradient() -> None:
    """So a lower variance is no other aim: the same direction, with less noise."""
    (plain, likely), (credited, _) = gradients(False, False), gradients(False, True)
    assert torch.allclose(likely @ credited.flatten(1), 2 * likely @ plain.flatten(1), rtol=1e-12, atol=1e-13)


def test_the_credit_of_a_turn_does_not_depend_on_what_every_turn_earns() -> None:
    """Nor on rounding: a million more is a rounding error of 1e-4 in a mean of squares."""

    def credit(more: float) -> Tensor:
        batch = TokenBatch.from_padded(
            response_mask=torch.ones(3, 2),
            advantages=torch.zeros(3, dtype=torch.float64),
            old_logprobs=torch.full((3, 2), -1.0, dtype=torch.float64),
            group_ids=torch.zeros(3, dtype=torch.int64),
            turn=torch.tensor([0, 1]).expand(3, 2),
            turn_reward=torch.tensor([[0.0, 0.25], [0.5, 0.0], [1.0, 0.75]]).double() + more,
        )
        live = batch.old_logprobs.reshape(3, 2).clone().requires_grad_()
        compose(TurnCredit())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        assert live.grad is not None
        return live.grad

    assert torch.allclose(credit(1e6), credit(0.0), rtol=1e-8, atol=0)
