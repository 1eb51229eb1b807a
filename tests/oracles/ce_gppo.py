def decide(tokens, memory, *, low, high, pull_low, pull_high, dual_clip):
    """b1 (1 - low) below, b2 (1 + high) above, 0 above the dual clip, r elsewhere."""

    def pull(tokens, ratios, keep, advantages):
        pulls = []
        for ratio, advantage in zip(ratios, advantages, strict=True):
            value = ratio
            if advantage < 0 and ratio < 1 - low:
                value = pull_low * (1 - low)
            elif advantage > 0 and ratio > 1 + high:
                value = pull_high * (1 + high)
            elif advantage < 0 and dual_clip is not None and ratio > dual_clip:
                value = 0.0
            pulls.append(value)
        return pulls

    return {"surrogate": pull}, memory
