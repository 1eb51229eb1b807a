import math


def diverged(divergence, of):
    """The largest or mean distance of the tokens of a response from the sampler, by old and sampler's log-probs."""
    over, measure = divergence.split("_")
    if measure in ("kl", "tv"):
        far = []
        for logs in of:
            p, q = (min(max(math.exp(log), 1e-6), 1 - 1e-6) for log in logs)
            far.append(abs(p - q) if measure == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)))
        return math.fsum(far) / len(far)
    of = [old - rollout for old, rollout in of]
    distance = {
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.expm1(d) - d,
        "error": lambda d: math.exp(abs(d)),
    }[measure]
    far = [distance(min(max(d, -20.0), 20.0)) for d in of]
    return max(far) if over == "max" else math.fsum(far) / len(far)


def decide(
    tokens,
    memory,
    *,
    level,
    min_weight,
    max_weight,
    keep_low,
    keep_high,
    veto,
    divergence,
    max_divergence,
    normalize,
    denominator,
):
    """w = clip(rho) where l <= rho <= h, rho of the token, or the product or geometric mean of its response."""
    rows, logs = {}, {}
    for token in tokens:
        rows.setdefault(token["row"], []).append(token["old"] - token["rollout"])
        logs.setdefault(token["row"], []).append((token["old"], token["rollout"]))
    weight, keep = [], []
    for token in tokens:
        of = rows[token["row"]]
        shift = {
            "token": token["old"] - token["rollout"],
            "sequence": math.fsum(of),
            "geometric": math.fsum(of) / len(of),
        }[level]
        kept = keep_low is None or shift >= math.log(keep_low)
        kept = kept and (keep_high is None or shift <= math.log(keep_high))
        kept = kept and (veto is None or all(value >= math.log(veto) for value in of))
        kept = kept and (max_divergence is None or diverged(divergence, logs[token["row"]]) <= max_divergence)
        ratio = math.exp(min(max(shift, -20.0), 20.0))
        ratio = ratio if min_weight is None else max(ratio, min_weight)
        ratio = ratio if max_weight is None else min(ratio, max_weight)
        weight.append(ratio if kept else 0.0)
        keep.append(kept)
    if normalize:
        counted = [
            (token["row"], value)
            for token, value, kept in zip(tokens, weight, keep, strict=True)
            if kept or denominator == "all"
        ]
        of = [value for _, value in counted] if level == "token" else list(dict(counted).values())
        if math.fsum(of) > 0:
            weight = [value * len(of) / math.fsum(of) for value in weight]
    return {"weight": weight} | ({"keep": keep} if denominator == "kept" else {}), memory
