"""A causal language model: loaded with or without an adapter, and asked for the signals of tokens.

It knows nothing of rollouts, objectives and optimizers.
"""

from rlstab.models.loading import SHIPPED

__all__ = ["SHIPPED"]
