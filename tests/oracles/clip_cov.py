import itertools
import math

from tests.oracles.kl_cov import covariances_of
from tests.oracles.random_mask import uniform


def decide(tokens, memory, *, share, low, high, clip_low, clip_high, seed):
    """w = 0 on max(1, int(rho N)) of the candidates: low < cov < high, not yet clipped; the largest numbers drawn."""

    def clipped(token):
        gap = 0.0 if token["live_ratio"] else token["now"] - token["old"]
        ratio = math.exp(min(max(gap, -20.0), 20.0))
        return ratio > 1 + clip_high if token["A"] > 0 else token["A"] < 0 and ratio < 1 - clip_low

    places = [place for _, row in itertools.groupby(tokens, lambda token: token["row"]) for place, _ in enumerate(row)]
    candidates = [
        (uniform(2**41 + seed, token["row"], place), number)
        for number, (token, place, cov) in enumerate(zip(tokens, places, covariances_of(tokens), strict=True))
        if low < cov < high and not clipped(token)
    ]
    hit = {number for _, number in sorted(candidates, reverse=True)[: max(1, int(share * len(tokens)))]}
    return {"weight": [0.0 if number in hit else 1.0 for number in range(len(tokens))]}, memory
