import math


def decide(tokens, memory, *, base, power, anchor):
    """min(1, rho / b)^p with rho = (sum w)^2 / (S sum w^2) over the responses that have a token."""
    rows = {}
    for token in tokens:
        rows.setdefault(token["row"], []).append(token["now"] - token[anchor])
    shifts = [math.fsum(row) for row in rows.values()]
    if not shifts:
        return {"lr_scale": 1.0}, memory
    weights = [math.exp(shift - max(shifts)) for shift in shifts]
    share = math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight * weight for weight in weights))
    return {"lr_scale": min(1.0, share / base) ** power}, memory
