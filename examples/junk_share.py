"""How much of an answer is junk: a reward of weight 0, which measures and teaches nothing. See bench_spurious.yaml."""

from rlstab.tasks.chain import Chain

JUNK = frozenset(Chain(junk_symbols=1000).junk)


def junk_share(prompt: str, completion: str, answer: object) -> float:
    """The share of junk among the characters before the end of an answer; 0 if there are none."""
    body = completion.partition("$")[0]
    return sum(character in JUNK for character in body) / max(len(body), 1)
