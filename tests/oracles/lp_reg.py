import math

from tests.oracles.loss import k3
from tests.oracles.ranks import exact, largest


def decide(tokens, memory, *, share, min_p, coefficient, form, ratio_cap):
    """beta g KL(proxy || policy); g: among the rho least probable, kept by the min-p filter, A < 0."""
    pool = [-token["now"] for token in tokens if form == "paper" or token["A"] < 0]
    places = exact(share) * len(pool)
    k = math.ceil(places) if form == "paper" else max(1, math.floor(places))
    silent = not pool or (form == "code" and k == 1)
    chosen = [
        not silent
        and -token["now"] >= largest(pool, k)
        and token["now"] >= token["max"] + math.log(min_p)
        and token["A"] < 0
        for token in tokens
    ]
    value, slope, where = [], [], []
    for token, here in zip(tokens, chosen, strict=True):
        if form == "paper":  # of the full distribution: -ln Z
            value.append([-token["live_mass"]])
            slope.append({"live_mass": [-1.0]})
            where.append(here)
        else:  # k3 of the sampled token, only while the policy is below the proxy
            d = token["now"] - token["mass"] - token["logp"]
            parts, slopes = k3(d, 10.0)
            value.append(parts)
            slope.append({"logp": slopes})
            where.append(here and d > 0)
    decision = {"penalties": [{"coefficient": coefficient, "where": where, "value": value, "slope": slope}]}
    decision["chosen"] = chosen
    if form == "code":
        decision["unclipped"] = chosen
    if ratio_cap is not None:  # clip(r, 0, U) A; the code has no cap for A < 0
        decision["bounds"] = (1.0, ratio_cap - 1, ratio_cap if form == "paper" else None)
    return decision, memory
