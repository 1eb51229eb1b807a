import math


def decide(tokens, memory, *, max_gap, anchor):
    """0 where A < 0 and the mean over the response of ln q - ln p is above delta, else 1."""

    def gate(tokens, ratios, keep, advantages):
        rows = {}
        for token, ratio in zip(tokens, ratios, strict=True):
            # a ratio of exactly 1 is that of a live policy which is its own denominator, or of one that has not moved
            still = anchor == "old" and ratio == 1
            rows.setdefault(token["row"], []).append(0.0 if still else token[anchor] - token["logp"])
        far = {row: math.fsum(gaps) / len(gaps) > max_gap for row, gaps in rows.items()}
        return [
            0.0 if far[token["row"]] and advantage < 0 else 1.0
            for token, advantage in zip(tokens, advantages, strict=True)
        ]

    return {"gate": gate}, memory
