def decide(tokens, memory, *, cap, floor):
    """The gradient on a log-prob is clip(r, floor, cap) A."""

    def pull(tokens, ratios, keep, advantages):
        return [max(min(ratio, cap), floor or 0.0) for ratio in ratios]

    return {"surrogate": pull}, memory
