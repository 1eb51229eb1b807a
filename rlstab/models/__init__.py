"""Causal language models, with or without an adapter, and the signals of their tokens.

This room knows nothing of rollouts, objectives and optimizers.
"""

from rlstab.config.user_code import SHIPPED_MODELS as SHIPPED

__all__ = ["SHIPPED"]
