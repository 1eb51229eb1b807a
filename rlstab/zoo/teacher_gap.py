"""Shared by methods that learn from a teacher's log-prob of each sampled token (on-policy distillation)."""

from torch import Tensor

from rlstab import TokenBatch


def teacher_gap(batch: TokenBatch) -> Tensor:
    """``(n,)`` nats: log-prob of the token under the teacher minus that under the policy that the ratio divides by."""
    return batch.signal("teacher_logprobs") - batch.old_logprobs
