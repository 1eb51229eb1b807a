def decide(tokens, memory, *, updates, denominator):
    """keep = lag <= k."""
    keep = [token["lag"] <= updates for token in tokens]
    return ({"keep": keep} if denominator == "kept" else {"weight": [float(kept) for kept in keep]}), memory
