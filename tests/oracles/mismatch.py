def decide(tokens, memory, *, of, to):
    """It changes nothing; what it reports is in tests/zoo/test_mismatch.py."""
    return {}, memory
