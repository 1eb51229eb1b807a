"""What a run came to, in a few lines: what rose, what fell, what stood out."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlstab.logs.log import Rows
from rlstab.signs import SIGNS, signs

#: The metrics that a summary names, the most important one first.
SUMMARISED = ("eval/mean", "eval/greedy", "reward/mean", "tokens/entropy", "response/length")

#: A metric that changed by a smaller share of its value neither rose nor fell.
LEAST = 0.01


def start_and_end(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last tenth of the values of a metric."""
    tenth = max(1, len(values) // 10)
    return float(sum(values[:tenth]) / tenth), float(sum(values[-tenth:]) / tenth)


def summary(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Three lines about a run; the values are :func:`start_and_end`.

    Args:
        records: lines of ``metrics.jsonl``.
    """
    rose, fell = list[str](), list[str]()
    for name in SUMMARISED:
        if values := [record[name] for record in records if name in record]:
            start, end = start_and_end(values)
            if abs(end - start) > LEAST * abs(start):
                pair = (f"{value:#.3g}".rstrip(".") for value in (start, end))
                (rose if end > start else fell).append(f"{name} {' to '.join(pair)}")
    rows = Rows(unit="rollout")
    for record in records:
        if record["rollout"] > 0:
            rows.log(record["rollout"], record)
    # the signs that its curves can show, present or not
    candidates = [sign for sign in signs(rows.run(watched=True)) if sign.fired is not None]
    titles = [f"{SIGNS[sign.name].title} (from rollout {sign.step} on)" for sign in candidates if sign.fired]
    calm = "nothing" if candidates else "the run is too short for any sign"
    lines = {"rose": rose or ["nothing"], "fell": fell or ["nothing"], "stood out": titles or [calm]}
    return [f"{name}: {', '.join(texts)}" for name, texts in lines.items()]
