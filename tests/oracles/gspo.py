from tests.oracles.loss import own_log_ratio


def decide(tokens, memory):
    """ln s = 1/n sum_t d_t over the kept tokens of the row; the slope on the own log-prob is 1."""

    def ratio(tokens, keep, advantages, live_ratio):
        gaps = own_log_ratio(tokens, keep, advantages, live_ratio)
        found = []
        for token in tokens:
            row = [
                gap
                for (gap, _), one, kept in zip(gaps, tokens, keep, strict=True)
                if kept and one["row"] == token["row"]
            ]
            found.append((sum(row) / len(row) if row else 0.0, 1.0))
        return found

    return {"ratio": ratio}, memory
