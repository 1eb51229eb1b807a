"""How often ``rlstab look`` is right about runs that ``rldoctor`` and ``rlprobe`` generate, and they about ours.

``rlwatch``, which generates nothing, is judged on all of them.

    nox -s signs
    python -m benchmarks generated --seeds 5 6 7 8 9 --ours runs/broken

Both packages ship generators of logs, healthy and broken on purpose, each with the kind that it stands for. What they
log is read under TRL's names; nothing else of a run reaches the signs. A generator breaks one metric and leaves the
reward, so most of its runs have an observation and no cause: either counts. Thresholds were chosen on seeds 0 to 4. A
kind whose metrics no trainer logs, or that is not about learning, is left out. With ``--ours`` what
``python -m benchmarks diagnose --out`` or ``--data`` left is judged by all four. ``--page`` puts what sums the tables
up into docs/how-to/diagnose.md.
"""

import argparse
import math
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstab.logs import log
from rlstab.look.diagnosis import diagnose
from rlstab.look.find import read_logs
from rlstab.look.remedies import CAUSES

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "diagnose.md"
#: Head of the table of our runs.
OF_OURS = "| run of `benchmarks diagnose` | rlstab | rldoctor | rlprobe | rlwatch |"
#: Between these lines of the page stand the tables.
BEGIN, END = "<!-- python -m benchmarks generated -->", "<!-- end -->"

#: Steps by values, under TRL's names.
Rows = Mapping[int, Mapping[str, float]]

EQUAL = frozenset({"difficulty", "dead_groups"})
#: By generator and scenario, the causes of rlstab that say the same, and the metrics in which it shows.
KINDS: Mapping[str, Mapping[str, tuple[frozenset[str], tuple[str, ...]]]] = {
    "rldoctor": {
        "healthy": (frozenset(), ()),
        "entropy_collapse": (frozenset({"entropy_collapse"}), ("entropy",)),
        "saturated_groups": (EQUAL, ("frac_reward_zero_std",)),
        "too_hard": (EQUAL, ("frac_reward_zero_std",)),
        "reward_hacking": (frozenset({"reward_hacking"}), ("eval/accuracy",)),
        "length_hacking": (frozenset({"length"}), ("completions/mean_length",)),
        "truncation": (frozenset({"truncation"}), ("completions/clipped_ratio",)),
        "kl_blowup": (frozenset({"kl_drift"}), ("kl",)),
        "clip_saturation": (frozenset({"trust_region"}), ("clip_ratio/region_mean",)),
        "grad_spikes": (frozenset({"learning_rate"}), ("grad_norm",)),
        "plateau": (frozenset({"plateau"}), ("reward",)),
        "format_domination": (frozenset({"reward_parts"}), ("rewards/correctness/mean", "rewards/format/mean")),
    },
    "rlprobe": {
        "healthy": (frozenset(), ()),
        "kl_blowup": (frozenset({"kl_drift"}), ("kl",)),
        "entropy_collapse": (frozenset({"entropy_collapse"}), ("entropy",)),
        "reward_hack_length": (frozenset({"length"}), ("completions/mean_length",)),
        "format_gaming": (frozenset({"reward_parts"}), ("rewards/correctness/mean", "rewards/format/mean")),
        "clip_saturation": (frozenset({"trust_region"}), ("clip_ratio/region_mean",)),
        "degenerate_groups": (EQUAL, ("frac_reward_zero_std",)),
        "adv_collapse": (frozenset({"no_gradient"}), ("adv_std",)),
        "grad_pathology": (frozenset({"learning_rate"}), ("grad_norm",)),
        "truncation_starve": (frozenset({"truncation"}), ("completions/clipped_ratio",)),
        "repetition_spiral": (frozenset({"repetition"}), ("repetition_rate",)),
        "reward_std_death": (EQUAL, ("frac_reward_zero_std",)),
        "value_divergence": (frozenset(), ("value_explained_variance",)),
        "ref_drift_asymmetry": (frozenset(), ("kl_positional",)),
        "throughput_rot": (frozenset(), ("step_time_s",)),
    },
}
#: Of those, what no sign is about: a value head, KL by position, the speed of a step.
NOT_SHOWN = ("value_divergence", "ref_drift_asymmetry", "throughput_rot")

#: By what a package finds, the causes of rlstab that say the same.
FINDINGS: Mapping[str, frozenset[str]] = {
    "advantage_collapse": EQUAL,
    "entropy_collapse": frozenset({"entropy_collapse"}),
    "reward_hacking": frozenset({"reward_hacking"}),
    "length_pathology": frozenset({"length", "truncation"}),
    "clip_saturation": frozenset({"trust_region"}),
    "kl_drift": frozenset({"kl_drift"}),
    "gradient_pathology": frozenset({"learning_rate", "no_gradient"}),
    "reward_composition": frozenset({"reward_parts"}),
    "plateau": frozenset({"plateau"}),
    "KL_BLOWUP": frozenset({"kl_drift"}),
    "ENTROPY_COLLAPSE": frozenset({"entropy_collapse"}),
    "REWARD_HACK_LENGTH": frozenset({"length"}),
    "FORMAT_GAMING": frozenset({"reward_parts"}),
    "CLIP_SATURATION": frozenset({"trust_region"}),
    "DEGENERATE_GROUPS": EQUAL,
    "ADV_COLLAPSE": frozenset({"no_gradient"}),
    "GRAD_PATHOLOGY": frozenset({"learning_rate"}),
    "TRUNCATION_STARVE": frozenset({"truncation"}),
    "REPETITION_SPIRAL": frozenset({"repetition"}),
    "REWARD_STD_DEATH": EQUAL,
    "kl_explosion": frozenset({"kl_drift"}),
    "gradient_norm_spike": frozenset({"learning_rate"}),
    "loss_nan": frozenset({"learning_rate"}),
    "advantage_variance": frozenset({"no_gradient"}),
    "reward_mean_drift": frozenset({"reward_hacking", "reward_parts", "plateau"}),
}

#: rlprobe's fields by TRL's names.
FIELDS = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_variance_group_frac",
    "kl": "kl_mean",
    "entropy": "entropy_mean",
    "clip_ratio/region_mean": "clip_fraction",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "completions/mean_length": "completion_len_mean",
    "completions/clipped_ratio": "truncation_rate",
    "repetition_rate": "repetition_rate",
    "adv_std": "adv_std",
}

#: Our metrics by TRL's names, for the packages.
OURS = {
    "reward": "reward/mean",
    "frac_reward_zero_std": "reward/zero_std_groups",
    "entropy": "tokens/entropy",
    "clip_ratio/region_mean": "ratio/clipped",
    "learning_rate": "lr",
    "grad_norm": "gradient/norm",
    "completions/mean_length": "response/length",
    "sampling/sampling_logp_difference/mean": "sampler/gap",
}


def of_rldoctor(scenario: str, seed: int) -> Rows:
    """A run as rldoctor generates it: 400 steps, evaluated every 25."""
    from rl_doctor.simulate import simulate

    records, _ = simulate(scenario, seed=seed)
    return {record["step"]: {name: value for name, value in record.items() if name != "step"} for record in records}


def of_rlprobe(scenario: str, seed: int) -> Rows:
    """A run as rlprobe generates it: 500 steps, broken from the middle on."""
    from rlprobe.storage import RunReader
    from rlprobe.testing.synth import generate_run

    with tempfile.TemporaryDirectory() as folder:
        out = generate_run(Path(folder) / "run", None if scenario == "healthy" else scenario, seed=seed)
        records = RunReader(out).steps()
    rows = {}
    for record in records:
        row = {name: float(getattr(record, field)) for name, field in FIELDS.items()}
        if record.nan_count:
            row["grad_norm"] = math.nan
        rows[record.step] = row | {f"rewards/{name}/mean": value for name, value in record.reward_components.items()}
    return rows


def by_rldoctor(rows: Rows) -> list[str]:
    """What rldoctor finds, from a warning on."""
    from rl_doctor import diagnose as judge
    from rl_doctor.detectors.base import Severity
    from rl_doctor.ingest.base import run_from_records

    run = run_from_records([{"step": step, **row} for step, row in rows.items()])
    return [finding.detector for finding in judge(run).problems if finding.severity >= Severity.WARNING]


def by_rlprobe(rows: Rows) -> list[str]:
    """What rlprobe finds, from a warning on."""
    from rlprobe.doctor.engine import diagnose_view
    from rlprobe.doctor.runview import RunView
    from rlprobe.schemas import RunManifest, StepRecord

    records = []
    for step, row in rows.items():
        fields: dict[str, Any] = {field: row[name] for name, field in FIELDS.items() if name in row}
        parts = {match[1]: row[name] for name in row if (match := re.fullmatch("rewards/(.+)/mean", name))}
        bad = not math.isfinite(row.get("grad_norm", 0.0))
        records.append(StepRecord(step=step, reward_components=parts, nan_count=int(bad), **fields))
    manifest = RunManifest(run_id="run", created_at="2026-01-01T00:00:00+00:00", algorithm="grpo")
    findings = diagnose_view(RunView(manifest, records))
    return [finding.signature_id for finding in findings if finding.severity != "info"]


#: What rlwatch is told at a step, by TRL's names.
WATCHED = {
    "entropy": "entropy",
    "kl_divergence": "kl",
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "advantage_std": "adv_std",
    "grad_norm": "grad_norm",
    "loss": "loss",
}


def by_rlwatch(rows: Rows) -> list[str]:
    """The alerts of rlwatch, step by step."""
    from rlwatch.config import RLWatchConfig
    from rlwatch.detectors import DetectorSuite

    suite, found = DetectorSuite(RLWatchConfig()), list[str]()
    for step, row in rows.items():
        found += [
            alert.detector
            for alert in suite.check_step(step, **{name: row.get(theirs) for name, theirs in WATCHED.items()})
        ]
    return found


GENERATORS: Mapping[str, Callable[[str, int], Rows]] = {"rldoctor": of_rldoctor, "rlprobe": of_rlprobe}
PEERS: Mapping[str, Callable[[Rows], list[str]]] = {
    "rldoctor": by_rldoctor,
    "rlprobe": by_rlprobe,
    "rlwatch": by_rlwatch,
}


def named(rows: Rows, without: Sequence[str] = ()) -> tuple[str | None, int | None]:
    """What rlstab names first, a cause or an observation, and its step; without some metrics."""
    kept = {step: {name: value for name, value in row.items() if name not in without} for step, row in rows.items()}
    fired = diagnose(log.Rows(kept).run("generated", "TRL")).fired
    return (CAUSES[fired[0].name], fired[0].step) if fired else (None, None)


def right(findings: Sequence[str], wanted: frozenset[str]) -> bool:
    """Whether the kind is among what a package finds; for a healthy run, whether that is nothing."""
    return any(FINDINGS.get(found, frozenset()) & wanted for found in findings) if wanted else not findings


#: Seeds that are judged without each metric in turn.
LACKING = 2
#: What a log may lack, and still say what went wrong elsewhere.
LACKS = (
    *(("reward",), ("frac_reward_zero_std",), ("entropy",), ("kl",), ("clip_ratio/region_mean",), ("grad_norm",)),
    *(("completions/mean_length",), ("completions/clipped_ratio",), ("eval/accuracy",)),
    ("rewards/correctness/mean", "rewards/format/mean"),
)


def generated(seeds: Sequence[int]) -> tuple[list[str], list[str]]:
    """The table of the generated runs, and lines that sum it up."""
    lacking: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    table = ["| run | named | step | right | the package itself |", "|---|---|---|---|---|"]
    totals: Counter[str] = Counter()
    for generator, scenarios in KINDS.items():
        for scenario, (wanted, shows) in scenarios.items():
            causes: Counter[str] = Counter()
            steps, own = [], 0
            for seed in seeds:
                rows = GENERATORS[generator](scenario, seed)
                cause, step = named(rows)
                causes[cause or "nothing"] += 1
                steps += [step] if step else []
                for lack in LACKS if scenario not in NOT_SHOWN and seed in seeds[:LACKING] else ():
                    if not set(lack) & set(shows):
                        without = named(rows, lack)[0]
                        lacking[lack]["runs" if wanted else "healthy"] += 1
                        lacking[lack]["right"] += without in wanted
                        lacking[lack]["called broken"] += bool(without and not wanted)
                for peer, judge in PEERS.items():
                    said = bool(wanted or scenario == "healthy") and right(judge(rows), wanted)
                    own += said and peer == generator
                    totals[f"{peer} of all {'broken' if wanted else 'healthy'} right"] += said
            if scenario in NOT_SHOWN:
                continue
            hits = sum(causes[cause] for cause in wanted or ("nothing",))
            kind = "healthy" if scenario == "healthy" else "broken"
            totals[f"{kind} right"] += hits
            totals[kind] += len(seeds)
            totals[f"{generator} {kind} right"] += own
            totals[f"{generator} {kind}"] += len(seeds)
            span = f"{min(steps)} to {max(steps)}" if steps else "none"
            cells = [f"{generator} `{scenario}`", told(causes), span, f"{hits} of {len(seeds)}"]
            table.append(f"| {' | '.join(cells)} | {own} of {len(seeds)} |")
    own = "; ".join(
        f"{generator} on its own: {totals[f'{generator} broken right']} of {totals[f'{generator} broken']}, and "
        f"{totals[f'{generator} healthy right']} of {totals[f'{generator} healthy']} healthy"
        for generator in KINDS
    )
    of_all = "; ".join(
        f"{peer} {totals[f'{peer} of all broken right']} and {totals[f'{peer} of all healthy right']}" for peer in PEERS
    )
    together = sum(lacking.values(), Counter[str]())
    least = min(lacking, key=lambda lack: lacking[lack]["right"] / lacking[lack]["runs"])
    return table, [
        f"The right kind in {totals['broken right']} of {totals['broken']} broken runs, nothing found in "
        f"{totals['healthy right']} of {totals['healthy']} healthy ones ({own}).",
        f"Of the same {totals['broken']} and {totals['healthy']}, by any finding: {of_all}.",
        f"With one metric left out, where another shows the kind: {together['right']} of {together['runs']} (fewest "
        f"without `{'` and `'.join(least)}`: {lacking[least]['right']} of {lacking[least]['runs']}), and "
        f"{together['called broken']} of {together['healthy']} healthy runs with a finding.",
    ]


def told(causes: Counter[str]) -> str:
    """``plateau 3, nothing 2``; without the count where there is one."""
    if len(causes) == 1:
        return next(iter(causes))
    return ", ".join(f"{cause} {count}" for cause, count in causes.most_common())


def ours(folder: Path) -> Iterator[str]:
    """The table of our broken runs, judged by all four."""
    hits: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(path for path in folder.iterdir() if path.suffix == ".jsonl" or re.search(r"-\d+$", path.name)):
        name = path.stem.partition("-")[0]
        (log,) = read_logs(path)
        fired = diagnose(log).fired
        wanted = frozenset() if name.startswith("healthy") else frozenset({name})
        rows: dict[int, dict[str, float]] = {}
        for theirs, metric in OURS.items():
            for step, value in zip(*map(list, log.metrics.get(metric, ([], []))), strict=True):
                rows.setdefault(int(step), {})[theirs] = float(value)
        for step, value in zip(*map(list, log.metrics["response/ended"]), strict=True):
            rows[int(step)]["completions/clipped_ratio"] = 1 - float(value)
        hits[name]["runs"] += 1
        hits[name]["rlstab"] += (CAUSES[fired[0].name] in wanted) if fired else not wanted
        equal = EQUAL if name == "dead_groups" else wanted
        for peer, judge in PEERS.items():
            hits[name][peer] += right(judge(rows), equal)
    yield OF_OURS
    yield "|---|---|---|---|---|"
    for name, counts in hits.items():
        cells = [f"{counts[judge]} of {counts['runs']}" for judge in ("rlstab", *PEERS)]
        yield f"| `{name}` | {' | '.join(cells)} |"


def write(lines: Sequence[str]) -> None:
    """Put the tables where the page has room for them; that of our runs stays where it was not made again."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    if OF_OURS in inside and OF_OURS not in lines:
        lines = [*lines, "", OF_OURS + inside.partition(OF_OURS)[2].rstrip()]
    PAGE.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]), encoding="utf-8")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7, 8, 9])
    options.add_argument(
        "--ours",
        type=Path,
        help="folder of runs or logs that `python -m benchmarks diagnose --out` or `--data` has left",
    )
    options.add_argument("--page", action="store_true", help="write the tables into docs/how-to/diagnose.md")
    chosen = options.parse_args()
    table, sums = generated(chosen.seeds)
    judged = ["", *ours(chosen.ours)] if chosen.ours else []
    print("\n".join([*table, "", *sums, *judged]))
    if chosen.page:
        write([*sums, *judged])


assert {cause for kinds in KINDS.values() for wanted, _ in kinds.values() for cause in wanted} <= set(CAUSES.values())
