import math

from tests.oracles.ranks import exact, largest


def decide(tokens, memory, *, share, coefficient):
    """beta |ln r| on the top max(1, floor(rho N)) of (A - mean A)(lp - mean lp)."""
    covariances = covariances_of(tokens)
    threshold = largest(covariances, max(1, math.floor(exact(share) * len(tokens)))) if tokens else 0.0
    chosen = [covariance >= threshold for covariance in covariances]
    drifts = [0.0 if token["live_ratio"] else token["logp"] - token["old"] for token in tokens]
    penalty = {
        "coefficient": coefficient,
        "where": chosen,
        "value": [[abs(drift)] for drift in drifts],
        "slope": [{"logp": [float((drift > 0) - (drift < 0))]} for drift in drifts],
    }
    return {"penalties": [penalty], "chosen": chosen}, memory


def covariances_of(tokens):
    advantage, logprob = (math.fsum(token[field] for token in tokens) / max(1, len(tokens)) for field in ("A", "now"))
    return [(token["A"] - advantage) * (token["now"] - logprob) for token in tokens]
