def decide(tokens, memory, *, coefficient):
    """L -= alpha mean(H)."""
    penalty = {
        "coefficient": -coefficient,
        "where": [True] * len(tokens),
        "value": [[token["live_H"]] for token in tokens],
        "slope": [{"live_H": [1.0]} for _ in tokens],
    }
    return {"penalties": [penalty]}, memory
