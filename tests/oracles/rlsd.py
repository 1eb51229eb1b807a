import math


def decide(tokens, memory, *, mix, clip, punished_only):
    """s = (1 - m) + m clip((q / p_old)^sign(A), 1 - e, 1 + e)."""
    weight = []
    for token in tokens:
        sign = (token["A"] > 0) - (token["A"] < 0)
        gap = min(max(sign * (token["teacher"] - token["old"]), -20.0), 20.0)
        scale = (1 - mix) + mix * min(max(math.exp(gap), 1 - clip), 1 + clip)
        weight.append(1.0 if punished_only and sign >= 0 else scale)
    return {"weight": weight}, memory
