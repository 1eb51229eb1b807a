"""What a comparison found, in sentences: every difference with its interval, nothing ranked, silence never a result."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rlstab.console import capital, counted
from rlstab.report.collapse import all_below_start
from rlstab.report.comparison import Comparison, Outcome, Table
from rlstab.report.curves import curve_of, lead_sweep, seeds_of
from rlstab.report.formatting import axis, decimals, in_letters, listed, paragraphs, places, size
from rlstab.report.statistics import CONFIDENCE, Estimate, Paired, Verdict, p_value, unseen_rate
from rlstab.report.sweeps import highest_stable
from rlstab.report.tables import in_words

#: Up to this many settings have a sentence each; with more, only differences are reported.
_FEW_TABLES = 3
#: For up to this many methods without a visible difference, a sentence says what their seeds could show.
_FEW_POWERS = 3
#: Outcomes that a policy may have paid for the main one, by name.
_BESIDE = ("eval/entropy", "tokens/entropy")


def findings(comparison: Comparison) -> list[str]:
    """Paragraphs, the first about the runs that were lost and the main outcome, or about the sweep."""
    if not comparison.outcomes:
        return ["No run recorded an evaluation or a reward, so there is nothing to compare.", _collapses(comparison)]
    sunk = all_below_start(comparison.loaded.runs)
    main, *others = comparison.outcomes
    compared = [table for table in comparison.tables if _paired(table, main)]
    if not compared:
        what = "that takes finished runs of the baseline and of another method."
        first = [*_courses(comparison, main), f"Nothing can be compared in {main.title}: {what}"]
    elif len(compared) > _FEW_TABLES:
        first = [_many(compared, main)]
    else:
        first = [f"{_lost(table, comparison)} {_main(table, main, comparison)}" for table in compared]
    first += dict.fromkeys(part for table in comparison.tables for part in paragraphs(table.about))
    if len(compared) <= _FEW_TABLES:
        first += _beside(compared, others)
    sweeps = [
        f"The highest {sweep.key} at which training is stable: "
        + listed(f"{highest_stable(sweep, method)} for {method}" for method in sweep.highest)
        + "."
        for sweep in comparison.sweeps
    ]
    # the first sentence says what the first picture shows
    first = [*sweeps, *first] if lead_sweep(comparison) is not None else [*first, *sweeps]
    every = [] if compared and len(compared) == len(comparison.tables) <= _FEW_TABLES else [_collapses(comparison)]
    return [*sunk, *first, *every]


def _where(table: Table, comparison: Comparison) -> str:
    return f"{table.title}: " if len(comparison.tables) > 1 and table.title else ""


def _lost(table: Table, comparison: Comparison) -> str:
    """How many runs each method lost, what the exact test of its pairs says, and what so few seeds cannot."""
    losses, where = {name: table.collapses[name].losses for name in table.methods}, _where(table, comparison)
    compared = {name: loss for name, loss in losses.items() if loss.p is not None}
    if not compared:
        return f"{where}No seed can be judged for two methods, so nothing is known of the runs that they lose."
    seeds, base = min(loss.pairs for loss in compared.values()), losses[table.baseline or ""]
    unseen = f"{in_letters(seeds)} seed{'s' * (seeds != 1)} cannot tell a rate of 0 from one of"
    unseen = f"{unseen} {100 * unseen_rate(seeds):.0f} %"
    lost = {name: (loss, p_value(loss.p or 0.0)) for name, loss in compared.items() if loss.lost or base.lost}
    if not lost:
        return f"{where}None of {sum(loss.judged for loss in losses.values())} runs was lost: {unseen}."
    alone = len(lost) == 1
    told = listed(
        f"{name} lost {loss.lost} of {loss.judged} runs{'' if alone else f' ({p})'}" for name, (loss, p) in lost.items()
    )
    text = (
        f"{where}{told}, {table.baseline} {base.lost} of {base.judged}: {lost.popitem()[1][1] + ', ' if alone else ''}"
    )
    sides = {
        name: "more" if loss.lost * base.judged > base.lost * loss.judged else "fewer"
        for name, loss in compared.items()
        if (loss.p or 0.0) < 1 - CONFIDENCE
    }
    if sides:
        return f"{text}{listed(f'{name} loses {side}' for name, side in sides.items())}."
    if not base.lost:
        return f"{text}{unseen}."
    ends = {name: loss.rate for name, loss in (*compared.items(), (table.baseline, base))}
    return f"{text}the rates may be {listed(f'{percent(rate)} of {name}' for name, rate in ends.items())}."


def percent(rate: Estimate) -> str:
    """A rate by the ends of its interval."""
    return "unknown" if rate.low is None or rate.high is None else f"{100 * rate.low:.0f} to {100 * rate.high:.0f} %"


def _paired(table: Table, outcome: Outcome) -> dict[str, Paired]:
    """The methods of a table that are compared with its baseline."""
    cells = {name: table.cells[name, outcome.name].paired for name in table.methods}
    return {name: paired for name, paired in cells.items() if paired is not None}


def _by_verdict(paired: dict[str, Paired]) -> dict[Verdict, list[str]]:
    groups: dict[Verdict, list[str]] = defaultdict(list)
    for name, pair in paired.items():
        groups[pair.verdict].append(name)
    return groups


def _courses(comparison: Comparison, outcome: Outcome) -> list[str]:
    """If nothing can be compared, how each method fared; nothing if that would be too long."""
    metric = curve_of(comparison, outcome.name)
    courses = []
    for table in comparison.tables:
        for name in table.methods:
            curve = seeds_of(table.runs[name], metric)
            means = [] if curve is None else [float(mean) for mean in curve.means if math.isfinite(mean)]
            if len(means) > 1:
                digits = places(means)
                start, end = decimals(means[0], digits), decimals(means[-1], digits)
                where = f"{table.title}, " if len(comparison.tables) > 1 and table.title else ""
                runs = counted(len(table.runs[name]), "run")
                last = max(run.rollouts for run in table.runs[name])
                title = capital(axis(metric).title.partition(",")[0])
                courses.append(f"{title} of {where}{name} went from {start} to {end} in {last} rollouts ({runs}).")
    return courses if len(courses) <= _FEW_TABLES else []


def _main(table: Table, outcome: Outcome, comparison: Comparison) -> str:
    paired, some_lost = _paired(table, outcome), any(each.losses.lost for each in table.collapses.values())
    verdicts = _by_verdict(paired)
    alike, few = verdicts.get("no visible difference", []), verdicts.get("too few seeds", [])
    none = [name for name, pair in paired.items() if not pair.seeds]
    few = [name for name in few if name not in none]
    parts = []
    if clear := [*verdicts.get("higher", ()), *verdicts.get("lower", ())]:
        parts.append(listed(f"{name} is {paired[name].verdict} by {_size(paired[name], outcome)}" for name in clear))
    if alike:
        parts += [f"{listed(alike)} show{'s' * (len(alike) == 1)} no visible difference", *_nearly(paired, outcome)]
        shown = {name: in_words(paired[name], outcome) for name in alike[:_FEW_POWERS]}
        parts += [f"for {name}, {words}" for name, words in shown.items() if words]
    if same := verdicts.get("identical"):
        parts.append(f"{listed(same)} gave exactly the values of {table.baseline}")
    if few:
        seeds = _range([len(paired[name].seeds) for name in few])
        start = "one seed is too few" if seeds == "1" else f"{seeds} seeds are too few"
        parts.append(f"{start} to tell {listed(few)} from {table.baseline}")
    if none:
        verb, kind = "has" if len(none) == 1 else "have", "surviving" if some_lost else "finished"
        parts.append(f"{listed(none)} {verb} no {kind} seed in common with {table.baseline}")
    head = capital(outcome.title) + ("," * ("," in outcome.title) + " of the survivors" if some_lost else "")
    if clear or alike:
        seeds = _range([len(pair.seeds) for pair in paired.values() if pair.seeds])
        head += f" compared with {table.baseline} over {seeds} seed{'s' * (seeds != '1')}"
    counts = {name: (table.collapses[name].failed, table.collapses[name].runs) for name in table.methods}
    lost = [f"{failed} of {counted(runs, 'run')} of {name}" for name, (failed, runs) in counts.items() if failed]
    if lost:
        parts.append(f"{listed(lost)} failed and take no part")
    return f"{head}: {'; '.join(parts)}."


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _nearly(paired: dict[str, Paired], outcome: Outcome) -> list[str]:
    """Differences that only a method's own interval shows: not a finding, but not to be hidden."""
    told = [
        f"{name} is {'higher' if pair.difference.value > 0 else 'lower'} by {_size(pair, outcome)}"
        for name, pair in paired.items()
        if pair.verdict == "no visible difference" and pair.remark and pair.difference.value is not None
    ]
    return [f"before the correction for several comparisons, {listed(told)}"] if told else []


def _size(pair: Paired, outcome: Outcome) -> str:
    return size(pair.difference.value, pair.difference.low, pair.difference.high, outcome.unit)


def _many(tables: Sequence[Table], outcome: Outcome) -> str:
    pairs = [(name, pair, table) for table in tables for name, pair in _paired(table, outcome).items()]
    clear = [
        f"{name} is {pair.verdict} by {_size(pair, outcome)} at {table.setting}"
        for name, pair, table in pairs
        if pair.verdict in ("higher", "lower")
    ]
    told = [listed(clear)] if clear else []
    texts: tuple[tuple[Verdict, str], ...] = (
        ("no visible difference", "no visible difference"),
        ("identical", "exactly the values of the baseline"),
        ("too few seeds", "too few finished seeds to tell"),
    )
    for verdict, text in texts:
        if count := sum(pair.verdict == verdict for _, pair, _ in pairs):
            told.append(f"{text} in {'all' if count == len(pairs) else count}")
    head = f"{capital(outcome.title)}, {len(pairs)} comparisons with the baseline in {len(tables)} settings"
    return f"{head}: {'; '.join(told)}."


def _beside(tables: Sequence[Table], others: Sequence[Outcome]) -> Iterator[str]:
    largest = [outcome for outcome in others if outcome.name.startswith("eval/pass@")][-1:]
    for outcome in [*largest, *(outcome for outcome in others if outcome.name in _BESIDE)]:
        for table in tables:
            paired = {name: pair for name, pair in _paired(table, outcome).items() if pair.verdict != "too few seeds"}
            if not paired:
                continue
            verdicts = _by_verdict(paired)
            alike = verdicts.get("no visible difference")
            parts = [
                f"{verdict} for {listed(f'{name} (by {_size(paired[name], outcome)})' for name in names)}"
                for verdict, names in verdicts.items()
                if verdict in ("higher", "lower")
            ]
            if not parts and alike:
                parts = [f"not visibly different for {listed(alike)}"]
            elif not parts:
                parts = [f"the same as that of {table.baseline} for {listed(paired)}"]
            where = f" ({table.title})" if len(tables) > 1 else ""
            yield f"{capital(outcome.title)}{where} is {'; '.join([*parts, *_nearly(paired, outcome)])}."


def _collapses(comparison: Comparison) -> str:
    several = len({table.bench for table in comparison.tables}) > 1
    runs, fell, failed, short = Counter[str](), Counter[str](), Counter[str](), 0
    for table in comparison.tables:
        for method, collapse in table.collapses.items():
            name = f"{method} ({table.bench or 'no bench'})" if several else method
            runs[name] += collapse.runs
            short += collapse.runs - collapse.losses.judged
            fell[name] += collapse.losses.lost
            failed[name] += collapse.failed  # a run that failed over NaN or Inf counts as collapsed as well

    def told(counts: Counter[str]) -> str:
        return listed(f"{count} of {counted(runs[name], 'run')} of {name}" for name, count in counts.items() if count)

    none = f"None of the {runs.total()} runs was lost." if runs.total() > 1 else "The run was not lost."
    if short == runs.total():
        none = "Whether a run was lost cannot be told: none of them is finished and long enough to judge."
    elif short:
        none = f"None of the {runs.total() - short} runs that can be judged was lost; {short} cannot be."
    first = f"Lost (the reward fell, or became NaN or Inf): {told(fell)}." if fell.total() else none
    first += f" {short} of {runs.total()} runs cannot be judged." if short and fell.total() else ""
    return f"{first} Failed: {told(failed)}." if failed.total() else first
