from tests.oracles.ranks import share_quantile


def decide(tokens, memory, *, share, denominator):
    """1[H >= the (1 - rho)-quantile of H over all tokens], divided by the selected tokens or by all."""
    threshold = share_quantile([token["H"] for token in tokens], share)
    forking = [token["H"] >= threshold for token in tokens]
    if denominator == "kept":
        return {"keep": forking}, memory
    return {"weight": [float(forks) for forks in forking]}, memory
