def decide(tokens, memory, *, length):
    """1 / |W| sum over groups of 1 / (G L) sum of the tokens with A > 0; here each row is a group, so G is 1."""
    winners = len({token["row"] for token in tokens if token["A"] > 0})

    def shares(tokens, counted):
        return [1 / (max(1, winners) * length) for _ in tokens]

    return {"weight": [float(token["A"] > 0) for token in tokens], "aggregate": shares}, memory
