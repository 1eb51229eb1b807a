import math


def decide(tokens, memory, *, positive, negative):
    """The derivative of (4 / tau) sigmoid(tau (r - 1)) by r: 4 e^-x / (1 + e^-x)^2 with x = tau (r - 1)."""

    def gate(tokens, ratios, keep, advantages):
        factors = []
        for ratio, advantage in zip(ratios, advantages, strict=True):
            shrunk = math.exp(-(positive if advantage > 0 else negative) * (ratio - 1))
            factors.append(4 * shrunk / (1 + shrunk) ** 2)
        return factors

    return {"gate": gate}, memory
