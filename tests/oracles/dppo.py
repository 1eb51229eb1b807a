import math

from tests.oracles.anchors import anchor_of, probability


def decide(tokens, memory, *, divergence, high, low, cap, anchor, stops):
    """min(p / q, C), and 0 where D(q, p) is beyond the bound of A's sign, and the move A's way or any is stopped."""
    D = {"tv": total_variation, "kl": binary_kl}[divergence]

    def pull(tokens, ratios, keep, advantages):
        pulls = []
        for token, ratio, advantage in zip(tokens, ratios, advantages, strict=True):
            live, other = token["logp"], anchor_of(token, ratio, anchor)
            any_way = stops == "all"
            risen, fallen = advantage > 0 and (any_way or live > other), advantage < 0 and (any_way or live < other)
            moved = D(probability(other), probability(live))
            stopped = (risen and moved > high) or (fallen and moved > low)
            pulls.append(0.0 if stopped else min(math.exp(min(max(live - other, -20.0), 20.0)), cap))
        return pulls

    return {"surrogate": pull}, memory


def total_variation(q, p):
    return abs(q - p)


def binary_kl(q, p):
    """q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)), where 0 ln 0 is 0."""
    here = q * math.log(q / p)
    if q == 1:
        return here
    return here + (1 - q) * math.log((1 - q) / (1 - p)) if p < 1 else math.inf
