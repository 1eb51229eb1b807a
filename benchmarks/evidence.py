"""The figures that ``rlstab look`` and docs/troubleshooting.md give as evidence, from the results that are kept.

    python -m benchmarks evidence           # writes rlstab/look/evidence.json and docs/troubleshooting.md
    python -m benchmarks evidence --check   # writes nothing; exit 1 where one of them is stale

rlstab/look/remedies.yaml says which comparisons are meant.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.protocol import ROOT
from benchmarks.troubleshooting import page
from rlstab.look import remedies
from rlstab.look.remedies import EVIDENCE, Figure
from rlstab.report.collapse import collapsed
from rlstab.report.comparison import chosen_outcomes, outcome_of
from rlstab.report.load import load_runs
from rlstab.report.statistics import against_baseline

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "troubleshooting.md"


def figures(comparison: Mapping[str, Any]) -> list[Figure]:
    """The figures of one comparison: all methods of the bench take part in it, as on the page of results."""
    runs = [
        run
        for run in load_runs(RESULTS / f"{comparison['file']}.jsonl").runs
        if run.setting == comparison["setting"] or comparison["setting"] == "default"
    ]
    (baseline,) = {run.baseline for run in runs}
    assert baseline is not None
    compared = []
    for outcome in chosen_outcomes(runs, comparison["outcomes"]):
        values: dict[str, dict[int, float]] = {}
        for run in runs:
            value = outcome_of(run, outcome.name)
            if value is not None and not collapsed(run):
                values.setdefault(run.method, {})[run.seed] = value
        others = {name: by_seed for name, by_seed in values.items() if name != baseline}
        for method, paired in against_baseline(others, values[baseline]).items():
            if method in comparison["methods"]:
                compared.append(
                    Figure(
                        bench=str(comparison["file"]),
                        setting=str(comparison["setting"]),
                        method=method,
                        baseline=baseline,
                        outcome=outcome.name,
                        unit=outcome.unit or ("tokens" if outcome.name == "response/length" else ""),
                        seeds=len(paired.seeds),
                        difference=_short(paired.difference.value),
                        low=_short(paired.difference.low),
                        high=_short(paired.difference.high),
                        verdict=paired.verdict,
                        task=str(runs[0].setting_at("task.name")),
                        command=f"rlstab bench examples/bench_{comparison['file']}.yaml",
                        page="docs/results.md",
                    )
                )
    return compared


def text() -> str:
    """What evidence.json should hold."""
    cells: dict[str, dict[tuple[str, str], Figure]] = {}
    for cause in remedies.table().values():
        for comparison in cause["evidence"]:
            cell = cells.setdefault(remedies.key(comparison), {})
            cell |= {(figure.method, figure.outcome): figure for figure in figures(comparison)}
    data = {name: [dataclasses.asdict(figure) for figure in each.values()] for name, each in cells.items()}
    return json.dumps(data, indent=1) + "\n"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    check = options.parse_args().check
    stale = []
    for path, wanted in ((EVIDENCE, text), (PAGE, page)):
        new = wanted()
        if check:
            stale += [path] if not path.exists() or path.read_text(encoding="utf-8") != new else []
        else:
            path.write_text(new, encoding="utf-8")
            remedies.figures.cache_clear()  # the page reads them
            remedies.remedies.cache_clear()
    if stale:
        sys.exit(f"stale: {', '.join(str(record) for record in stale)}. Run: python -m benchmarks evidence")
