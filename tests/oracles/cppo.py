from tests.oracles.anchors import anchor_of, probability
from tests.oracles.ranks import exact
from tests.oracles.ranks import quantile as quantile_of


def decide(tokens, memory, *, delta, min_weight, min_budget, quantile, anchor):
    """keep where A (r - 1) <= 0, or w D <= min(delta, delta + db W - S), sums over the tokens before in the row."""

    def gate(tokens, ratios, keep, advantages):
        rows = {}
        for i, token in enumerate(tokens):
            rows.setdefault(token["row"], []).append(i)
        factors = [0.0] * len(tokens)
        for places in rows.values():
            others = [anchor_of(tokens[i], ratios[i], anchor) for i in places]
            D = [abs(probability(tokens[i]["logp"]) - probability(q)) for i, q in zip(places, others, strict=True)]
            db = min(max(quantile_of(D, exact(quantile)), min_budget), 2 * min_budget)
            S = W = 0.0
            for t, (i, q) in enumerate(zip(places, others, strict=True)):
                w = 1 - (1 - min_weight) * t / max(len(places) - 1, 1)
                shift = tokens[i]["logp"] - q
                outwards = (advantages[i] > 0 and shift > 0) or (advantages[i] < 0 and shift < 0)
                factors[i] = 1.0 if not outwards or w * D[t] <= min(delta, delta + db * W - S) else 0.0
                S += w * D[t]
                W += w
        return factors

    return {"gate": gate}, memory
