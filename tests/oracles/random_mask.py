import itertools
from fractions import Fraction

BITS = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def decide(tokens, memory, *, share, sign, seed):
    """Drop where A > 0 (or anywhere) and a number drawn by (seed, sequence, place in the sequence) is below rho."""
    places = [place for _, row in itertools.groupby(tokens, lambda token: token["row"]) for place, _ in enumerate(row)]
    keep = []
    for token, place in zip(tokens, places, strict=True):
        drawn = uniform(2**40 + seed, token["row"], place) < Fraction(share)
        keep.append(not (drawn and (sign == "all" or token["A"] > 0)))
    return {"keep": keep}, memory


def uniform(seed, *identity):
    """The finalizer of splitmix64 over the seed and then each number, in whole numbers: a multiple of 2^-53."""
    state = seed % BITS
    for part in identity:
        state = (mixed(state + GOLDEN) + part) % BITS
    return Fraction(mixed(state + GOLDEN) >> 11, 2**53)


def mixed(x):
    x %= BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % BITS
    return x ^ (x >> 31)
