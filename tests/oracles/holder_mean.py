import math

from tests.oracles.loss import kept_values, own_log_ratio


def decide(tokens, memory, *, power, final_power, steps):
    """rho^p = 1/n sum_t r_t^p over the kept tokens of the row; d ln rho / d ln r_t = r_t^p / sum r^p, here times n."""
    step = (memory or {"step": 0})["step"] + 1
    p = power + (final_power - power) * min((step - 1) / steps, 1)

    def ratio(tokens, keep, advantages, live_ratio):
        gaps = [gap for gap, _ in own_log_ratio(tokens, keep, advantages, live_ratio)]
        means = []
        for token, gap in zip(tokens, gaps, strict=True):
            row = kept_values(tokens, keep, gaps)[token["row"]]
            if not row:
                means.append((0.0, 0.0))
            elif p == 0:
                means.append((math.fsum(row) / len(row), 1.0))
            else:
                mean = math.fsum(math.exp(p * gap) for gap in row) / len(row)
                means.append((math.log(mean) / p, math.exp(p * gap) / mean))
        return means

    return {"ratio": ratio}, {"step": step}
