"""What a comparison found, in sentences: every difference with its interval, nothing ranked, silence never a result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rlstab.report.comparison import Comparison, Table
from rlstab.report.curves import seeds_of
from rlstab.report.idle_methods import Idle
from rlstab.report.metric_names import axis
from rlstab.report.numbers import counted, decimals, estimate, listed, places, setting
from rlstab.report.opening import curve_of, opening
from rlstab.report.outcomes import Outcome
from rlstab.report.statistics import Verdict

#: Settings of which each has a sentence of its own; of more, only what differs is told.
_FEW_TABLES = 3
#: Beside the main outcome, by name: what a policy may have paid for it.
_BESIDE = ("eval/entropy", "tokens/entropy")


def findings(comparison: Comparison) -> list[str]:
    """Paragraphs, the first about the main outcome, or about the sweep where that is all there is."""
    if not comparison.outcomes:
        return ["No run recorded an evaluation or a reward, so there is nothing to compare.", *_collapses(comparison)]
    main, *others = comparison.outcomes
    judged = [table for table in comparison.tables if _compared(table, main)]
    found = [_main(table, main, comparison) for table in judged] if len(judged) <= _FEW_TABLES else []
    if len(judged) > _FEW_TABLES:
        found = [_many(judged, main)]
    if not judged:
        what = "that takes finished runs of the baseline and of another method."
        found = [*_courses(comparison, main), f"Nothing can be compared in {main.title}: {what}"]
    found += dict.fromkeys(one for table in comparison.tables for one in paragraphs(table.about))
    found += _beside(judged, others)
    # the first sentence says what the first picture shows
    found = [*_sweeps(comparison), *found] if opening(comparison).sweep is not None else [*found, *_sweeps(comparison)]
    found += _collapses(comparison)
    return found + _idle_methods(comparison)


def paragraphs(text: str) -> list[str]:
    """Those of a text that YAML may have broken into lines."""
    return [" ".join(one.split()) for one in text.split("\n\n") if one.strip()]


def _courses(comparison: Comparison, outcome: Outcome) -> list[str]:
    """Where nothing can be compared, what became of each method; nothing where that takes more than a glance."""
    metric = curve_of(comparison, outcome.name)
    found = []
    for table in comparison.tables:
        for name in table.methods:
            curve = seeds_of(table.runs[name], metric)
            means = [] if curve is None else [float(one) for one in curve.mean() if math.isfinite(one)]
            if len(means) > 1:
                digits = places(means)
                start, end = decimals(means[0], digits), decimals(means[-1], digits)
                where = f"{table.title}, " if len(comparison.tables) > 1 and table.title else ""
                runs = counted(len(table.runs[name]), "run")
                last = max(run.rollouts for run in table.runs[name])
                title = _capital(axis(metric).title.partition(",")[0])
                found.append(f"{title} of {where}{name} went from {start} to {end} in {last} rollouts ({runs}).")
    return found if len(found) <= _FEW_TABLES else []


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
    shared = {
        name: len(one.seeds) for name in _compared(table, outcome) if (one := table.cells[name, outcome.name].paired)
    }
    none = [name for name, count in shared.items() if not count]
    counts = sorted({count for count in shared.values() if count})
    parts = []
    if clear:
        parts.append(listed(f"{name} is {_difference(table, name, outcome)}" for name in clear))
    if "no visible difference" in by_verdict:
        names = by_verdict["no visible difference"]
        parts.append(f"{listed(names)} show{'s' * (len(names) == 1)} no visible difference")
        parts += _nearly(table, outcome)
    if "identical" in by_verdict:
        parts.append(f"{listed(by_verdict['identical'])} gave exactly the values of {table.baseline}")
    if few := [name for name in by_verdict.get("too few seeds", ()) if name not in none]:
        parts.append(f"{_few(shared[name] for name in few)} to tell {listed(few)} from {table.baseline}")
    if none:
        verb = "has" if len(none) == 1 else "have"
        parts.append(f"{listed(none)} {verb} no finished seed in common with {table.baseline}")
    where = _where(table, comparison)
    head = where + (outcome.title if where else _capital(outcome.title))
    if not (clear or "no visible difference" in by_verdict):
        return f"{head}: {'; '.join(parts)}."
    over = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else counted(counts[0], "seed")
    return f"{head} compared with {table.baseline} over {over}: {'; '.join(parts)}."


def _few(counts: Iterable[int]) -> str:
    least, most = (found := sorted(set(counts)))[0], found[-1]
    if least == most == 1:
        return "one seed is too few"
    return f"{least} seeds are too few" if least == most else f"{least} to {most} seeds are too few"


def _nearly(table: Table, outcome: Outcome) -> list[str]:
    """What only the method's own interval tells: not a finding, and not to be hidden."""
    told = [
        f"{name} is {'higher' if one.difference.value > 0 else 'lower'} by {_size(table, name, outcome)}"
        for name in _compared(table, outcome)
        if (one := table.cells[name, outcome.name].paired)
        and one.verdict == "no visible difference"
        and one.remark
        and one.difference.value is not None
    ]
    return [f"before the correction for several comparisons, {listed(told)}"] if told else []


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
        ("identical", "exactly the values of the baseline"),
        ("too few seeds", "too few finished seeds to tell"),
    )
    for verdict, text in told_of:
        if count := verdicts.count(verdict):
            told.append(f"{text} in {'all' if count == len(verdicts) else count}")
    head = f"{_capital(outcome.title)}, {len(verdicts)} comparisons with the baseline in {len(tables)} settings"
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
            parts = [f"{verdict} for {listed(names)}" for verdict, names in sides.items()]
            alike = [name for name in judged if _verdict(table, name, outcome) == "no visible difference"]
            if not parts:
                parts = [
                    f"not visibly different for {listed(alike)}"
                    if alike
                    else f"the same as that of {table.baseline} for {listed(judged)}"
                ]
            where = f" ({table.title})" if len(tables) > 1 else ""
            told = "; ".join([*parts, *_nearly(table, outcome)])
            found.append(f"{_capital(outcome.title)}{where} is {told}.")
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
        found.append(f"The highest {one.key} at which training is stable: {told}.")
    return found


def _collapses(comparison: Comparison) -> list[str]:
    several = len({table.bench for table in comparison.tables}) > 1
    counts = [
        (f"{name} ({table.bench or 'no bench'})" if several else name, one)
        for table in comparison.tables
        for name, one in table.collapses.items()
    ]
    runs = sum(one.runs for _, one in counts)
    fell = _told((name, one.collapsed, one.runs) for name, one in counts)
    # a run that failed over NaN or Inf counts as collapsed as well
    failed = _told((name, one.failed, one.runs) for name, one in counts)
    none = f"None of the {runs} runs collapsed." if runs > 1 else "The run did not collapse."
    first = f"Collapsed (the reward fell, or NaN or Inf ended the run): {fell}." if fell else none
    return [f"{first} Failed: {failed}." if failed else first]


def _told(counts: Iterable[tuple[str, int, int]]) -> str:
    by_method: dict[str, list[int]] = {}
    for name, k, n in counts:
        total = by_method.setdefault(name, [0, 0])
        total[0], total[1] = total[0] + k, total[1] + n
    some = [f"{k} of {counted(n, 'run')} of {name}" for name, (k, n) in by_method.items() if k]
    return listed(some) if some else ""


def _idle_methods(comparison: Comparison) -> list[str]:
    benches = {table.bench for table in comparison.tables}
    groups: dict[tuple[str | None, str, str], dict[str, list[Idle]]] = {}
    for one in comparison.idle:
        groups.setdefault((one.bench, one.part, one.why), {}).setdefault(one.method, []).append(one)
    told = []
    for (bench, part, why), methods in groups.items():
        names = [_idle(method, some, comparison) for method, some in methods.items()]
        where = "" if names == [part] else f" in {listed(names)}"
        told.append(f"{f'{bench}: ' if bench and len(benches) > 1 else ''}{part} never acted{where}: {why}.")
    return [" ".join(told)] if told else []


def _idle(method: str, some: Sequence[Idle], comparison: Comparison) -> str:
    """A method with the settings in which a part of it was idle, unless it was so in every run."""
    bench = some[0].bench
    settings = [table.setting for table in comparison.tables if table.bench == bench and method in table.methods]
    at = [one.setting for one in some]
    where = f" at {listed(at)}" if len(at) < len(settings) else ""
    runs, idle = sum(one.runs for one in some), sum(len(one.seeds) for one in some)
    return f"{method}{where}" + (f" ({idle} of {counted(runs, 'run')})" if idle < runs else "")
