from tests.oracles.loss import rows_counted


def decide(tokens, memory):
    """1/S sum_i sum_k 1/|T_ik| sum_{t in T_ik}; tokens below block 0 are in no T, and in one more under a penalty."""
    blocks = [(token["row"], max(token["block"], -1)) for token in tokens]

    def shares(tokens, counted):
        rows = len(rows_counted(tokens, counted))
        sizes = {}
        for block, counts in zip(blocks, counted, strict=True):
            sizes[block] = sizes.get(block, 0) + counts
        return [1 / (rows * max(sizes[block], 1)) if rows else 0.0 for block in blocks]

    return {"aggregate": shares, "weight": [float(token["block"] >= 0) for token in tokens]}, memory
