def decide(tokens, memory, *, coefficient, alone):
    """A' = A + c (ln q - ln p_old); without A where it is alone."""
    bonus = [coefficient * (token["teacher"] - token["old"]) - (token["A"] if alone else 0.0) for token in tokens]
    return {"bonus": bonus}, memory
