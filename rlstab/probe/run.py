"""``rlstab probe``: takes recorded runs, makes the others as one bench, and draws the map."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rlstab.bench.file import BenchRun, few, load_bench
from rlstab.bench.plan import plan_of
from rlstab.bench.record import read_record
from rlstab.bench.run import STOPPED, run_bench
from rlstab.console import Terminal, say
from rlstab.core.objective import no_fit_warnings
from rlstab.errors import ConfigError, ModelError, RlstabError
from rlstab.files import from_home, is_dir, replace_file
from rlstab.probe.map import draw_map
from rlstab.probe.page import page
from rlstab.probe.records import Record, as_lines, identity, made, recorded
from rlstab.probe.rows import Row, rows
from rlstab.probe.score import QUICK_SEEDS
from rlstab.probe.suite import START, Probe, probes
from rlstab.report.formatting import listed
from rlstab.report.output import refuse_foreign, writing

#: The files that are written, each with a mark; a file of that name without the mark is not replaced.
_FILES = {
    "map.html": b"<title>Probes</title>",
    "map.md": b"# Probes",
    "map.json": b'"cells"',
    "results.jsonl": b'"identity"',
}


def run_probes(
    asked: Sequence[str],
    *,
    names: Sequence[str] = (),
    quick: bool = False,
    model: str | None = None,
    out: str | Path = "runs/probe",
    records: Sequence[str | Path] = (),
    workers: int | None = None,
    retry: bool = False,
    dry_run: bool = False,
) -> int:
    """Make runs that are not recorded, and write ``map.html``, ``map.md``, ``map.json`` and ``results.jsonl``.

    Args:
        asked: see :func:`rlstab.probe.rows.row`; the fixed rows are always added.
        names: names of probes; empty takes all.
        quick: three doses and three seeds.
        model: a model other than the small one; None is the small one.
        out: folder; finished runs in it are not repeated.
        records: more files of recorded runs.
        workers: runs at a time; None is one per CPU.
        retry: repeat failed runs.
        dry_run: only say what would be made.

    Returns:
        0, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        UnknownName, ConfigError: see :func:`rlstab.probe.rows.row` and :func:`rlstab.probe.suite.probes`; or a row fits
            no probe, or the folder holds another bench.
        ModelError: the model is not on this machine.
        ReportError: a file of recorded runs cannot be read, or another file would be replaced.
    """
    stdout, console, out = Terminal(), Terminal(stderr=True), Path(out)
    with no_fit_warnings():
        suite, lines = probes(names, model), rows(asked)
        planned, remarks = _plan(suite, lines, quick, out)
    if not dry_run:
        _require_own(out)
    of_runs, archive = {run.name: identity(run) for run in planned}, recorded(*map(Path, records))
    # two rows may need the same run: half the rate at twice the dose, or the true reward at any dose
    first = {of_runs[run.name]: run for run in reversed(planned)}
    missing = [run for run in planned if of_runs[run.name] not in archive and first[of_runs[run.name]] is run]
    hits, plan = sum(of_runs[run.name] in archive for run in planned), plan_of(missing, overwrite=True, retry=retry)
    left = len(plan["anew"] + plan["resumed"])
    rest = f"; {len(missing)} runs in {out} give the others, {left} of them still to make" if missing else ""
    say(console, f"{len(planned)} outcomes: {hits} are recorded{rest}.")
    if left:
        seconds = [archive[of_runs[run.name]].cpu_seconds for run in planned if of_runs[run.name] in archive]
        took = [second for second in seconds if second is not None]
        rollouts = sum(run.training.optimisation.rollouts for run in plan["anew"] + plan["resumed"])
        time = f", about {left * sum(took) / len(took) / 60:.0f} CPU-minutes, as recorded runs took" if took else ""
        say(console, f"To make: {left} runs of {rollouts} rollouts in all{time}.")
    if dry_run:
        return 0
    code, failures = 0, dict[str, list[str]]()
    # fail here rather than in every run
    if left and model is not None and not is_dir(folder := from_home(missing[0].training.model.name)):
        raise ModelError(f"there is no model in {folder}. Make it with `python examples/{model}_model.py` in a clone.")
    if missing:
        options = {"--probe": names, "--records": records, "--model": [model], "--out": [out], "--workers": [workers]}
        pairs = [(option, str(value)) for option, values in options.items() for value in values if value is not None]
        command_line = shlex.join(["rlstab", "probe", *asked, *["--quick"] * quick, *chain.from_iterable(pairs)])
        # the runs of several probes as one bench, whose workers go from one probe to the next
        bench = load_bench({**suite[0].bench, "name": "probe"}, out=out)
        bench = replace(bench, runs=tuple(missing), notes=(), again=command_line)
        code = run_bench(bench, workers=workers, overwrite=True, retry=retry, console=console)
    for run in missing:
        result = made(run, of_runs[run.name])
        if isinstance(result, Record):
            archive[result.identity] = result
        elif result is not None:
            failures.setdefault(result, []).append(run.name)
    remarks += [f"{few(runs)}: {reason}" for reason, runs in failures.items()]
    results = []
    for run in planned:
        if of_runs[run.name] in archive:  # where it may have been recorded under another row
            probe, _, dose = run.setting.rpartition("-")
            results.append(replace(archive[of_runs[run.name]], probe=probe, dose=dose, row=run.method))
    drawn = draw_map(suite, {line.name: line.kinds for line in lines}, results, remarks=remarks)
    for name, text in zip(_FILES, (page(drawn), drawn.markdown, drawn.json, as_lines(results)), strict=True):
        replace_file(out / name, text)
    for line in drawn.sentences:
        say(stdout, line)
    for remark in drawn.remarks:
        say(stdout, f"note: {remark}", "yellow")
    say(stdout, f"folder: {out} ({', '.join(_FILES)})", copied=True)
    say(stdout, f"next: open {out / 'map.html'} in a browser", copied=True)
    return STOPPED if code == STOPPED else int(bool(failures))  # a lost policy is an outcome


def _plan(suite: Sequence[Probe], lines: Sequence[Row], quick: bool, out: Path) -> tuple[list[BenchRun], list[str]]:
    """All runs, and remarks on those that are missing or differ.

    Raises:
        ConfigError: a row fits no probe.
    """
    remarks: list[str] = []
    planned = [run for probe in suite for run in runs_of(probe, lines, quick, out, remarks)]
    methods = {run.method for run in planned}
    for line in lines:
        if line.name not in methods:
            raise ConfigError(next(remark for remark in remarks if remark.startswith(f"{line.name} cannot")))
    base = {run.setting: run.training.optimisation.old_logprobs for run in planned if run.method == "base"}
    unlike = {run.method for run in planned if run.training.optimisation.old_logprobs != base[run.setting]}
    if names := [line.name for line in lines if line.name in unlike]:
        remarks.append(f"ratio to the sampler (`old_logprobs: rollout`), unlike the base: {listed(names)}")
    return planned, remarks


def _require_own(out: Path) -> None:
    """Make the folder, and refuse one with other files that would be replaced."""
    with writing(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
    for name, mark in _FILES.items():
        refuse_foreign(out / name, [mark], "of `rlstab probe`", "--out")
    if read_record(out).get("name", "probe") != "probe":
        raise ConfigError(f"{out} holds another bench, which is not replaced. Give another folder with --out.")


def runs_of(probe: Probe, lines: Sequence[Row], quick: bool, out: Path, remarks: list[str]) -> list[BenchRun]:
    """The runs of a probe, fixed rows first for each seed; rows that do not fit are left out with a remark."""
    doses = probe.quick_doses if quick else probe.doses
    settings = {f"{probe.name}-{dose}": probe.bench["settings"][dose] for dose in doses}
    seeds = probe.bench["seeds"][: QUICK_SEEDS if quick else None]
    data = {**probe.bench, "name": "probe", "settings": settings, "seeds": seeds}

    def load(methods: Mapping[str, Any]) -> tuple[BenchRun, ...]:
        return load_bench({**data, "methods": methods}, out=out).runs

    loaded = list(load(data["methods"]))
    for line in lines:
        try:
            loaded += load({"base": {}, line.name: line.entry(probe)})
        except RlstabError as error:
            remarks.append(f"{line.name} cannot run in {probe.name}: {error}")
    first, unique = f"{probe.name}-{doses[0]}", {run.name: run for run in loaded}
    runs = [run for run in unique.values() if run.method != START or (run.setting, run.seed) == (first, seeds[0])]
    return sorted(runs, key=lambda run: seeds.index(run.seed))
