from tests.oracles.anchors import anchor_of, probability


def decide(tokens, memory, *, delta, anchor):
    """1 - sign(A (p - q)) |p - q| / delta."""

    def gate(tokens, ratios, keep, advantages):
        factors = []
        for token, ratio, advantage in zip(tokens, ratios, advantages, strict=True):
            moved = probability(token["logp"]) - probability(anchor_of(token, ratio, anchor))
            outwards = (advantage > 0 and moved > 0) or (advantage < 0 and moved < 0)
            factors.append(1 - abs(moved) / delta if outwards else 1 + abs(moved) / delta)
        return factors

    return {"gate": gate}, memory
