"""A mask of your own, in ten lines."""

from rlstab import Terms, TokenObjective


class SkipCertain(TokenObjective):
    """Drop tokens of which the policy was nearly certain."""

    name = "skip_certain"
    needs = {"old_logprobs"}
    writes = {"keep"}
    max_logprob: float = -0.01

    def terms(self, batch, stat, state):
        return Terms(keep=batch.old_logprobs < self.max_logprob)
