"""What the live policy is compared with."""

import math


def anchor_of(token, ratio, anchor):
    """Log-prob of the token under the anchor; where the ratio is exactly 1, the old policy is the live one."""
    if anchor == "rollout":
        return token["rollout"]
    return token["logp"] if ratio == 1 else token["old"]


def probability(logprob):
    """At most 1."""
    return math.exp(min(logprob, 0.0))
