"""What a comparison found, in sentences: every difference with its interval, nothing ranked, silence never a result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlstab.report.comparison import Comparison, Table
from rlstab.report.numbers import estimate, setting
from rlstab.report.outcomes import Outcome
from rlstab.report.statistics import Verdict

#: Settings of which each has a sentence of its own; of more, only what differs is told.
_FEW_TABLES = 3
#: Beside the main outcome, by name: what a policy may have paid for it.
_BESIDE = ("eval/entropy", "tokens/entropy")


def findings(comparison: Comparison) -> list[str]:
    """Paragraphs, the first about the main outcome."""
    if not comparison.outcomes:
        return ["No run has an evaluation or a reward: there is nothing to compare.", *_collapses(comparison)]
    main, *others = comparison.outcomes
    judged = [table for table in comparison.tables if _compared(table, main)]
    found = [_main(table, main, comparison) for table in judged] if len(judged) <= _FEW_TABLES else []
    if len(judged) > _FEW_TABLES:
        found = [_many(judged, main)]
    if not judged:
        found = [f"Nothing is compared in {main.title}: it takes a base and another method with finished runs."]
    found += _beside(judged, others)
    found += _sweeps(comparison)
    found += _collapses(comparison)
    return found + _inert(comparison)


def listed(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *most, last = list(names)
    return f"{', '.join(most)} and {last}" if most else last


def _compared(table: Table, outcome: Outcome) -> list[str]:
    return [name for name in table.methods if table.cells[name, outcome.name].paired is not None]


def _where(table: Table, comparison: Comparison) -> str:
    return f"{table.title}: " if len(comparison.tables) > 1 and table.title else ""


def _main(table: Table, outcome: Outcome, comparison: Comparison) -> str:
    by_verdict: dict[str, list[str]] = {}
    for name in _compared(table, outcome):
        one = table.cells[name, outcome.name].paired
        assert one is not None
        by_verdict.setdefault(one.verdict, []).append(name)
    clear = [*by_verdict.get("higher", ()), *by_verdict.get("lower", ())]
    seeds = {len(one.seeds) for name in _compared(table, outcome) if (one := table.cells[name, outcome.name].paired)}
    over = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{min(seeds)} seed{'s' * (seeds != {1})}"
    parts = []
    if clear:
        parts.append(listed(f"{name} is {_difference(table, name, outcome)}" for name in clear))
    if "no visible difference" in by_verdict:
        names = by_verdict["no visible difference"]
        parts.append(f"{listed(names)} show{'s' * (len(names) == 1)} no visible difference")
    if "identical" in by_verdict:
        parts.append(f"{listed(by_verdict['identical'])} gave the very values of {table.base}")
    if "too few seeds" in by_verdict:
        parts.append(f"too few seeds to tell for {listed(by_verdict['too few seeds'])}")
    return f"{_where(table, comparison)}In {outcome.title}, against {table.base} over {over}: {'; '.join(parts)}."


def _difference(table: Table, name: str, outcome: Outcome) -> str:
    one = table.cells[name, outcome.name].paired
    assert one is not None
    return f"{one.verdict} by {_size(table, name, outcome)}"


def _size(table: Table, name: str, outcome: Outcome) -> str:
    """The difference without its sign, which the verdict tells, and its interval turned with it."""
    one = table.cells[name, outcome.name].paired
    assert one is not None
    value, low, high = one.difference.value, one.difference.low, one.difference.high
    if value is not None and value < 0:
        value, low, high = -value, None if high is None else -high, None if low is None else -low
    return estimate(value, low, high) + (f" {outcome.unit}" if outcome.unit else "")


def _verdict(table: Table, name: str, outcome: Outcome) -> Verdict:
    one = table.cells[name, outcome.name].paired
    assert one is not None
    return one.verdict


def _visible(table: Table, outcome: Outcome) -> list[str]:
    return [
        name
        for name in _compared(table, outcome)
        if (one := table.cells[name, outcome.name].paired) and one.verdict in ("higher", "lower")
    ]


def _many(tables: Sequence[Table], outcome: Outcome) -> str:
    verdicts = [
        one.verdict
        for table in tables
        for name in _compared(table, outcome)
        if (one := table.cells[name, outcome.name].paired)
    ]
    parts = [
        f"{name} is {_difference(table, name, outcome)} at {table.setting}"
        for table in tables
        for name in _visible(table, outcome)
    ]
    told = [listed(parts)] if parts else []
    told_of: tuple[tuple[Verdict, str], ...] = (
        ("no visible difference", "no visible difference"),
        ("identical", "the very values of the base"),
        ("too few seeds", "too few seeds that finished to tell"),
    )
    for verdict, text in told_of:
        if count := verdicts.count(verdict):
            told.append(f"{text} in {'all' if count == len(verdicts) else count}")
    head = f"In {outcome.title}, {len(verdicts)} comparisons with the base in {len(tables)} settings"
    return f"{head}: {'; '.join(told)}."


def _beside(tables: Sequence[Table], others: Sequence[Outcome]) -> list[str]:
    if len(tables) > _FEW_TABLES:
        return []
    largest = [one for one in others if one.name.startswith("eval/pass@")][-1:]
    found = []
    for outcome in [*largest, *(one for one in others if one.name in _BESIDE)]:
        for table in tables:
            judged = [name for name in _compared(table, outcome) if _verdict(table, name, outcome) != "too few seeds"]
            if not judged:
                continue
            sides: dict[str, list[str]] = {}
            for name in _visible(table, outcome):
                sides.setdefault(_verdict(table, name, outcome), []).append(
                    f"{name} (by {_size(table, name, outcome)})"
                )
            told = "; ".join(f"{verdict} for {listed(names)}" for verdict, names in sides.items())
            where = f" ({table.title})" if len(tables) > 1 else ""
            found.append(
                f"{_capital(outcome.title)}{where} is {told or f'not visibly different for {listed(judged)}'}."
            )
    return found


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sweeps(comparison: Comparison) -> list[str]:
    found = []
    for one in comparison.sweeps:
        told = listed(
            f"{setting(highest)} for {method}" if highest is not None else f"none of {len(one.values)} for {method}"
            for method, highest in one.highest.items()
        )
        found.append(f"The highest stable {one.key}: {told}.")
    return found


def _collapses(comparison: Comparison) -> list[str]:
    counts = [(name, one) for table in comparison.tables for name, one in table.collapses.items()]
    runs = sum(one.runs for _, one in counts)
    fell = _told((name, one.collapsed, one.runs) for name, one in counts)
    # a run that failed over NaN or Inf counts as collapsed as well
    failed = _told((name, one.failed, one.runs) for name, one in counts)
    first = (
        f"Collapsed by the fall of the reward, or over NaN or Inf: {fell}." if fell else f"No run of {runs} collapsed."
    )
    return [f"{first} Failed: {failed}." if failed else first]


def _told(counts: Iterable[tuple[str, int, int]]) -> str:
    by_method: dict[str, list[int]] = {}
    for name, k, n in counts:
        total = by_method.setdefault(name, [0, 0])
        total[0], total[1] = total[0] + k, total[1] + n
    some = [f"{k} of {n} runs of {name}" for name, (k, n) in by_method.items() if k]
    return listed(some) if some else ""


def _inert(comparison: Comparison) -> list[str]:
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for one in comparison.inert:
        some = "" if len(one.seeds) == one.runs else f" ({len(one.seeds)} of {one.runs} runs)"
        groups.setdefault((one.part, one.why), {})[one.method + some] = None
    told = [
        f"{part} never acted{'' if list(methods) == [part] else f' in {listed(methods)}'}: {why}."
        for (part, why), methods in groups.items()
    ]
    return [" ".join(told)] if told else []
