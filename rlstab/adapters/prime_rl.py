"""An objective as prime-rl's custom loss: ``import_path = "rlstab.adapters.prime_rl.loss"`` in ``[trainer.loss]``.

prime-rl (0.8.0, ``src/prime_rl/trainer/rl/loss.py``) calls a custom loss once for each response, sums what it returns,
and divides by the tokens of the optimizer step over all ranks. So a method may do anything to a token that its own
response decides; nothing may be measured over the step, and the mean is that over its tokens.
"""

import json
from functools import cache
from typing import Any

import torch

from rlstab.adapters.evidence import hashes
from rlstab.adapters.training import open_objective
from rlstab.core.batch import TokenBatch
from rlstab.core.compose import Composition, compose
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms
from rlstab.core.turns import turns_of
from rlstab.hosts import adapted

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
        # the response by its log-probs, since prime-rl gives a loss no tokens
        sequence_ids=hashes([sampled.float().cpu().numpy().tobytes()], sampled.device),
        turn=turns_of(inputs.loss_mask[None]),
        **{name: values[None] for name, values in signals.items() if values is not None},
    )
    plan = make_plan(chosen(json.dumps(objective)), [batch])
    output = plan.loss(0, PolicyOutputs.from_padded(batch, logprobs=live[None]))
    metrics = {f"rlstab/{name}": live.new_tensor(mean.value) for name, mean in output.report.items() if mean.count}
    return LossOutputs(loss=output.loss, metrics=metrics)


@cache
def chosen(objective: str) -> Composition:
    """The objective of a JSON text, with the sum in the place of the mean over tokens.

    Raises:
        ConfigError: see :func:`loss`.
        MissingSignal: likewise.
    """
    composition = open_objective(json.loads(objective))
    adapted("prime_rl").require(composition)
    return compose(*(member for member in composition.members if member.name != "token_mean"), MaskedSum())
