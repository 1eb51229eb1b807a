def decide(tokens, memory, *, coefficient):
    """1/N_main sum over main tokens + lambda/N_branch sum over those of branches, as factors on 1/N."""
    branches = [token["branch"] > 0 for token in tokens]
    counts = {True: branches.count(True), False: branches.count(False)}
    means = {True: coefficient, False: 1.0}
    return {"weight": [means[branch] * len(tokens) / counts[branch] for branch in branches]}, memory
