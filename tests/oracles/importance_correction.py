import math


def decide(tokens, memory, *, level, min_weight, max_weight, keep_low, keep_high, veto, normalize, denominator):
    """w = clip(rho) where l <= rho <= h, rho of the token, or the product or geometric mean of its response."""
    rows = {}
    for token in tokens:
        rows.setdefault(token["row"], []).append(token["old"] - token["rollout"])
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
        kept = kept and (veto is None or all(one >= math.log(veto) for one in of))
        ratio = math.exp(min(max(shift, -20.0), 20.0))
        ratio = ratio if min_weight is None else max(ratio, min_weight)
        ratio = ratio if max_weight is None else min(ratio, max_weight)
        weight.append(ratio if kept else 0.0)
        keep.append(kept)
    if normalize:
        counted = [
            (token["row"], one)
            for token, one, kept in zip(tokens, weight, keep, strict=True)
            if kept or denominator == "all"
        ]
        of = [one for _, one in counted] if level == "token" else list(dict(counted).values())
        if math.fsum(of) > 0:
            weight = [one * len(of) / math.fsum(of) for one in weight]
    return {"weight": weight} | ({"keep": keep} if denominator == "kept" else {}), memory
