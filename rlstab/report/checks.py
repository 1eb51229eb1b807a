"""What a reader has to know of the runs before a verdict: one sentence for each fault that a comparison cannot mend."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np

from rlstab.bins import EMPTY
from rlstab.report.collapse import REWARD, collapsed, nan_share
from rlstab.report.formatting import few, listed, natural
from rlstab.report.names import root_of, settings_between
from rlstab.report.runs import RunRecord, grouped
from rlstab.safe_read import as_step

#: A share of rewards that are NaN or Inf, above which a sentence names the run.
NAN = 0.1
#: Curves with as many different values are not equal by chance.
DISTINCT = 5


def checked(runs: Sequence[RunRecord]) -> tuple[list[RunRecord], list[str]]:
    """The runs of one setting that count, equal ones once, and what is wrong with them."""
    sentences, methods, counting = list[str](), grouped(runs, attrgetter("method")), list[RunRecord]()
    for method, same_method in methods.items():
        for copies in grouped(same_method, _content).values():
            counting.append(copies[0])
            if len(copies) > 1:
                subject = "The seeds" if len(copies) == len(same_method) else "Some seeds"
                sentences.append(
                    f"{subject} of {method} are one run: {_seeds(copies)} have the same curves, bit for bit, and count "
                    "once. Was the seed ignored?"
                )
        for is_lost, group in grouped([run for run in same_method if nan_share(run) > NAN], collapsed).items():
            effect = "these runs count as lost" if is_lost else "means leave them out"
            share = f"{100 * np.mean(list(map(nan_share, group))):.0f} % of the rewards of {method}, {_seeds(group)},"
            sentences.append(f"{share} are NaN or Inf; {effect}.")
        recorded = {
            run: seed for run in same_method if (seed := as_step(run.config.get("seed"))) not in (None, run.seed)
        }
        if recorded:
            other = listed(map(str, sorted(set(recorded.values()))))
            sentences.append(
                f"By config.yaml, {_seeds(list(recorded))} of {method} are {other}. Pairs are by bench.json."
            )
    roots = {root_of(run.path) for run in runs if run.bench}
    if len(roots) > 1:
        sentences.append(f"Runs of {len(roots)} benches of this name count together: {listed(sorted(roots))}.")
    return counting, [*sentences, *_names(methods)]


def repeated(runs: Sequence[RunRecord]) -> dict[tuple[str, str], dict[int, str]]:
    """By bench and setting, the seeds that ran more than once, with different results, each in a sentence."""
    sentences: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    repeats = grouped([run for run in runs if run.repeats], attrgetter("bench", "repeats", "method", "seed"))
    for run, *rest in repeats.values():
        where = listed(repeat.setting for repeat in (run, *rest))
        subject = f"Seed {run.seed} of {run.method} ran {len(rest) + 1} times, with different results"
        sentences[run.bench or "", run.repeats][run.seed] = (
            f"{subject} ({where}): none counts. Give one of these folders."
        )
    return sentences


def _names(methods: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Sentences about names that may mean one method."""
    first = {
        name: configured[0] for name, runs in methods.items() if (configured := [run for run in runs if run.config])
    }
    alike_settings = grouped(list(first), lambda name: str(list(map(first[name].config.get, ("objective", "stages")))))
    alike = [
        names for names in alike_settings.values() if not settings_between([first[name] for name in names], method=True)
    ]
    for names in alike:
        if len(names) > 1:
            which = few(sorted(names, key=natural))
            yield f"{which} have the same settings under {len(names)} names: their seeds do not count together."
    for names in grouped(list(methods), str.lower).values():
        if len(names) > 1 and not any({*names} <= {*group} for group in alike):
            yield f"{listed(names)} differ only in case, and have other settings."


def _content(run: RunRecord) -> Hashable:
    """What two runs share only if they are one: rewards, or all that was measured, unless it is nearly constant."""
    rewards, columns = run.metrics.get(REWARD, EMPTY)[1], [values for _, (_, values) in sorted(run.metrics.items())]
    if np.isfinite(rewards).all() and len(np.unique(rewards)) >= DISTINCT:
        return rewards.tobytes()
    values = np.concatenate([EMPTY[1], *columns])
    return (str(run.evaluations), values.tobytes()) if len(np.unique(values)) >= DISTINCT else id(run)


def _seeds(runs: Sequence[RunRecord]) -> str:
    return f"seed{'s' * (len(runs) > 1)} {listed(str(run.seed) for run in runs)}"
