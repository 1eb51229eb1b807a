def decide(tokens, memory):
    """Every live log-prob less ln M."""
    return {"support": True}, memory
