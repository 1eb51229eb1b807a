import math


def decide(tokens, memory, *, budget):
    """Drop the largest d^2 of tokens that moved A's way until the mean of the rest is at most tau; weight 0."""
    moved = [token["now"] - token["rollout"] for token in tokens]
    harmful = [token["A"] * d > 0 for token, d in zip(tokens, moved, strict=True)]
    left = sorted(d * d for d, here in zip(moved, harmful, strict=True) if here)
    while left and left[0] < left[-1] and math.fsum(left) / len(left) > budget:
        left = [square for square in left if square < left[-1]]
    return {"weight": [0.0 if h and d * d > left[-1] else 1.0 for d, h in zip(moved, harmful, strict=True)]}, memory
