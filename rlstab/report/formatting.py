"""Numbers and names for readers: decimals, minus signs, intervals, lists, and what metrics are called on axes."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

#: Up to this many names are listed.
SHOWN = 6

#: Shown in place of a missing number, and before a negative one.
NOTHING, MINUS = "\u2013", "\u2212"


def setting(value: float) -> str:
    """A setting as a user may have written it: ``1.5e-4``, ``0.02``, ``16``."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def decimals(value: float | None, places: int, signed: bool = False) -> str:
    """A number of a column, with as many decimals as its neighbours."""
    if value is None or not math.isfinite(value):
        return NOTHING
    text = f"{abs(value):.{places}f}"
    zero = float(text) == 0
    return ("" if zero else MINUS if value < 0 else "+" if signed else "") + text


def significant(values: Iterable[float | None], digits: int) -> list[float | None]:
    """Numbers with so many significant digits; None where one is missing or not finite."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}") for value in values]


def places(values: list[float]) -> int:
    """Decimals for a column: three, fewer for large numbers, more if all are small; at most six."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest >= 10:
        return 1
    return 3 if largest == 0 or largest >= 0.01 else min(6, 1 - math.floor(math.log10(largest)))


def estimate(
    value: float | None, low: float | None, high: float | None, digits: int | None = None, signed: bool = False
) -> str:
    """A number with its interval, if it has one; with as many decimals as its column, or as its size asks for."""
    if digits is None:
        digits = places([number for number in (value, low, high) if number is not None])
    texts = [decimals(number, digits, signed) for number in (value, low, high)]
    return texts[0] if low is None or high is None else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def size(value: float | None, low: float | None, high: float | None, unit: str) -> str:
    """A difference without its sign, which the verdict gives, with its interval turned likewise."""
    if value is not None and value < 0:
        value, low, high = -value, None if high is None else -high, None if low is None else -low
    return estimate(value, low, high) + (f" {unit}" if unit else "")


def round_step(least: float) -> float:
    """The smallest step of an axis that is at least this: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A key that sorts line 2 before line 10, and numbers before letters."""
    parts = filter(None, re.split(r"([0-9]+)", text))
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts]


def listed(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *first, last = list(names)
    return f"{', '.join(first)} and {last}" if first else last


def few(names: Sequence[str]) -> str:
    """The first names, and the number of others."""
    return listed([*names[:SHOWN], *([f"{len(names) - SHOWN} more"] if len(names) > SHOWN else [])])


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text that YAML may have broken into lines."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


#: Titles of metrics, their order, and the figures that show them: ``metrics.yaml``.
METRICS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "metrics.yaml").read_text(encoding="utf-8"))
_FIRST = {name: position for position, name in enumerate(METRICS["first"])}


@dataclass(frozen=True)
class Axis:
    """How a metric is shown: its title, and whether its axis begins at zero."""

    title: str
    zero: bool


def axis(metric: str) -> Axis:
    """The axis of any metric; unknown ones are called by their own name."""
    last = metric.rpartition("/")[2]
    title = f"held-out {last}" if last.startswith("pass@") else metric
    return Axis(METRICS["titles"].get(metric, title), not {metric, last} & set(METRICS["free"]))


def own_title(metric: str, method: str = "") -> str:
    """The title of what a method logs, with its unit if known; without the method, which may be in a heading."""
    last = metric.rpartition("/")[2]
    unit, name = METRICS["units"].get(last), metric.removeprefix(f"{method}/")
    if last == "share":
        return f"{name} of tokens"
    return f"{name}, {unit}" if unit else name


def in_order(metrics: set[str]) -> list[str]:
    """Sort metrics that readers look for first; ``pass@4`` before ``pass@16``."""

    def place(name: str) -> tuple[int, int, str]:
        stem, mark, number = name.partition("@")
        return _FIRST.get(stem + mark, len(_FIRST)), int(number) if number.isdecimal() else 0, name

    return sorted(metrics, key=place)
