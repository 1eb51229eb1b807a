def decide(tokens, memory, *, alpha, kappa):
    """A + min(alpha H, |A| / kappa)."""
    return {"bonus": [min(alpha * token["H"], abs(token["A"]) / kappa) for token in tokens]}, memory
