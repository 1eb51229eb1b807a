from tests.oracles.loss import rows_counted


def decide(tokens, memory, *, length):
    """1/S sum_i 1/L sum_t, over sequences with a counted token."""

    def shares(tokens, counted):
        sequences = len(rows_counted(tokens, counted))
        return [1 / (sequences * length) if sequences else 0.0 for _ in tokens]

    return {"aggregate": shares}, memory
