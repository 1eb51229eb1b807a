def decide(tokens, memory, *, denominator):
    """Nothing of a response that was cut off counts; it leaves the divisor, or weighs 0 in it."""
    ended = [token["cut"] == 0 for token in tokens]
    if denominator == "kept":
        return {"keep": ended}, memory
    return {"weight": [float(whole) for whole in ended]}, memory
