import math

from tests.oracles.loss import kept_values, own_log_ratio


def decide(tokens, memory, *, power, final_power, steps):
    """rho^p = 1/n sum_t r_t^p over the kept tokens of the row; d ln rho / d ln r_t = r_t^p / sum r^p, here times n."""
    step = (memory or {"step": 0})["step"] + 1
    p = power + (final_power - power) * min((step - 1) / steps, 1)

    def ratio(tokens, keep, advantages, live_ratio):
        gaps = [gap for gap, _ in own_log_ratio(tokens, keep, advantages, live_ratio)]
        ratios = []
        for token, gap in zip(tokens, gaps, strict=True):
            row = kept_values(tokens, keep, gaps)[token["row"]]
            if not row:
                ratios.append((0.0, 0.0))
            elif p == 0:
                ratios.append((math.fsum(row) / len(row), 1.0))
            else:
                mean = math.fsum(math.exp(p * other) for other in row) / len(row)
                ratios.append((math.log(mean) / p, math.exp(p * gap) / mean))
        return ratios

    return {"ratio": ratio}, {"step": step}
