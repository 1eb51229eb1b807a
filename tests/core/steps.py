"""Optimizer steps for tests: rows of token dicts (the oracles' format), as batches and live outputs in float64.

Padding holds NaN everywhere, and the response mask has a hole: nothing may notice.
"""

import math
import random

import torch

from rlstab import PolicyOutputs, TokenBatch, make_plan
from rlstab.core.batch import layout_of

EVIDENCE = {
    "advantages": "A",
    "old_logprobs": "old",
    "logprobs": "now",
    "entropies": "H",
    "ref_logprobs": "ref",
    "max_logprobs": "max",
    "log_kept_mass": "mass",
    "rollout_logprobs": "rollout",
    "truncated": "cut",
    "branch": "branch",
    "teacher_logprobs": "teacher",
    "lag": "lag",
    "block_ids": "block",
    "turn": "turn",
    "turn_reward": "earned",
}
LIVE = {
    "logprobs": "logp",
    "entropies": "live_H",
    "log_kept_mass": "live_mass",
    "teacher_divergence": "apart",
    "log_support_mass": "live_support",
}


def token(
    *,
    now=-1.0,
    drift=0.0,
    lag=0.0,
    H=0.5,
    A=1.0,
    ref=None,
    gap=0.0,
    mass=-0.01,
    dH=0.0,
    dmass=0.0,
    sampled=0.0,
    cut=0.0,
    branch=0.0,
    block=0.0,
    teacher=0.0,
    updates=0.0,
    turn=0.0,
    earned=0.0,
    apart=0.25,
):
    """A token from its log-prob at the start of the step; ``drift`` moves the live one, ``lag`` the old one.

    ``sampled`` moves the one that the sampler reported away from the old one.
    """
    return {
        "logp": min(now + drift, 0.0),
        "old": min(now + lag, 0.0),
        "now": now,
        "H": H,
        "live_H": H + dH,
        "A": A,
        "ref": now if ref is None else min(ref, 0.0),
        "max": min(now + gap, 0.0),
        "mass": mass,
        "live_mass": mass + dmass,
        "live_support": -0.4 * min(H, 1.0) + mass,
        "rollout": min(now + lag + sampled, 0.0),
        "cut": cut,
        "branch": branch,
        "block": block,
        "teacher": min(now + teacher, 0.0),
        "lag": updates,
        "turn": turn,
        "earned": earned,
        "apart": apart,
    }


def number(rows):
    """The tokens of all rows, each with the number of its row."""
    return [{**own, "row": row} for row, tokens in enumerate(rows) for own in tokens]


def random_rows(seed, lengths):
    """Rows in which each method of the zoo has something to do: rare tokens, ties, mixed advantages, low entropy."""
    draw, other = random.Random(seed), random.Random(seed + 1000)
    third, fourth = random.Random(seed + 2000), random.Random(seed + 3000)

    def drawn(advantage, cut, branch, place):
        now = -draw.choice([draw.uniform(0, 2), draw.uniform(2, 6), draw.uniform(6, 12), 7.0])
        return token(
            now=now,
            drift=draw.gauss(0, 0.4),
            lag=draw.gauss(0, 0.1),
            H=draw.choice([draw.uniform(0, 0.1), draw.uniform(0, 1), 0.25]),
            A=advantage,
            ref=now + draw.gauss(0, 0.5),
            gap=draw.uniform(0, 5),
            mass=-draw.uniform(0.001, 0.1),
            dH=draw.uniform(0, 0.2),
            dmass=-draw.uniform(0, 0.05),
            sampled=other.gauss(0, 0.3),
            cut=cut,
            branch=branch,
            block=-1.0 if place % 5 == 4 else float(place // 3),
            teacher=third.gauss(0, 0.7),
            updates=float(third.randint(0, 3)),
            turn=float(place // 3),
            apart=fourth.uniform(0, 2),
        )

    rows = []
    for row, length in enumerate(lengths):
        advantage = draw.choice([-1.5, -0.5, 0.0, 0.7, 1.2])
        cut = float(other.random() < 0.4)
        tokens = [drawn(advantage, cut, float(row % 3 == 1), place) for place in range(length)]
        rows.append([{**token, "earned": float((7 * row + 3 * token["turn"] + seed) % 4)} for token in tokens])
    return rows


def laid_out(rows, *fields):
    """The ``(S, T)`` mask of the tokens, and their fields as one ``(fields, S, T)`` tensor."""
    width = max((len(tokens) for tokens in rows), default=0) + 2
    # column 1 is a hole, as tool output is
    cells = [row * width + index + (index > 0) for row, tokens in enumerate(rows) for index in range(len(tokens))]
    mask = torch.zeros(len(rows) * width, dtype=torch.bool)
    mask[cells] = True
    values = torch.full((len(fields), len(mask)), math.nan, dtype=torch.float64)
    columns = [[token[field] for tokens in rows for token in tokens] for field in fields]
    values[:, cells] = torch.tensor(columns, dtype=torch.float64)
    return mask.view(-1, width), values.view(len(fields), -1, width)


def padded(rows, field):
    return laid_out(rows, field)[1][0]


def batch_of(rows, ids=None, *, dtype=torch.float64, live_ratio=False, without=()):
    given = {name: field for name, field in EVIDENCE.items() if name not in without}
    mask, values = laid_out(rows, *given.values())
    signals = dict(zip(given, values.to(dtype), strict=True))
    ids = None if ids is None else torch.tensor(list(ids), dtype=torch.int64)
    # two responses of a prompt, which parts and ranks may tear apart
    signals |= {"sequence_ids": ids, "group_ids": torch.arange(len(rows)) if ids is None else ids // 2}
    return TokenBatch.from_padded(response_mask=mask, live_ratio=live_ratio, **signals)


def live_of(batch, rows, *, dtype=torch.float64):
    """Live outputs of the rows and their packed gradients' leaves, by the oracles' field names."""
    values = laid_out(rows, *LIVE.values())[1].to(dtype)
    leaves = {field: of.clone().requires_grad_() for field, of in zip(LIVE.values(), values, strict=True)}
    policy = PolicyOutputs.from_padded(batch, **{name: leaves[field] for name, field in LIVE.items()})
    return policy, leaves


def gradients(batch, leaves):
    """{field: (n,) gradient}; padding must have received none."""
    slopes = {}
    for field, leaf in leaves.items():
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        slopes[field] = gradient.reshape(-1)[layout_of(batch).index]
        assert torch.equal(gradient.count_nonzero(), slopes[field].count_nonzero())
    return slopes


def run_parts(objective, rows, parts):
    """One step in parts (lists of row numbers): its plan, and the report merged over the parts."""
    batches = [batch_of([rows[row] for row in part], part) for part in parts]
    plan, report = make_plan(objective, batches), {}
    for number, (part, batch) in enumerate(zip(parts, batches, strict=True)):
        policy, _ = live_of(batch, [rows[row] for row in part])
        for name, mean in plan.loss(number, policy).report.items():
            report[name] = report[name].merge(mean) if name in report else mean
    return plan, report
