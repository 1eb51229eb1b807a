def decide(tokens, memory, *, low, high, dual_clip):
    """min(r A, clip(r, 1 - low, 1 + high) A); for A < 0 the loss is at most -A c."""
    return {"bounds": (low, high, dual_clip)}, memory
