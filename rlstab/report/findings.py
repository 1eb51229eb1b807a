"""What a comparison found, in sentences: every difference with its interval, nothing ranked, silence never a result."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rlstab.console import capital, counted
from rlstab.report.collapse import all_below_start
from rlstab.report.comparison import Comparison, Outcome, Table
from rlstab.report.curves import lead_sweep
from rlstab.report.formatting import few, listed, paragraphs, size
from rlstab.report.statistics import CONFIDENCE, Paired, p_value, unseen_rate
from rlstab.report.tables import in_words

#: Up to this many settings have a sentence each; with more, only differences are reported.
_FEW_TABLES = 3
#: For up to this many methods without a visible difference, a sentence says what their seeds could show.
_FEW_POWERS = 3
#: What is said of methods without a clear difference, by verdict; empty for those without a pair.
_TEXTS = {
    "no visible difference": "no visible difference for",
    "identical": "exactly the values of the baseline for",
    "too few seeds": "too few seeds for",
    "": "no seed in common with the baseline for",
}
#: Outcomes that a policy may have paid for the main one, by name.
_BESIDE = ("eval/entropy", "tokens/entropy")


def findings(comparison: Comparison) -> list[str]:
    """Paragraphs, the first about the runs that were lost and the main outcome, or about the sweep."""
    if not comparison.outcomes:
        return ["No run recorded an evaluation or a reward, so there is nothing to compare.", _collapses(comparison)]
    sunk = all_below_start(comparison.loaded.runs)
    main, *secondary = comparison.outcomes
    compared = [table for table in comparison.tables if _paired(table, main)]
    is_short = len(comparison.tables) <= _FEW_TABLES
    if not compared:
        condition = "that takes finished runs of the baseline and of another method."
        first = [f"Nothing can be compared in {main.title}: {condition}"]
    elif is_short:
        first = [f"{_lost(table, comparison)} {_told(table, main, comparison)}" for table in compared]
    else:
        pairs = {
            f"{name} at {table.setting}": pair for table in compared for name, pair in _paired(table, main).items()
        }
        head = f"{main.title}, {len(pairs)} comparisons with the baseline in {len(compared)} settings"
        first = [f"{_collapses(comparison)} {capital(head)}: {_differences(pairs, main)}."]
    first += dict.fromkeys(part for table in comparison.tables for part in paragraphs(table.about))
    largest = [outcome for outcome in secondary if outcome.name.startswith("eval/pass@")][-1:]
    for outcome in [*largest, *(outcome for outcome in secondary if outcome.name in _BESIDE)] if is_short else []:
        first += [_told(table, outcome, comparison) for table in compared if _paired(table, outcome)]
    sweeps = [
        f"The highest {sweep.key} at which training is stable: "
        + listed(f"{sweep.highest_stable(method)} for {method}" for method in sweep.highest)
        + "."
        for sweep in comparison.sweeps
    ]
    # the first sentence says what the first picture shows
    first = [*sweeps, *first] if lead_sweep(comparison) is not None else [*first, *sweeps]
    return [*sunk, *first, *([_collapses(comparison)] if len(compared) < len(comparison.tables) and is_short else [])]


def _where(table: Table, comparison: Comparison) -> str:
    return f"{table.title}: " if len(comparison.tables) > 1 and table.title else ""


def _lost(table: Table, comparison: Comparison) -> str:
    """How many runs each method lost, what the exact test of its pairs says, and what so few seeds cannot."""
    losses, where = table.losses, _where(table, comparison)
    compared = {name: loss for name, loss in losses.items() if loss.p is not None and loss.pairs}
    if not compared:
        return f"{where}No seed can be judged for two methods, so nothing is known of the runs that they lose."
    seeds, base = min(loss.pairs for loss in compared.values()), losses[table.baseline or ""].rate
    unseen = f"{counted(seeds, 'seed')} cannot tell a rate of 0 from one of {100 * unseen_rate(seeds):.0f} %"
    losing = {name: loss for name, loss in compared.items() if loss.rate.hits or base.hits}
    if not losing:
        rate = f"a rate of up to {100 * unseen_rate(seeds):.0f} % can go unseen in {counted(seeds, 'seed')}"
        return f"{where}{_none([table])} {capital(rate)}."
    counts = listed(f"{name} lost {loss.rate} runs" for name, loss in losing.items())
    p = listed(p_value(loss.p or 0.0) for loss in losing.values())
    clear = [name for name, loss in losing.items() if (loss.p or 0.0) < 1 - CONFIDENCE]
    if base.hits and not clear:
        rates = {name: losses[name] for name in [*losing, table.baseline or ""]}
        unseen = f"the rates may be {listed(f'{loss.rate.percent} of {name}' for name, loss in rates.items())}"
    end = f"beyond chance for {listed(clear)}" if clear else unseen
    return f"{where}{counts}, {table.baseline} {base}: {p}, {end}."


def _paired(table: Table, outcome: Outcome) -> dict[str, Paired]:
    """The methods of a table that are compared with its baseline."""
    cells = {name: table.cells[name, outcome.name].paired for name in table.methods}
    return {name: paired for name, paired in cells.items() if paired is not None}


def _told(table: Table, outcome: Outcome, comparison: Comparison) -> str:
    """What is seen of one outcome in one setting."""
    paired, some_lost = _paired(table, outcome), any(loss.rate.hits for loss in table.losses.values())
    seeds = [len(pair.seeds) for pair in paired.values() if pair.seeds] or [0]
    head = outcome.title + ("," * ("," in outcome.title) + " of the survivors" if some_lost else "")
    count = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
    head += f" compared with {table.baseline} over {count} seed{'s' * (set(seeds) != {1})}"
    failed = [
        f"{loss.failed} of {counted(loss.runs, 'run')} of {name}" for name, loss in table.losses.items() if loss.failed
    ]
    dead = [name for name, loss in table.losses.items() if 0 < loss.rate.hits == loss.rate.count]
    parts = [_differences(paired, outcome), *([f"{listed(failed)} failed and take no part"] if failed else [])]
    parts += [f"no run of {listed(dead)} survived, so lost ones count"] if dead else []
    return f"{_where(table, comparison)}{capital(head)}: {'; '.join(parts)}."


def _differences(pairs: Mapping[str, Paired], outcome: Outcome) -> str:
    """The differences by verdict; what only a method's own interval shows is no finding, but not to be hidden."""
    groups = {verdict: list[str]() for verdict in ("higher", "lower", *_TEXTS)}
    sizes = {}
    for name, pair in pairs.items():
        groups[pair.verdict if pair.seeds else ""].append(name)
        value, low, high = pair.difference.value, pair.difference.low, pair.difference.high
        side = "higher" if (value or 0) > 0 else "lower"
        sizes[name] = f"{name} is {side} by {size(value, low, high, outcome.unit)}"
    parts = [listed(sizes[name] for name in clear)] if (clear := [*groups["higher"], *groups["lower"]]) else []
    parts += [f"{text} {few(names)}" for verdict, text in _TEXTS.items() if (names := groups[verdict])]
    alike = groups["no visible difference"]
    if nearly := [sizes[name] for name in alike if pairs[name].remark]:
        parts.append(f"before the correction for several comparisons, {listed(nearly)}")
    words = {name: in_words(pairs[name], outcome) for name in alike[:_FEW_POWERS]}
    return "; ".join([*parts, *(f"for {name}, {text}" for name, text in words.items() if text)])


def _collapses(comparison: Comparison) -> str:
    """The runs lost by each method in all settings of a bench together."""
    is_named = len({table.bench for table in comparison.tables}) > 1
    lost_runs, judged, total = Counter[str](), Counter[str](), 0
    for table in comparison.tables:
        for method, loss in table.losses.items():
            name = f"{method} ({table.bench or 'no bench'})" if is_named else method
            lost_runs[name] += int(loss.rate.hits)
            judged[name] += loss.rate.count
            total += loss.runs
    parts = [f"{count} of {counted(judged[name], 'run')} of {name}" for name, count in lost_runs.items() if count]
    if not parts:
        return _none(comparison.tables)
    return f"Lost: {listed(parts)}" + (
        f"; {total - judged.total()} cannot be judged." if total > judged.total() else "."
    )


def _none(tables: Sequence[Table]) -> str:
    """That no run was lost, of how many."""
    counts = [(loss.rate.count, loss.runs) for table in tables for loss in table.losses.values()]
    judged, total = map(sum, zip(*counts, strict=True))
    if not judged:
        return "Whether a run was lost cannot be told: none is finished and long enough to judge."
    if judged < total:
        return f"None of {counted(judged, 'run')} that can be judged was lost; {total - judged} cannot be."
    return f"None of the {total} runs collapsed." if total > 1 else "The run did not collapse."
