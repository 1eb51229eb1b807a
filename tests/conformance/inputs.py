"""The tensors on which published code and rlstab are compared, and what is stored of them."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"
WHOLE, HALVES, RAGGED = [list(range(8))], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2], [3], [4, 5, 6, 7]]
CUTS = {"whole": WHOLE, "halves": HALVES, "ragged": RAGGED}
#: A constant length that no input has.
LENGTH = 12

Rows = Sequence[Sequence[float]]


def inputs() -> dict[str, Any]:
    """Named sets of padded tensors. Padding holds numbers that would show if they were counted."""
    rewards = {
        "groups": {"ids": [0, 1, 2] * 4, "rewards": [1.0, 0.25, -1.0, -1.0, 0.75, 0.5, -1.0, 0.0, 0.5, -1.0, 1.0, 0.0]},
        "singleton": {"ids": [0, 0, 1], "rewards": [1.0, 0.0, 0.75]},
        "equal": {"ids": [0] * 8, "rewards": [0.7] * 8},  # in float32 their mean is not 0.7
    }
    return {"rewards": rewards, "main": _main(), "ratios": _ratios(), **_small()}


def _main() -> dict[str, Any]:
    """Eight responses of a vocabulary of eight, one of them with advantage 0; every other row has a hole."""
    draw, width, vocabulary = random.Random(2), 9, 8
    lengths, advantages = [9, 4, 7, 2, 8, 9, 4, 6], [1.25, -0.75, -1.5, 0.5, 0.75, -0.5, 0.0, -1.0]
    mask = [[int(t < n and not (row % 2 and t == 1)) for t in range(width)] for row, n in enumerate(lengths)]
    old = [[[round(draw.gauss(0, 2.5), 2) for _ in range(vocabulary)] for _ in range(width)] for _ in lengths]
    tokens = [
        [draw.choices(range(vocabulary), [math.exp(z / 2) for z in position])[0] for position in row] for row in old
    ]
    live = [[[round(z + draw.gauss(0, 0.2), 2) for z in position] for position in row] for row in old]
    for row, place, push in [(0, 2, 6.0), (0, 5, -6.0), (2, 1, 7.0), (2, 4, -5.0), (5, 0, 5.0), (7, 3, 9.0)]:
        pick = min if push > 0 else max  # ratios far from 1, for both signs
        tokens[row][place] = old[row][place].index(pick(old[row][place]))
        live[row][place][tokens[row][place]] += push
    logits = {name: torch.tensor(values, dtype=torch.float64) for name, values in (("old", old), ("live", live))}
    of_tokens = {name: taken(values, torch.tensor(tokens)) for name, values in logits.items()}
    present = torch.tensor(mask, dtype=torch.bool)
    live_distribution = logits["live"].log_softmax(-1)
    entropies = -(live_distribution.exp() * live_distribution).sum(-1).float().double()
    far = torch.tensor([[draw.choice([0.0] * 8 + [4.0, -12.5]) for _ in range(width)] for _ in lengths])
    noise = torch.tensor([[draw.gauss(0, 0.4) for _ in range(width)] for _ in lengths], dtype=torch.float64)
    return {
        "mask": mask,
        "advantages": advantages,
        "old": torch.where(present, of_tokens["old"], -3.0).tolist(),
        "live": torch.where(present, of_tokens["live"], -1.0).tolist(),
        "ref": torch.where(present, of_tokens["live"] + noise + far, -9.0).tolist(),
        "entropies": torch.where(present, entropies, 50.0).tolist(),
        "tokens": tokens,
        "old_logits": old,
        "live_logits": [[[round(z, 2) for z in position] for position in row] for row in live],
    }


def _ratios() -> dict[str, Any]:
    """Eight responses: both signs at every ratio of a list, and as ``rollout`` what an engine says of the tokens."""
    draw, width, steps = random.Random(3), 8, [0.25, 0.5, 0.7, 0.9, 1.0, 1.1, 1.4, 2.0, 2.5, 4.0]
    lengths, advantages = [8, 8, 6, 5, 4, 3, 2, 1], [1.25, -0.75, -1.5, 0.5, 2.0, -0.25, -1.0, 0.75]
    wanted = {sign: draw.sample(steps, len(steps)) + draw.sample(steps, len(steps)) for sign in (True, False)}
    mask = [[int(t < n and (row, t) != (1, 2)) for t in range(width)] for row, n in enumerate(lengths)]
    padded = {"old": -3.0, "live": -1.0, "rollout": -5.0}
    rows = {name: [[value] * width for _ in lengths] for name, value in padded.items()}
    for row, advantage in enumerate(advantages):
        for t in (t for t in range(width) if mask[row][t]):
            ratio = wanted[advantage > 0].pop()
            old = round(math.log(draw.uniform(0.02, min(0.6, 0.9 / ratio))), 3)
            said = min(-0.001, round(old + draw.gauss(0, 0.15) + draw.choice([0.0] * 5 + [0.9, -1.2]), 3))
            for name, value in (("old", old), ("live", round(old + math.log(ratio), 6)), ("rollout", said)):
                rows[name][row][t] = value
    # one token that the engine finds far more likely, one on which all agree
    rows["old"][2][4], rows["live"][2][4], rows["rollout"][2][4] = -4.6, -4.8, -0.6
    rows["rollout"][4][1] = rows["old"][4][1]
    rows["entropies"] = [[round(abs(draw.gauss(0.7, 0.5)), 2) if present else 50.0 for present in row] for row in mask]
    return {"mask": mask, "advantages": advantages, **rows}


def taken(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _small() -> dict[str, Any]:
    """Tensors of a few tokens on which rlstab and others part."""

    def step(advantages: list[float], old: Rows, live: Rows, mask: Rows | None = None, **more: Any) -> dict[str, Any]:
        ones = [[1.0] * len(old[0]) for _ in old]
        return {"mask": mask or ones, "advantages": advantages, "old": old, "live": live, **more}

    flat = [[-1.0] * 4] * 2
    near = 1.0 + 2.0**-23  # the float32 after 1
    return {
        "extreme": step([1.0, -1.0], [[-26.0, -1.0], [-26.0, -1.0]], [[-1.0, -26.0], [-1.0, -26.0]]),
        "far_ref": step([0.0], [[-1.0, -26.0]], [[-1.0, -26.0]], ref=[[-26.0, -1.0]]),
        "empty_row": step(
            [1.0, -0.5, 0.5],
            [[-1.0] * 3] * 3,
            [[-0.9, -1.1, -1.0], [-1.2, -1.0, -0.8], [-1.0, -1.05, -0.95]],
            [[1, 1, 1], [0, 0, 0], [1, 0, 0]],
        ),
        "dual_edge": step([-1.0], [[-2.0, -2.0]], [[-2.0 + math.log(2), -1.9]]),
        "equal_surprisal": step(
            [1.0, -1.0], flat, [[-2.0, -2.0, -1.0, -2.0]] * 2, entropies=[[0.1] * 4] * 2, target=[[-1.5] * 4] * 2
        ),
        "equal_entropy": step([1.0], [[-1.0] * 5], [[-1.0] * 5], entropies=[[0.1, 0.9, 0.9, 0.2, 0.3]]),
        "adjacent_entropy": step([1.0], [[-1.0] * 5], [[-1.0] * 5], entropies=[[0.25, 0.5, near, 1.0, 0.75]]),
        # the last four tokens: below the proxy, above it, far below it, not plausible
        "proxy": step(
            [-1.0, 1.0],
            [[-0.1, -0.2, -5.0, -3.0, -4.0, -5.0], [-0.1] * 6],
            [[-0.2, -0.1, -6.0, -4.0, -9.0, -8.0], [-0.2] * 6],
            target=[[-0.1, -0.2, -4.9, -4.9, -3.9, -1e4], [-0.1] * 6],
        ),
        "proxy_far": step([-1.0], [[-0.1, -2.0, -110.0]], [[-0.1, -2.0, -110.0]], target=[[-0.1, -1.9, -10.0]]),
    }


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
