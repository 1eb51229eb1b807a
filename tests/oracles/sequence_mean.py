from tests.oracles.loss import rows_counted


def decide(tokens, memory):
    """1/S sum_i 1/n_i sum_t, over sequences with n_i > 0."""

    def shares(tokens, counted):
        lengths = rows_counted(tokens, counted)
        return [1 / (len(lengths) * lengths.get(token["row"], 1)) if lengths else 0.0 for token in tokens]

    return {"aggregate": shares}, memory
