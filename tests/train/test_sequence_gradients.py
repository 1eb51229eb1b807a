"""Squared gradients of responses: against a double loop over responses and tokens, and leaving no trace."""

from __future__ import annotations

import pytest
import torch

from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy, load_policy
from rlstab.train.sequence_gradients import squared_gradients
from tests.tolerances import depth, rounding


@pytest.fixture
def policy() -> Policy:
    return load_policy("countdown-tiny")


def some(policy: Policy) -> Sequences:
    """Prompts of 5, 2 and 4 tokens, and responses of 3, 1 and 0."""
    ids = torch.arange(27).reshape(3, 9) * 7 % 19 + 1
    prompt_mask = torch.arange(5) >= torch.tensor([[0], [3], [1]])
    response_mask = torch.arange(4) < torch.tensor([[3], [1], [0]])
    return Sequences(
        torch.where(prompt_mask, ids[:, :5], policy.pad_id),
        prompt_mask,
        torch.where(response_mask, ids[:, 5:], policy.pad_id),
        response_mask,
    )


def gradient(policy: Policy, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """Token by token, each with a forward of its own over what stands before it, added up in float64."""
    total = torch.zeros(sum(one.numel() for one in policy.model.parameters()), dtype=torch.float64)
    for place, token in enumerate(response):
        policy.model.zero_grad()
        logits = policy.model(input_ids=torch.tensor([prompt + response[:place]]), use_cache=False).logits[0, -1]
        (logits / temperature).log_softmax(-1)[token].backward()
        total += torch.cat([one.grad.reshape(-1).double() for one in policy.model.parameters()])
    policy.model.zero_grad()
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_norm_by_a_double_loop(policy: Policy, temperature: float) -> None:
    given = some(policy)
    found = squared_gradients(policy, given, temperature)
    assert found.dtype == torch.float64
    assert float(found[2]) == 0.0
    for row in (0, 1):
        prompt = given.prompt_ids[row][given.prompt_mask[row]].tolist()
        response = given.response_ids[row][given.response_mask[row]].tolist()
        expected = gradient(policy, prompt, response, temperature).square().sum()
        close = 2 * rounding(torch.float32, 1.0, 2 * depth(policy.model, 9))  # of a square, and forward and backward
        assert float(found[row]) == pytest.approx(float(expected), rel=close)


def test_a_response_does_not_depend_on_the_others(policy: Policy) -> None:
    given = some(policy)
    alone = torch.cat([squared_gradients(policy, given.rows(torch.tensor([row])), 1.0) for row in range(3)])
    assert torch.equal(squared_gradients(policy, given, 1.0), alone)


def test_what_is_not_asked_for_is_0(policy: Policy) -> None:
    given = some(policy)
    found = squared_gradients(policy, given, 1.0, torch.tensor([False, True, True]))
    assert torch.equal(found, squared_gradients(policy, given, 1.0) * torch.tensor([0.0, 1.0, 1.0]))


def test_gradients_and_weights_are_left_alone(policy: Policy) -> None:
    before = {name: one.clone() for name, one in policy.model.state_dict().items()}
    some_grad = torch.ones_like(policy.model.model.norm.weight)
    policy.model.model.norm.weight.grad = some_grad
    squared_gradients(policy, some(policy), 1.0)
    assert policy.model.model.norm.weight.grad is some_grad
    assert bool((some_grad == 1).all())
    assert [one.grad is None for one in policy.model.parameters()].count(False) == 1
    assert all(torch.equal(one, before[name]) for name, one in policy.model.state_dict().items())


def test_frozen_weights_do_not_count(policy: Policy) -> None:
    whole = squared_gradients(policy, some(policy), 1.0)
    policy.model.requires_grad_(False)
    assert squared_gradients(policy, some(policy), 1.0).tolist() == [0.0] * 3
    policy.model.model.norm.weight.requires_grad_(True)
    part = squared_gradients(policy, some(policy), 1.0)
    assert bool((part[:2] > 0).all())
    assert bool((part[:2] < whole[:2]).all())


def test_it_works_where_no_gradient_is_wanted(policy: Policy) -> None:
    with torch.no_grad():
        inside = squared_gradients(policy, some(policy), 1.0)
    assert torch.equal(inside, squared_gradients(policy, some(policy), 1.0))


def test_no_responses(policy: Policy) -> None:
    assert squared_gradients(policy, some(policy).rows(torch.tensor([], dtype=torch.int64)), 1.0).shape == (0,)
