import math


def decide(tokens, memory, *, half_life, low, high, max_ratio, safe_ratio):
    """f = clip(exp F, low, high), F_t = d_t + gamma F_{t+1}; at most 1 where A < 0 and r > r_safe."""
    drifts = [0.0 if token["live_ratio"] else token["logp"] - token["old"] for token in tokens]

    def gate(tokens, ratios, keep, advantages):
        factors, future, row = [], 0.0, None
        for token, drift, ratio, advantage in reversed(list(zip(tokens, drifts, ratios, advantages, strict=True))):
            enters = max_ratio is None or ratio <= max_ratio
            future = 0.0 if token["row"] != row else future
            future = (min(max(drift, -20.0), 20.0) if enters else 0.0) + 2 ** (-1 / half_life) * future
            row = token["row"]
            factor = min(max(math.exp(min(future, 700.0)), low), high)
            if safe_ratio is not None and advantage < 0 and ratio > safe_ratio:
                factor = min(factor, 1.0)
            factors.append(factor)
        return factors[::-1]

    return {"gate": gate}, memory
