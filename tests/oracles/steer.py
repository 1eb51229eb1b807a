import math


def decide(tokens, memory, *, high, low, form):
    """Omega = |A / q p (1 - p)(ln p + H)|; linear from min (high) to max (low), or exp(-k Omega), 1 down to low."""
    changes = [change(token) for token in tokens]
    least, most = min(changes, default=0.0), max(changes, default=0.0)
    if form == "exponential":
        k = -math.log(low) / max(most, 0.02)
        return {"weight": [math.exp(-k * change) for change in changes]}, memory
    if most == least:
        return {"weight": [(high + low) / 2] * len(tokens)}, memory
    return {"weight": [high - (change - least) * (high - low) / (most - least) for change in changes]}, memory


def change(token):
    gap = 0.0 if token["live_ratio"] else token["now"] - token["old"]
    ratio = math.exp(min(max(gap, -20.0), 20.0))  # p / q
    return abs(token["A"] * ratio * -math.expm1(token["now"]) * (token["now"] + token["H"]))
