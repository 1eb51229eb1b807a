"""An objective as prime-rl's custom loss: ``import_path = "rlstab.adapters.prime_rl.loss"`` in ``[trainer.loss]``.

prime-rl (0.8.0, ``src/prime_rl/trainer/rl/loss.py``) calls a custom loss once for each response, sums what it returns,
and divides by the tokens of the optimizer step over all ranks. So a method may do anything to a token that its own
response decides; nothing may be measured over the step, and the mean is that over its tokens.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlstab.config import load_objective
from rlstab.core.batch import TokenBatch
from rlstab.core.compose import Composition, compose, walk
from rlstab.core.objective import State, TokenObjective, check_complete
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms
from rlstab.core.turns import turns_of
from rlstab.errors import ConfigError
from rlstab.hosts import Host, measures

#: What prime-rl gives a loss.
HOST = Host(
    "prime_rl",
    "prime-rl",
    gives=frozenset({"ref_logprobs", "rollout_logprobs", "turn"}),
    release="0.8.0",
    how={"ref_logprobs": "choose an algorithm with a reference model (opd, opsd)"},
)
#: By the field of Terms that a method writes, why no function of one response can do it.
REFUSED = {
    "keep": "drops tokens from the divisor, and prime-rl divides by all. With denominator: all it need not",
    "aggregate": "takes a mean other than that over the tokens of the step",
    "lr_scale": "scales the learning rate, which a loss cannot",
}
_WEIGHT = "prime_rl_weight"


class MaskedSum(TokenObjective):
    """The sum over tokens, each with its weight by prime-rl; the trainer divides it."""

    name = "masked_sum"
    needs = {_WEIGHT}
    writes = {"aggregate"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        weight = batch.signal(_WEIGHT).double()
        return Terms(aggregate=lambda sequence, counted, rows, totals: weight)


def loss(inputs: Any, *, objective: Any) -> Any:
    """The loss of one response, summed over its tokens, and metrics, which prime-rl averages over responses.

    The ratio divides by prime-rl's ``inference_logprobs``, which are the ``rollout_logprobs`` too.

    Args:
        inputs: prime-rl's ``LossInputs``, ``(seq,)`` each.
        objective: path of a YAML file, or what such a file holds; the argument in ``[trainer.loss.kwargs]``.

    Returns:
        prime-rl's ``LossOutputs``.

    Raises:
        ConfigError: a method decides by more than one response; names it.
        MissingSignal: a method reads a signal that prime-rl does not give a loss.
        NonFinite: an advantage or a log-prob is NaN or Inf. It ends the run: one rank alone cannot refuse a step.
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    live, sampled, weights = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.loss_weights
    signals = {"rollout_logprobs": sampled, "ref_logprobs": inputs.ref_logprobs}
    batch = TokenBatch.from_padded(
        response_mask=inputs.loss_mask[None],
        advantages=inputs.advantages[None],
        old_logprobs=sampled[None],
        logprobs=live.detach()[None],
        extra={_WEIGHT: (torch.ones_like(live) if weights is None else weights).detach()[None]},
        sequence_ids=_identity(sampled),
        turn=turns_of(inputs.loss_mask[None]),
        **{name: values[None] for name, values in signals.items() if values is not None},
    )
    plan = make_plan(chosen(json.dumps(objective)), [batch])
    output = plan.loss(0, PolicyOutputs.from_padded(batch, logprobs=live[None]))
    metrics = {f"rlstab/{name}": live.new_tensor(mean.value) for name, mean in output.report.items() if mean.count}
    return LossOutputs(loss=output.loss, metrics=metrics)


def _identity(sampled: Tensor) -> Tensor:
    """``(1,)`` int64: the response by its log-probs, since prime-rl gives a loss no tokens."""
    digest = hashlib.blake2b(sampled.float().cpu().numpy().tobytes(), digest_size=7).digest()
    return torch.tensor([int.from_bytes(digest)], device=sampled.device)


@cache
def chosen(objective: str) -> Composition:
    """The objective of a JSON text, with the sum in the place of the mean over tokens.

    Raises:
        ConfigError: see :func:`loss`.
        MissingSignal: likewise.
    """
    composition = load_objective(json.loads(objective))
    check_complete(composition)
    members = [member for member in composition.members if member.name != "token_mean"]
    for leaf in walk(compose(*members)):
        reason = next((text for field, text in REFUSED.items() if field in leaf.method.writes), "")
        if measures(leaf.method) or leaf.method.init_state():
            reason = "decides by the whole optimizer step"
        if reason:
            raise ConfigError(
                f"'{leaf.name}' {reason}. prime-rl calls a loss with one response at a time. Remove '{leaf.name}', or "
                f"train with another host."
            )
    HOST.require(composition)
    return compose(*members, MaskedSum())
