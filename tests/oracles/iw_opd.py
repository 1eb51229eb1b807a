import math


def decide(tokens, memory, *, gain):
    """A' = a (1 + g (1 - sum before |a| / sum |a|)), with a = ln q - ln p_old, over the tokens of the response."""
    rows = {}
    for token in tokens:
        rows.setdefault(token["row"], []).append(abs(token["teacher"] - token["old"]))
    bonus, before = [], {row: [] for row in rows}
    for token in tokens:
        gap, row = token["teacher"] - token["old"], token["row"]
        total = math.fsum(rows[row])
        share = math.fsum(before[row]) / total if total else 0.0
        bonus.append(gap * (1 + gain * (1 - share)) - token["A"])
        before[row].append(abs(gap))
    return {"bonus": bonus}, memory
