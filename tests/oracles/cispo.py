def decide(tokens, memory, *, cap, floor, negative_cap, negative_floor):
    """The gradient on a log-prob is clip(r, floor, cap) A, with bounds of their own where A < 0."""
    rewarded = (floor or 0.0, cap)
    punished = (
        rewarded[0] if negative_floor is None else negative_floor,
        rewarded[1] if negative_cap is None else negative_cap,
    )

    def pull(tokens, ratios, keep, advantages):
        bounds = [punished if advantage < 0 else rewarded for advantage in advantages]
        return [max(min(ratio, cap), floor) for ratio, (floor, cap) in zip(ratios, bounds, strict=True)]

    return {"surrogate": pull}, memory
