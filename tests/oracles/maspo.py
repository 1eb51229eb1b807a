import math


def decide(tokens, memory, *, sigma, alpha, positive, negative, max_sigma, min_scale, max_scale, cap):
    """exp(-(r - 1)^2 / (2 width^2)) where A pushes r further from 1; the clips are those of the code."""

    def gate(tokens, ratios, keep, advantages):
        factors = []
        for token, ratio, A in zip(tokens, ratios, advantages, strict=True):
            base = min(max(sigma / math.exp(token["old"]) ** alpha, sigma), max_sigma)
            scale = 1 + positive * A if A > 0 else 1 / (1 - negative * A)
            width = base * min(max(scale, min_scale), max_scale)
            factor = 1.0
            if (A > 0 and ratio > 1) or (A < 0 and ratio < 1):
                factor = math.exp(-((ratio - 1) ** 2) / (2 * width**2))
            elif A < 0 and cap is not None:
                factor = min(ratio, cap) / ratio
            factors.append(factor)
        return factors

    return {"gate": gate}, memory
