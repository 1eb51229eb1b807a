"""The tables of docs/conformance.md, which the site adds when it is built: ``python -m tests.conformance.report``."""

from collections.abc import Iterable, Iterator

from rlstab.stages import STAGES
from tests.conformance.agreements import AGREEMENTS
from tests.conformance.deviations import DEVIATIONS
from tests.conformance.inputs import load
from tests.conformance.recorded import any_sign


def published(source: str) -> str:
    """Repository with version or commit."""
    known = load(source)["provenance"]
    names = known["repository"].split(", ")
    if "commit" not in known:
        return f"{names[0]} {known['version']}"
    return ", ".join(f"{name} {commit[:7]}" for name, commit in zip(names, known["commit"].split(", "), strict=True))


def card(name: str) -> str:
    return name if name == "advantages" else f"[{name}]({'stages' if name in STAGES.names() else 'methods'}/{name}.md)"


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def lines() -> Iterator[str]:
    numbers: dict[str, list[str]] = {}
    for number, deviation in enumerate(DEVIATIONS, 1):
        numbers.setdefault(deviation.card, []).append(str(number))
    yield row(["method", "published code", "settings here", "cases", "compared", "largest difference", "deviations"])
    yield row(["---"] * 7)
    for agreement in AGREEMENTS:
        with any_sign():
            name, largest = agreement.card, agreement.largest()
        listed = "; ".join([*([", ".join(numbers[name])] if name in numbers else []), card(name)])
        where = f"{published(agreement.source)}: {agreement.code}"
        far, cases = f"{largest:.0e}" if largest else "0", str(len(agreement.cases))
        yield row([agreement.method, where, agreement.settings, cases, agreement.of, far, listed])
    yield ""
    yield row(["", "method", "published code", "number", "theirs", "here"])
    yield row(["---"] * 6)
    for number, deviation in enumerate(DEVIATIONS, 1):
        with any_sign():
            figures = [f"{figure + 0.0:.4g}" for figure in deviation.measured()]
        yield row([str(number), card(deviation.card), published(deviation.source), deviation.number, *figures])


if __name__ == "__main__":
    print("\n".join(lines()))
