import statistics


def decide(tokens, memory, *, coefficient, normalise, epsilon):
    """A + c (r_ik - mean) / (std + e), over the answers of the group that have a turn k; rows are groups of two."""
    rewards = {}
    for token in tokens:
        rewards.setdefault((token["row"] // 2, token["turn"]), {})[token["row"]] = token["earned"]

    def credit(token):
        others = rewards[token["row"] // 2, token["turn"]].values()
        gap = coefficient * (token["earned"] - statistics.fmean(others))
        return gap / ((statistics.stdev(others) if len(others) > 1 else 0.0) + epsilon) if normalise else gap

    return {"bonus": [credit(token) for token in tokens]}, memory
