import math


def decide(tokens, memory, *, coefficient, sharpness):
    """c g d with d = ln q - ln p and g = sigmoid(b d) as a constant: slope -g."""
    value, slope = [], []
    for token in tokens:
        gap = token["teacher"] - token["logp"]
        gate = 1 / (1 + math.exp(-sharpness * gap)) if sharpness * gap > -700 else 0.0
        value.append([gate * gap])
        slope.append({"logp": [-gate]})
    everywhere = [True] * len(tokens)
    return {"penalties": [{"coefficient": coefficient, "where": everywhere, "value": value, "slope": slope}]}, memory
