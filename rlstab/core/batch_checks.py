"""The values that signals can have, and the refusal of an optimizer step whose evidence has others, or NaN or Inf."""

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from rlstab.core.batch import BASICS, LOGPROBS, TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.devices import on_cpu
from rlstab.errors import NonFinite, OutOfRange

#: The largest accepted value of signals that are at most 0, with room for rounding: in float32, log-probs from logits
#: in the thousands are off by 3e-4 nats.
MOST = dict.fromkeys((*LOGPROBS, "log_kept_mass", "log_support_mass"), 1e-3)
#: The smallest accepted value of those that are at least 0. Some hosts compute entropies in bfloat16, as a difference
#: of numbers up to 128, which bfloat16 rounds to 0.5.
LEAST = {"entropies": -1.0, "sum_p_sq": -1e-3, "teacher_divergence": -1e-3}


def impossible(name: str, values: Tensor) -> Tensor:
    """``(n,)`` bool: impossible values of a signal of :data:`MOST` or :data:`LEAST`."""
    return values > MOST[name] if name in MOST else values < LEAST[name]


def refuse_impossible(needs: Set[str], parts: Sequence[TokenBatch], comm: Comm) -> None:
    """Refuse NaN and Inf in what an objective needs, and values that a signal cannot have; on every rank.

    Raises:
        NonFinite: says of which signal, and of how many tokens.
        OutOfRange: likewise.
    """
    names = ["old_logprobs", "logprobs", "advantages", *sorted(needs - BASICS)]
    limited = [name for name in names if name in MOST or name in LEAST]
    counts = torch.zeros(len(names) + len(limited), dtype=torch.float64)
    filled = [dict(part.here.per_token()) for part in parts if len(part)]

    def seen_of(present: dict[str, Tensor]) -> Tensor:
        # NaN and Inf survive a sum; if a sum of finite values overflows, the values are checked again
        sums = [present[name].sum().double() for name in names]
        worst = [(present[name].amax() if name in MOST else present[name].amin()).double() for name in limited]
        return torch.stack(sums + worst)

    for present, extremes in zip(filled, on_cpu([*map(seen_of, filled)]), strict=True):  # one wait for the device
        furthest = zip(limited, extremes[len(names) :].tolist(), strict=True)
        possible = all(value <= MOST[name] if name in MOST else value >= LEAST[name] for name, value in furthest)
        if not (possible and extremes.isfinite().all()):
            wrong = [~present[name].isfinite() for name in names] + [
                impossible(name, present[name]) for name in limited
            ]
            counts += torch.stack([where.count_nonzero() for where in wrong]).cpu()
    total = comm.sum(counts).tolist()
    nonfinite, excess = (
        ", ".join(f"{int(count)} in '{name}'" for name, count in pairs if count)
        for pairs in (zip(names, total, strict=False), zip(limited, total[len(names) :], strict=True))
    )
    if nonfinite:
        raise NonFinite(
            f"the evidence of this optimizer step has NaN or Inf values: {nonfinite}. It was refused. A log-prob of "
            f"-inf comes from a sampler that filtered its own token (top-k, top-p); NaN from weights or rewards."
        )
    if excess:
        raise OutOfRange(
            f"the evidence of this optimizer step has log-probs above 0, or entropies below: {excess}. It was refused. "
            f"Take the logarithm of probabilities, nats; compute log-probs and entropies from float32 logits."
        )
