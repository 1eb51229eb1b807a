"""What published code gave, and what rlstab gives on the same tensors."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from rlstab import PolicyOutputs, TokenBatch, make_plan
from rlstab.core.batch import to_padded
from rlstab.core.batch_checks import MOST
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import Scope
from rlstab.core.terms import Terms
from rlstab.errors import FitWarning
from tests.conformance.inputs import load, tensors

Result = Mapping[str, Any]


@contextmanager
def any_sign() -> Iterator[None]:
    """The stored tensors hold reference log-probs above 0, which published code takes: compare the arithmetic."""
    with patch.dict(MOST, dict.fromkeys(MOST, math.inf)):
        yield


def theirs(source: str, case: str) -> Result:
    """Loss, (B, T) gradient on the log-probs, and (B, T) selection where there is one, as published code gave them."""
    stored = load(source)["cases"][case]
    gradient = [[math.nan if slope is None else slope for slope in row] for row in stored["gradient"]]
    chosen = {"selected": torch.tensor(stored["selected"], dtype=torch.bool)} if "selected" in stored else {}
    return {"loss": stored["loss"], "gradient": torch.tensor(gradient, dtype=torch.float64)} | chosen


def ours(
    objective: TokenObjective,
    source: str,
    case: str,
    *,
    evidence: Literal["live", "old"] = "live",
    scope: Scope = "microbatch",
    local: Callable[[int, int, int, float], float] | None = None,
    live_ratio: bool = False,
    selected: Callable[[Terms], Tensor] | None = None,
    **signals: Tensor,
) -> Result:
    """The same from rlstab, on the tensors and the parts of the stored case.

    Args:
        objective: usually a composition.
        source: file of the case.
        case: its name.
        evidence: ``live`` is ``refresh: step``, ``old`` is ``refresh: rollout``.
        scope: of the statistics.
        local: None makes the parts one optimizer step; otherwise each is its own, see :data:`SHARES`.
        live_ratio: the live policy is its own denominator.
        selected: ``(n,)`` bool from the terms.
        **signals: ``(B, T)`` tensors in addition to the stored ones, or instead of them.
    """
    stored = load(source)["cases"][case]
    dtype = getattr(torch, stored["dtype"])
    values = tensors(stored["inputs"], dtype) | {name: signal.to(dtype) for name, signal in signals.items()}
    named = {"ref": "ref_logprobs", "teacher": "teacher_logprobs", "rollout": "rollout_logprobs"} | {
        name: name for name in ("entropies", "max_logprobs", "log_kept_mass", "truncated")
    }
    batches = [
        TokenBatch.from_padded(
            response_mask=values["mask"][rows],
            advantages=values["advantages"][rows],
            old_logprobs=values["old"][rows],
            logprobs=values[evidence][rows],
            live_ratio=live_ratio,
            sequence_ids=torch.tensor(rows),
            **{name: values[key][rows] for key, name in named.items() if key in values},
        )
        for rows in stored["parts"]
    ]
    loss, gradient = 0.0, torch.zeros_like(values["live"])
    chosen = torch.zeros_like(values["mask"], dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="scope: microbatch")
        warnings.simplefilter("ignore", FitWarning)  # published code allows it
        whole = make_plan(objective, batches, scope=scope)
    for rows, batch in zip(stored["parts"], batches, strict=True):
        plan = whole if local is None else make_plan(objective, [batch])
        weight = 1.0 if local is None else local(len(rows), len(values["mask"]), len(batches), plan.kept.tokens)
        live = values["live"][rows].clone().requires_grad_()
        out = plan.loss(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss * weight
        out.backward()
        assert live.grad is not None
        loss, gradient[rows] = loss + out.item(), live.grad
        if selected is not None:
            chosen[rows] = to_padded(batch, selected(plan.terms(batch)).double()).bool()
    return {"loss": loss, "gradient": gradient.double()} | ({"selected": chosen} if selected is not None else {})


#: How much the loss of a part counts that is a separate optimizer step: of its rows, all rows, the number of parts,
#: and its kept tokens.
SHARES: Mapping[str, Callable[[int, int, int, float], float]] = {
    "by_rows": lambda rows, all_rows, parts, tokens: rows / all_rows,  # verl's older actor
    # Lp-Reg's code adds 1e-8 to the number of tokens that it divides by
    "by_rows_added": lambda rows, all_rows, parts, tokens: rows / all_rows * tokens / (tokens + 1e-8),
    "by_parts": lambda rows, all_rows, parts, tokens: 1 / parts,  # TRL's gradient accumulation
}


def difference(mine: Result, other: Result, of: Sequence[str] = ("loss", "gradient")) -> float:
    """Largest relative difference of loss and gradient; infinite where another token was selected."""
    if "selected" in mine and not torch.equal(mine["selected"], other["selected"]):
        return math.inf
    return max(apart(mine[name], other[name]) for name in of)


def apart(mine: Any, other: Any) -> float:
    """Largest difference, relative to the largest magnitude."""
    mine, other = torch.as_tensor(mine, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    size = float(other.abs().max())
    return float((mine - other).abs().max()) / (size or 1.0)
