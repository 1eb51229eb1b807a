"""Shared by methods that give all tokens of a response one ratio."""

from torch import Tensor

from rlstab import Constants, PolicyOutputs, TokenBatch

EXPECTS = {
    "sequence_mean": "its ratio is that of a response, so responses should have equal votes. Under a token mean a long "
    "one outvotes the others."
}


def kept_mean(log_ratios: Tensor, constants: Constants, batch: TokenBatch) -> Tensor:
    """``(n,)`` the mean over the kept tokens of the response: the log of its geometric mean."""
    return batch.spread(batch.sequence_mean(log_ratios, constants.keep)).to(log_ratios.dtype)


def gradient_of(policy: PolicyOutputs, constants: Constants) -> Tensor:
    """``(n,)`` zeros that carry the gradient of each token's own log-prob."""
    return policy.logprobs - constants.anchor.logprobs
