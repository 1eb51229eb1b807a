"""The tensors on which published code and rlstab are compared: ``data/inputs.json``, and what is derived from it.

``main`` has a vocabulary of eight, an advantage of 0 and holes in every other row; ``ratios`` has both signs at every
ratio of a list, and what an engine says of its tokens; the others are a few tokens on which rlstab and others part.
Padding holds numbers that would show if they were counted.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
WHOLE, HALVES, RAGGED = [list(range(8))], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2], [3], [4, 5, 6, 7]]
CUTS = {"whole": WHOLE, "halves": HALVES, "ragged": RAGGED}
#: A constant length that no input has.
LENGTH = 12


def taken(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@functools.cache
def load(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def of_tokens() -> dict[str, Tensor]:
    """Eight responses of three groups with the probabilities of their tokens: ``ratios`` without its hole."""
    logprobs, given = tensors("ratios")["old"], load("inputs")["rewards"]["groups"]
    left = (1 - logprobs.exp()).square()
    return {
        "rewards": torch.tensor(given["rewards"][:8], dtype=torch.float64),
        "ids": torch.tensor(given["ids"][:8]),
        "mask": tensors("ratios")["mask"].flip(-1).cummax(-1).values.flip(-1).bool(),
        "logprobs": logprobs,
        "sum_p_sq": logprobs.exp().square() + left * torch.linspace(0.1, 0.9, 64, dtype=torch.float64).view(8, 8),
    }


def of_two_rewards() -> dict[str, Tensor]:
    """The rewards of ``groups`` and the same backwards: two rewards of each answer, with their weights."""
    given = load("inputs")["rewards"]["groups"]
    rewards = torch.tensor(given["rewards"], dtype=torch.float64)
    return {
        "ids": torch.tensor(given["ids"]),
        "reward_parts": torch.stack([rewards, rewards.flip(0)], 1),
        "reward_weights": torch.tensor([[1.0, 0.5]], dtype=torch.float64).expand(len(rewards), 2),
    }


def tensors(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A set of inputs as tensors; advantages laid out over the tokens and, as in verl, 0 on padding."""
    values = {key: torch.tensor(rows, dtype=dtype) for key, rows in load("inputs")[name].items() if key != "tokens"}
    values["advantages"] = values["advantages"].unsqueeze(-1) * values["mask"]
    return values
