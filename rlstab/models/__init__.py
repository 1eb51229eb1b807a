"""Causal language models, with or without an adapter, and the signals of their tokens.

This room knows nothing of rollouts, objectives and optimizers.
"""

from rlstab.models.loading import SHIPPED

__all__ = ["SHIPPED"]
