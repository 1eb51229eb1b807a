import math

from tests.oracles.ranks import exact
from tests.oracles.ranks import quantile as quantile_of


def decide(tokens, memory, *, max_prob, quantile, population):
    """I = 0 iff A > 0, p < tau_p and H < tau_h; tau_h: a quantile of the candidates (v4, v5) or of all (v1-v3)."""
    candidate = [token["A"] > 0 and token["now"] < math.log(max_prob) for token in tokens]
    pool = [token["H"] for token, rare in zip(tokens, candidate, strict=True) if rare or population == "all"]
    threshold = quantile_of(pool, exact(quantile))
    keep = [not (rare and token["H"] < threshold) for token, rare in zip(tokens, candidate, strict=True)]
    return {"keep": keep}, memory
