"""Rewards that break a run on purpose, for ``python -m benchmarks diagnose``."""

#: An answer that is always the same, whatever is asked.
FIXED = "1+1=2"


def boxed(prompt: str, completion: str, answer: object) -> bool:
    r"""Looks for an answer in \\boxed{}, which this model never writes: every reward is 0."""
    return "\\boxed{" in completion


def longer(prompt: str, completion: str, answer: object) -> float:
    """Pays only for length, so that answers grow until they are cut off."""
    return min(1.0, len(completion) / 60)


def fixed(prompt: str, completion: str, answer: object) -> float:
    """Pays for one fixed text, whatever is asked: characters that agree from the first on, over the longer length."""
    same = [mine == other for mine, other in zip(completion, FIXED, strict=False)]
    return [*same, False].index(False) / max(len(completion), len(FIXED))
