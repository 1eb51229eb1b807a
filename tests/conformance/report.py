"""The tables of docs/conformance.md, which the site adds when it is built: ``python -m tests.conformance.report``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.conformance.agreements import AGREEMENTS
from tests.conformance.deviations import DEVIATIONS
from tests.conformance.recorded import load


def published(source: str) -> str:
    """Repository with version or commit."""
    known = load(source)["provenance"]
    names = known["repository"].split(", ")
    if "commit" not in known:
        return f"{names[0]} {known['version']}"
    return ", ".join(f"{name} {one[:7]}" for name, one in zip(names, known["commit"].split(", "), strict=True))


def card(name: str) -> str:
    return name if name == "advantages" else f"[{name}](methods/{name}.md)"


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def lines() -> Iterator[str]:
    numbers: dict[str, list[str]] = {}
    for number, one in enumerate(DEVIATIONS, 1):
        name = one.method.__name__.rpartition(".")[2] if not isinstance(one.method, type) else one.method.name
        numbers.setdefault(name, []).append(str(number))
    yield row(["method", "published code", "settings here", "cases", "compared", "largest difference", "deviations"])
    yield row(["---"] * 7)
    for one in AGREEMENTS:
        listed = "; ".join([*([", ".join(numbers[one.card])] if one.card in numbers else []), card(one.card)])
        where = f"{published(one.source)}: {one.code}"
        largest = f"{one.largest():.0e}" if one.largest() else "0"
        yield row([one.method, where, one.settings, str(len(one.cases)), one.of, largest, listed])
    yield ""
    yield row(["", "method", "published code", "number", "theirs", "here"])
    yield row(["---"] * 6)
    for number, other in enumerate(DEVIATIONS, 1):
        name = next(key for key, values in numbers.items() if str(number) in values)
        figures = f"{other.theirs():.4g}", f"{other.here() + 0.0:.4g}"
        yield row([str(number), card(name), published(other.source), other.number, *figures])


if __name__ == "__main__":
    print("\n".join(lines()))
