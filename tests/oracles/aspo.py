from tests.oracles.ranks import share_quantile


def decide(tokens, memory, *, room, room_high_entropy, share, cap):
    """A > 0: min(1/r, c), 0 above 1 + e; A < 0: min(r, c), 0 below 1 - e; e by the entropy quantile of the row."""
    rows = {token["row"] for token in tokens}
    edges = {row: share_quantile([token["H"] for token in tokens if token["row"] == row], share) for row in rows}
    rooms = [room if token["H"] <= edges[token["row"]] else room_high_entropy for token in tokens]

    def pull(tokens, ratios, keep, advantages):
        pulls = []
        for ratio, e, advantage in zip(ratios, rooms, advantages, strict=True):
            if advantage > 0:
                pulls.append(0.0 if ratio > 1 + e else min(1 / ratio, cap))
            else:
                pulls.append(0.0 if ratio < 1 - e else min(ratio, cap))
        return pulls

    return {"surrogate": pull}, memory
