import math


def decide(tokens, memory, *, alpha):
    """A (alpha pi_old + 1 - alpha)."""
    return {"weight": [alpha * math.exp(token["old"]) + (1 - alpha) for token in tokens]}, memory
