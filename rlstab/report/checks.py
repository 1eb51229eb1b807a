"""What a reader has to know of the runs before a verdict: one sentence for each fault that a comparison cannot mend."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from rlstab.bins import EMPTY
from rlstab.console import counted
from rlstab.report.collapse import REWARD, collapsed, nan_share
from rlstab.report.formatting import listed
from rlstab.report.load import settings_between
from rlstab.report.runs import RunRecord
from rlstab.safe_read import as_step

Item = TypeVar("Item")

#: A share of rewards that are NaN or Inf, above which a sentence names the run.
NAN = 0.1
#: Curves with as many different values are not equal by chance.
DISTINCT = 5
#: Where a run lies in its bench, or in a results file.
_INSIDE = re.compile(r"[/\\]runs[/\\][^/\\]+[/\\][^/\\]+[/\\][^/\\]+$|:\d+$")


def checked(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """The runs of one setting that count, equal ones once, and what is wrong with them."""
    sentences, methods = list[str](), _groups(runs, lambda run: run.method)
    counting = {
        method: [some[0] for some in _groups(several, _content).values()] for method, several in methods.items()
    }
    for method, several in methods.items():
        for same in _groups(several, _content).values():
            if len(same) == len(several) > 1:
                what = f"The seeds of {method} are one run: {_seeds(same)} have the same curves"
            elif len(same) > 1:
                what = f"{_seeds(same).capitalize()} of {method} are one run: they have the same curves"
            else:
                continue
            sentences.append(f"{what}, bit for bit, and count once. Did the trainer ignore its seed?")
        sentences += _nan(method, several)
        told = {run: seed for run in several if (seed := as_step(run.config.get("seed"))) not in (None, run.seed)}
        if told:
            files = f"{_seeds(list(told))} of {method} by bench.json are {listed(map(str, sorted(set(told.values()))))}"
            sentences.append(f"{files.capitalize()} by config.yaml. Pairs are by bench.json.")
    roots = {_INSIDE.sub("", run.path) for run in runs if run.bench}
    if len(roots) > 1:
        sentences.append(f"Runs of {len(roots)} benches of this name count together: {listed(sorted(roots))}.")
    return [run for some in counting.values() for run in some], [*sentences, *_names(methods)]


def repeated(runs: Sequence[RunRecord]) -> dict[tuple[str, str], dict[int, str]]:
    """By bench and setting, the seeds that ran more than once, with different results, each in a sentence."""
    sentences: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for some in _groups(
        [run for run in runs if run.repeats], lambda run: (run.bench, run.repeats, run.method, run.seed)
    ).values():
        where, run = listed(run.setting for run in some), some[0]
        text = f"Seed {run.seed} of {run.method} ran {len(some)} times, with different results ({where}): none counts."
        sentences[run.bench or "", run.repeats][run.seed] = f"{text} Give one of these folders."
    return sentences


def _nan(method: str, runs: Sequence[RunRecord]) -> Iterator[str]:
    for lost, some in _groups([run for run in runs if nan_share(run) > NAN], collapsed).items():
        shares = sorted(f"{100 * nan_share(run):.0f} %" for run in some)
        share = shares[0] if shares[0] == shares[-1] else f"{shares[0]} to {shares[-1]}"
        effect = (
            f"{counted(len(some), 'run')} count{'s' * (len(some) == 1)} as lost" if lost else "means leave them out"
        )
        yield f"{share} of the rewards of {method}, {_seeds(some)}, are NaN or Inf: {effect}."


def _names(methods: dict[str, list[RunRecord]]) -> Iterator[str]:
    """Sentences about names that may mean one method."""
    first = {name: next((run for run in runs if run.config), None) for name, runs in methods.items()}
    alike: list[set[str]] = []
    configured = [name for name, run in first.items() if run is not None]
    for names in _groups(configured, lambda name: str([first[name].config.get(key) for key in _METHOD])).values():  # type: ignore[union-attr]
        runs = [run for name in names if (run := first[name]) is not None]
        if len(names) > 1 and not settings_between(runs, method=True):
            alike.append(set(names))
            yield f"{listed(names)} have the same settings under {len(names)} names: their seeds do not count together."
    for names in _groups(list(methods), str.lower).values():
        if len(names) > 1 and not any(same.issuperset(names) for same in alike):
            yield f"{listed(names)} differ only in case, and have other settings."


#: What of a configuration is the method.
_METHOD = ("objective", "stages")


def _groups(items: Sequence[Item], key: Callable[[Item], Hashable]) -> dict[Hashable, list[Item]]:
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _content(run: RunRecord) -> Hashable:
    """What two runs share only if they are one: rewards, or all that was measured, unless it is nearly constant."""
    rewards, every = run.metrics.get(REWARD, EMPTY)[1], [values for _, (_, values) in sorted(run.metrics.items())]
    if np.isfinite(rewards).all() and len(np.unique(rewards)) >= DISTINCT:
        return rewards.tobytes()
    values = np.concatenate([EMPTY[1], *every])
    return (str(run.evaluations), values.tobytes()) if len(np.unique(values)) >= DISTINCT else id(run)


def _seeds(runs: Sequence[RunRecord]) -> str:
    return f"seed{'s' * (len(runs) > 1)} {listed(str(run.seed) for run in runs)}"
