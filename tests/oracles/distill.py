def decide(tokens, memory, *, coefficient, beta, top_k, alone):
    """L += c mean(D); without A where it is alone. Which D is decided where the signal is made."""
    penalty = {
        "coefficient": coefficient,
        "where": [True] * len(tokens),
        "value": [[token["apart"]] for token in tokens],
        "slope": [{"apart": [1.0]} for _ in tokens],
    }
    decided = {"penalties": [penalty]}
    return ({**decided, "bonus": [-token["A"] for token in tokens]} if alone else decided), memory
