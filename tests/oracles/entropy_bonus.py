from tests.oracles.loss import token_mean


def decide(tokens, memory, *, coefficient, aggregate):
    """L -= alpha mean(H), the mean of the loss or over tokens."""
    penalty = {
        "coefficient": -coefficient,
        "aggregate": None if aggregate == "loss" else token_mean,
        "where": [True] * len(tokens),
        "value": [[token["live_H"]] for token in tokens],
        "slope": [{"live_H": [1.0]} for _ in tokens],
    }
    return {"penalties": [penalty]}, memory
