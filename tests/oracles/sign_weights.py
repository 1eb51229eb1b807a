def decide(tokens, memory, *, positive, negative):
    """lambda_+ on what is rewarded, lambda_- on what is punished."""
    return {"weight": [{1: positive, -1: negative, 0: 1.0}[sign(token["A"])] for token in tokens]}, memory


def sign(advantage):
    return (advantage > 0) - (advantage < 0)
