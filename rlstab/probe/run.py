"""``rlstab probe``: one bench of all probes, of which recorded runs are taken and the rest is made; then the map."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rlstab.bench.file import Bench, BenchRun, load_bench
from rlstab.bench.run import STOPPED, run_bench
from rlstab.console import Terminal
from rlstab.errors import RlstabError
from rlstab.probe.map import Map, draw_map
from rlstab.probe.page import page
from rlstab.probe.records import Record, identity, made, recorded, write
from rlstab.probe.rows import Row, rows
from rlstab.probe.score import QUICK_SEEDS
from rlstab.probe.suite import START, Probe, probes


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
    console: Console | None = None,
) -> int:
    """Make what is not recorded, and write ``map.html``, ``map.md``, ``map.json`` and ``results.jsonl``.

    Args:
        asked: see :func:`rlstab.probe.rows.row`; the fixed rows are always there.
        names: of probes; empty takes all.
        quick: three doses and three seeds.
        model: another than the small one.
        out: folder; what is finished in it is not made again.
        records: files of recorded runs beside those that ship.
        workers: runs at a time; None is one per CPU.
        retry: make failed runs again.
        console: where to say what happens; None is the terminal.

    Returns:
        0, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        UnknownName, ConfigError: see :func:`rlstab.probe.rows.row` and :func:`rlstab.probe.suite.probes`.
        ReportError: a file of recorded runs cannot be read.
    """
    console, out = console or Terminal(stderr=True), Path(out)
    suite, lines = probes(names, model), rows(list(asked))
    remarks: list[str] = []
    planned = [run for probe in suite for run in runs_of(probe, lines, quick, out, remarks)]
    of_runs, known = {run.name: identity(run) for run in planned}, recorded(*map(Path, records))
    # two rows may ask for one run: half the rate at twice the dose, or the true reward whatever the dose
    first = {of_runs[run.name]: run for run in reversed(planned)}
    missing = [run for run in planned if of_runs[run.name] not in known and first[of_runs[run.name]] is run]
    there = sum(of_runs[run.name] in known for run in planned)
    told = f"{len(planned)} outcomes: {there} are recorded; the others take {len(missing)} runs in {out}."
    console.print(escape(told), highlight=False, soft_wrap=True)
    code, broken = 0, False
    if missing:
        given = {"--probe": names, "--records": records, "--model": [model] if model else [], "--out": [out]}
        options = [text for option, values in given.items() for value in values for text in (option, str(value))]
        again = shlex.join(["rlstab", "probe", *asked, *["--quick"] * quick, *options])
        bench = _merged(missing, suite[0], out, again)
        code = run_bench(bench, workers=workers, overwrite=True, retry=retry, console=console)
    for run in missing:
        result = made(run, of_runs[run.name])
        if isinstance(result, Record):
            known[result.identity] = result
        elif result is not None:
            remarks.append(f"{run.name}: {result}")
            broken = True
    results = [replace(known[of_runs[run.name]], **_place(run)) for run in planned if of_runs[run.name] in known]
    drawn = draw_map(suite, {line.name: line.kinds for line in lines}, results, remarks=remarks)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "results.jsonl", results)
    for name, text in (("map.html", page(drawn)), ("map.md", drawn.markdown), ("map.json", drawn.json)):
        (out / name).write_text(text, encoding="utf-8")
    _say(console, drawn, out)
    return STOPPED if code == STOPPED else int(broken)  # a policy that is lost is an outcome


def _place(run: BenchRun) -> dict[str, Any]:
    """Where a run stands here: one of the same identity may have been recorded under another row."""
    probe, _, dose = run.setting.rpartition("-")
    return {"probe": probe, "dose": dose, "row": run.method}


def runs_of(probe: Probe, lines: Sequence[Row], quick: bool, out: Path, remarks: list[str]) -> list[BenchRun]:
    """The runs of a probe, fixed rows first in each seed; rows that do not fit it are left out, with a remark."""
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


def _merged(missing: Sequence[BenchRun], probe: Probe, out: Path, again: str) -> Bench:
    """The runs of several probes as those of one bench, whose workers go from one probe to the next."""
    bench = load_bench({**probe.bench, "name": "probe"}, out=out)
    return replace(bench, runs=tuple(missing), unequal=(), again=again)


def _say(console: Console, drawn: Map, out: Path) -> None:
    for line in drawn.sentences:
        console.print(escape(line), highlight=False, soft_wrap=True)
    for remark in drawn.remarks:
        console.print(f"[yellow]note:[/] {escape(remark)}", highlight=False, soft_wrap=True)
    console.print(f"written: {escape(str(out))}/map.html, map.md, map.json, results.jsonl", highlight=False)
