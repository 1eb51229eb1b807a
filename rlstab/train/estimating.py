"""Advantages of a rollout by its estimator, with the evidence that only the policy which learns can give."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
from torch import Tensor

from rlstab.core.comm import Comm
from rlstab.core.method import State, measure_all
from rlstab.stages.stage import AdvantageEstimator
from rlstab.train.making import checked, report
from rlstab.train.metrics import Metrics
from rlstab.train.policy import Policy
from rlstab.train.rollout import Rollout
from rlstab.train.sequence_gradients import squared_gradients
from rlstab.train.step import forward_signals

#: Signals that an estimator means of the policy that learns, and not of the sampler, which may be older.
FRESH = frozenset({"logprobs", "sum_p_sq"})


class Estimating:
    """Estimates advantages just before a rollout is learnt.

    Args:
        estimator: the stage.
        policy: that learns.
        comm: over all ranks.
        temperature: of sampling and of the loss.
        micro_batch_size: responses in one forward.
    """

    def __init__(
        self, estimator: AdvantageEstimator, policy: Policy, comm: Comm, temperature: float, micro_batch_size: int
    ) -> None:
        self.estimator, self.policy, self.comm = estimator, policy, comm
        self.temperature, self.micro_batch_size = temperature, micro_batch_size

    def advantages(self, rollout: Rollout, state: State, metrics: Metrics) -> tuple[Tensor, State]:
        """``(R,)`` or ``(R, T)`` float32 on the CPU, and the next state of the estimator.

        Raises:
            MethodError: the estimator returned no such tensor.
        """
        one, responses = self.estimator, rollout.responses
        extra = {**responses.extra, **self._fresh(rollout, one.needs & FRESH)}
        extra |= {name: self._evidence(name, rollout) for name in sorted(one.needs - extra.keys())}
        responses = replace(responses, extra=extra)
        stat, after = measure_all(one, [responses], state, self.comm)
        report(one, responses, stat, state, metrics)
        found = one.advantages(responses, stat, state)
        length = rollout.sequences.response_ids.shape[1]
        return checked(one, "advantages", found, len(responses), tokens=length).float(), after

    def _evidence(self, name: str, rollout: Rollout) -> Tensor:
        if name == "squared_gradient":
            return squared_gradients(self.policy, rollout.sequences, self.temperature, ~rollout.responses.even)
        return rollout.signals[name].cpu()

    def _fresh(self, rollout: Rollout, names: Set[str]) -> dict[str, Tensor]:
        """``(R, T)`` signals of the policy as it is now, 0 where there is no token."""
        shape = rollout.sequences.response_ids.shape
        found = {name: torch.zeros(shape) for name in names}
        for rows in torch.arange(shape[0]).split(self.micro_batch_size) if names else ():
            if len(rows):
                values = forward_signals(self.policy, rollout.sequences, rows, self.temperature, set(names), {})
                for name, one in values.items():
                    found[name][rows, : one.shape[1]] = one.cpu()
        return found
