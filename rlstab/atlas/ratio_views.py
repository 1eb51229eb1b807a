"""Panels of coefficients over a ratio."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlstab.atlas.axes import MINUS, PLAIN, Axis, round_axis
from rlstab.atlas.panel import DASHES, GREEN, PUNISHED, REWARDED, Line, Panel
from rlstab.atlas.probes import (
    BASE,
    LATER,
    LENGTH,
    MATTERS,
    RATIOS,
    Case,
    Measured,
    differ,
    measured,
    plain,
    touched,
    what_matters,
)
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import settings_of

_TICKS = {0.25: "¼", 0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4"}
#: What is moved, as the label of the axis and in a sentence.
AXES: Mapping[str, str] = {
    "live": "ratio r: live / old probability",
    "sampler": "mismatch: old / rollout probability",
    "reference": "live / reference probability",
}
_TITLES = {
    "": "Any token",
    "together": "By what the rest of its response does",
    "probability": "By its old probability p",
    "entropy": "By its entropy",
    "later": "By the optimizer step",
}
_COEFFICIENT = Axis(
    "coefficient of ∇ log p", -4.0, 4.0, {-4.0: f"{MINUS}4", -2.0: f"{MINUS}2", 0.0: "0", 2.0: "2", 4.0: "4"}
)


def over_ratio(method: TokenObjective, moved: str) -> tuple[str, list[Panel]]:
    """A caption, and a panel for each thing that matters beside the ratio.

    No panel where the coefficient is that of an untouched token.
    """
    found = measured(method, moved)
    if not touched(found, moved):
        return "", []
    keys = what_matters(found)
    unit = plain(moved)
    untouched = "untouched: r A" if moved == "live" else "untouched: A"
    grey = (Line(_points(unit), PLAIN, width=1.0, label=untouched), Line(_points(-unit), PLAIN, width=1.0))
    panels = [
        Panel(_TITLES[key], _across(moved), _COEFFICIENT, (*grey, *_lines(found, _cases(key)))) for key in keys or [""]
    ]
    return _caption(method, moved, keys), panels


def over_reference(method: TokenObjective) -> tuple[str, list[Panel]]:
    """What the penalties alone put before the gradient of a log-prob."""
    values = measured(method, "reference", advantage=0.0)[BASE].rewarded
    zero = Line(_points(0 * RATIOS), PLAIN, width=1.0, label="no penalty")
    line = Line(_points(values), GREEN, label="any token")
    up = round_axis(_COEFFICIENT.label, values.tolist(), zero=True)
    panel = Panel("What the penalty adds", _across("reference"), up, (zero, line))
    return _caption(method, "reference", []), [panel]


def _across(moved: str) -> Axis:
    return Axis(AXES[moved], 0.25, 4.0, _TICKS, log=True)


def _caption(method: TokenObjective, moved: str, keys: list[str]) -> str:
    """On what the coefficients were measured."""
    told = ["What stands before the gradient of a token's log-prob, by differentiating the loss."]
    rest = ", which do not move unless it is said" if "together" in keys else ""
    old = "; its old probability is 0.1 unless it is said" if "probability" in keys else ""
    told.append(f"The token is in the middle of a response of {LENGTH} tokens{rest}{old}; A is 1 or -1.")
    if moved == "live" and any(one.name == "anchor" for one in settings_of(type(method))):
        told.append("Sampler and trainer agree: `rollout_logprobs` is `old_logprobs`.")
    if moved == "sampler":
        told.append("The live policy is still the old one.")
    if moved == "reference":
        told[-1] = "The live policy is still the old one, and the advantage is 0, so that nothing else pulls."
    if "probability" in keys:
        told.append("A line ends where a probability would be above 1.")
    if "later" in keys:
        told.append(f"Step {LATER} follows {LATER - 1} like it.")
    return " ".join(told)


def _cases(key: str) -> Mapping[str, Case]:
    return MATTERS[key] if key else {"": BASE}


def _lines(found: Mapping[Case, Measured], cases: Mapping[str, Case]) -> list[Line]:
    """One per sign and case; cases that are one line share it."""
    lines = []
    for side, colour in (("rewarded", REWARDED), ("punished", PUNISHED)):
        alike: list[tuple[str, Tensor, list[str]]] = []
        for (label, case), dash in zip(cases.items(), DASHES, strict=False):
            values: Tensor = getattr(found[case], side)
            same = [labels for _, other, labels in alike if not differ(values, other)]
            if same:
                same[0].append(label)
            else:
                alike.append((dash, values, [label]))
        for dash, values, labels in alike:
            told = f": {', '.join(labels)}" if len(alike) > 1 else ""
            lines.append(Line(_points(values), colour, dash, label=f"{side}{told}"))
    return lines


def _points(values: Tensor) -> list[tuple[float, float]]:
    return list(zip(RATIOS.tolist(), values.tolist(), strict=True))
