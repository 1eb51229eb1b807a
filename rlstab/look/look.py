"""``rlstab look``: one run in one page, its finding in a few lines."""

from __future__ import annotations

import json
import time
import webbrowser
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rlstab.console import counted
from rlstab.dump_files import folder_of
from rlstab.errors import ReportError
from rlstab.extras import how_to_install
from rlstab.files import is_dir, is_file
from rlstab.logs.watch import Watch, check_names, told
from rlstab.look.diagnosis import Diagnosis
from rlstab.look.find import STANDARD_INPUT, find, nearest, read_logs
from rlstab.look.finding import Look
from rlstab.look.page import MARK, TIMES, page
from rlstab.report.formatting import listed
from rlstab.report.output import refuse_foreign, write_text
from rlstab.signs import SIGNS
from rlstab.visible import visible

if TYPE_CHECKING:
    from rlstab.record import Dump

#: Exit code if a sign of ``--fail-on`` is present.
FAILED = 3
#: Lines on the terminal, and methods in them.
LINES, METHODS = 25, 4


def look(
    paths: Sequence[str | Path] = (),
    methods: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    tokenizer: str | Path | None = None,
    model: str | Path | None = None,
    code: Sequence[str | Path] = (),
    fail_on: Sequence[str] = (),
    as_json: bool = False,
    open_page: bool = False,
    follows: bool = False,
    console: Console,
) -> int:
    """Look at runs, print what was found and write the page of the first that shows a sign.

    Args:
        paths: runs, logs and dumps; empty searches the current folder.
        methods: files, names of methods or presets, or ``file.py:Class``; empty takes all.
        out: the page; None is ``look.html`` in the folder of the run, or the name of its file with ``.look.html``.
        tokenizer: folder of a tokenizer, or its ``tokenizer.json``; None takes that of the dump.
        model: folder of a model that adds what the dump lacks; see :func:`rlstab.look.forward.completed`.
        code: files with the user-defined methods of a dump, which are run; without them a dump runs no code.
        fail_on: names of signs; one that is present makes the return value :data:`FAILED`.
        as_json: print JSON, an entry for each run, and write no page unless ``out`` is given.
        open_page: open the page in a browser.
        follows: read the log of one run again and again, and print each sign that appears, until one of ``fail_on``
            does; no page.
        console: the one to print to.

    Returns:
        the exit code.

    Raises:
        ReportError: nothing can be read, or the page cannot be written.
        ConfigError: a name of ``fail_on`` is not that of a sign, or an objective cannot be used.
    """
    if fail_on:  # a wrong name is reported before anything is read
        check_names(fail_on, "--fail-on")
    if methods:
        from rlstab.look.alternatives import chosen

        chosen(methods, length=1)
    if follows:
        if len(paths) > 1 or Path(*paths) == STANDARD_INPUT:
            raise ReportError("--follow reads one log again and again. Name one path.")
        path = Path(paths[0] if paths else ".")
        stopped = follow(path, lambda text: console.print(escape(text), highlight=False), stop_at=fail_on)
        return FAILED if stopped else 0
    if paths:
        runs, rest = [run for path in paths for run in find(Path(path))], list[Path]()
    else:
        runs, rest = nearest(Path())
    for run in runs:
        run.notes += run.diagnosis.remarks
    if all(run.dump is None and not run.log.metrics.keys() - {"lr"} for run in runs):
        raise ReportError(f"{runs[0].title}: {runs[0].notes[-1]}")
    shown = next((run for run in runs if run.diagnosis.first), runs[0])
    writes = out is not None or not as_json
    if len(runs) == 1 or writes:
        if shown.dump is not None:
            _read_tokens(shown, shown.dump, methods, tokenizer, model, code, console)
        elif methods:
            shown.notes.append("Methods are tried on the tokens of a dump, so none was.")
    if out is not None or shown.path == STANDARD_INPUT:
        target = Path("look.html" if out is None else out)
    else:
        target = shown.path / "look.html" if is_dir(shown.path) else shown.path.with_suffix(".look.html")
    try:
        if writes:
            text = page(shown)
            refuse_foreign(target, [MARK], "a page of rlstab look", "--out")
            write_text(target, text, "--out")
    finally:  # the page stands even if the reader of the output stops, and the findings if the page cannot be written
        if as_json:
            console.file.write(json.dumps([run.as_json() for run in runs], indent=1, ensure_ascii=True) + "\n")
        else:
            _print(runs, shown, rest, console)
    if not as_json:
        console.print(visible(str(target), spaces=False), highlight=False, markup=False, soft_wrap=True)
    if writes and open_page:
        webbrowser.open(target.resolve().as_uri())
    fired = {sign.name for run in runs for sign in run.diagnosis.fired}
    return FAILED if fired & set(fail_on) else 0


def _read_tokens(
    run: Look,
    dump: Dump,
    methods: Sequence[str],
    tokenizer: str | Path | None,
    model: str | Path | None,
    code: Sequence[str | Path],
    console: Console,
) -> None:
    """The findings from the recorded optimizer steps of a run."""
    from rlstab.look.alternatives import alternatives_of, chosen  # these import torch, which a log does without
    from rlstab.look.gradient import gradient_of, shares_of
    from rlstab.look.host_loss import judge
    from rlstab.look.recorded_loss import with_code
    from rlstab.look.sampler import sampler_of
    from rlstab.record.token_texts import decoder_of

    run.notes += [note for note in dump.notes if note not in run.notes]
    if code:
        dump = replace(dump, steps=[with_code(step, code) for step in dump.steps])
    run.loss = judge(dump.steps)
    if model is not None:
        from rlstab.look.forward import completed

        dump = completed(dump, model, console)
    usable = [step.usable() for step in dump.steps]
    run.notes += [
        f"step {step.number}: {count} responses with a value that is NaN or impossible are left out."
        for step, count in usable
        if count
    ]
    run.steps = [step for step, _ in usable if len(step.batch)]
    if not run.steps:
        return
    run.decode = decoder_of(run.dump_path, tokenizer)
    if run.decode is None:
        recorded = is_file(folder_of(run.dump_path) / "tokenizer.json")
        hint = how_to_install("train") if recorded else "The dump has no tokenizer; --tokenizer FOLDER adds texts."
        run.notes.append(f"Tokens are shown by number. {hint}")
    run.gradient = gradient_of(run.steps, shares_of(run.steps))
    run.sampler = sampler_of(run.steps)
    longest = max(int(step.tensors["lengths"].max()) for step in run.steps)
    run.methods = alternatives_of(run.steps, chosen(methods, longest) if methods else None)


def follow(
    path: Path,
    tell: Callable[[str], None],
    *,
    stop_at: Collection[str] = (),
    every: float = 10.0,
    goes_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Read a log repeatedly, and report each new sign.

    Args:
        path: the path of one run; it need not exist yet.
        tell: prints a line.
        stop_at: names of signs at which to stop.
        every: seconds between two readings.
        goes_on: asked after each reading.

    Returns:
        whether a sign of ``stop_at`` appeared.

    Raises:
        ReportError: several runs are logged there.
    """
    watch = Watch()
    while True:
        try:
            logs = read_logs(path)
        except ReportError:  # nothing there so far, or half a line
            logs = []
        if len(logs) > 1:
            raise ReportError(f"{path}: {len(logs)} runs are logged there. Give the path of one of them.")
        for log in logs:
            for sign in watch.new(log):
                tell(told(sign, log.unit))
        if set(stop_at) & watch.seen.keys():
            return True
        if not goes_on():
            return False
        time.sleep(every)


def _overview(runs: Sequence[Diagnosis]) -> RenderableType:
    """A line for each run, and the number of runs by cause."""
    table = Table.grid(padding=(0, 2))
    for run in runs:
        table.add_row(escape(visible(run.log.path, spaces=False)), escape(run.verdict()))
    titles = Counter(run.remedy.title if run.remedy else "solved" if run.solved else "no harm" for run in runs)
    counts = ", ".join(f"{title} {count}" for title, count in titles.most_common())
    return Group(table, "", f"{counted(len(runs), 'run')}: {counts}. Give one of them for the full text.")


def _print(runs: Sequence[Look], run: Look, others: Sequence[Path], console: Console) -> None:
    """The finding about a run first, below a line for each of several, and as much as fits into :data:`LINES`."""
    if len(runs) > 1:
        console.print(_overview([run.diagnosis for run in runs]), highlight=False)
    diagnosis, unit = run.diagnosis, run.log.unit
    lines = [(f"{run.title}: {run.head}", "bold yellow" if diagnosis.first else "bold green")]
    if others:
        rest = f"{', '.join(map(str, others[:6]))}{' and others' if len(others) > 6 else ''}"
        lines.append((f"Also here: {rest}.", "dim"))
    lines += [(f"  {unit} {sign.step}: {SIGNS[sign.name].title}: {sign.text}", "") for sign in diagnosis.fired]
    lines += [(f"  do: {text}", "") for text in run.advice]
    if diagnosis.remedy:
        lines.append((f"  likely: {'; or '.join(diagnosis.remedy.likely)}", "dim"))
        lines.append((f"  settings: {', '.join(diagnosis.settings)}", ""))
    lines += [(text, "") for text in run.lead]
    lines += [(f"  {text}", "yellow") for text in (run.loss.findings if run.loss else ())]
    if run.methods is not None:
        acting = sorted((row for row in run.methods.rows if row.acts), key=lambda row: -row.turn)
        names = [f"{row.name} ({row.turn:.0f}°, step {TIMES} {row.length:.2g})" for row in acting[:METHODS]]
        if names:
            lines.append((f"Methods that would turn its gradient most: {listed(names)}.", ""))
    lines += [(f"note: {text}", "yellow") for text in run.notes]
    room = LINES - 2  # for what follows: that there is more, and the path of the page
    for text, style in ((visible(text, spaces=False), style) for text, style in lines):
        room -= max(1, len(wrap(text, console.width)))
        if room < 0:
            console.print("More is on the page.", style="dim", highlight=False)
            break
        console.print(escape(text), style=style, highlight=False)
