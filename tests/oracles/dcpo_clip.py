import math


def decide(tokens, memory, *, low, high, cap, dual_clip):
    """Bounds 1/2 + 1/2 sqrt(max(1 - 4 e_low / q, 0)) and min(1/2 + 1/2 sqrt(1 + 4 e_high / q), r_max), as 1 -+ room."""
    below, above = [], []
    for token in tokens:
        q = math.exp(min(token["old"], 0.0))
        below.append(1 - (1 + math.sqrt(max(1 - 4 * low / q, 0.0))) / 2)
        above.append(min((1 + math.sqrt(1 + 4 * high / q)) / 2, cap) - 1)
    return {"bounds": (below, above, dual_clip)}, memory
