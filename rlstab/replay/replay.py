"""``rlstab replay``: read a dump, judge its loss, replay methods over it, write the pages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlstab.config import load_objective
from rlstab.config.objectives import at_defaults
from rlstab.console import counted
from rlstab.core.objective import TokenObjective, no_fit_warnings
from rlstab.errors import ReportError
from rlstab.extras import require
from rlstab.files import is_file
from rlstab.presets import PRESETS
from rlstab.record import Dump, MethodTrace, Trace, read_dump
from rlstab.record.effects import token_ratio
from rlstab.record.reader import folder_of
from rlstab.record.response_traces import ResponseTraces, choose, decoder_of
from rlstab.record.token_texts import Decode
from rlstab.replay.effects import Effects, effects_of, every_objective
from rlstab.replay.host_loss import Verdict, judge
from rlstab.replay.page import MARK, actions_in, page
from rlstab.report import view
from rlstab.report.output import refuse_foreign, write_text
from rlstab.safe_read import plain
from rlstab.zoo import METHODS

#: Responses on the page of tokens, each with every method: by default, and at most.
RESPONSES, MOST_RESPONSES = 200, 10**6
#: Rows of the table on the terminal.
MOST_ROWS = 20


def replay(
    path: str | Path,
    objectives: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    tokenizer: str | Path | None = None,
    model: str | Path | None = None,
    responses: int = RESPONSES,
    console: Console,
) -> Path:
    """Replay a dump, print the findings, and write ``replay.html``, ``tokens.html`` and ``replay.json``.

    Args:
        path: of the dump; see :func:`rlstab.record.read_dump`.
        objectives: files, names of methods or presets, or ``file.py:Class``; empty takes all methods and presets.
        out: folder of the pages; None is ``replay`` in the dump's folder.
        tokenizer: folder of a tokenizer, or its ``tokenizer.json``; None takes that of the dump, if it has one.
        model: folder of a model that adds what the dump lacks; see :func:`rlstab.replay.forward.completed`.
        responses: on the page of tokens.
        console: where to print.

    Returns:
        the page.

    Raises:
        ReportError: nothing can be read, or a page cannot be written.
        ConfigError: an objective cannot be used.
    """
    folder, default = folder_of(path), out is None
    out = folder / "replay" if out is None else Path(out)
    dump = read_dump(path)
    if default and out.is_symlink():
        raise ReportError(f"{out} is a link. Give --out the folder of the pages.")
    longest = max(int(step.tensors["lengths"].max()) if len(step.batch) else 1 for step in dump.steps)
    replayed = chosen(objectives, longest)
    if model is not None:
        require("train", "rlstab replay --model")
        from rlstab.replay.forward import completed

        dump = completed(dump, model, console)
    usable = _usable(dump)
    responses = min(responses, MOST_RESPONSES)
    shown = max(int((step.batch.sequence < responses).sum()) for step in usable.steps)
    effects = effects_of(usable.steps, replayed, shown)
    results = results_of(usable, judge(dump.steps), effects)
    tokens = responses_of(usable, effects, decoder_of(path, tokenizer), responses)
    named_as = folder.resolve().name
    files = {
        "tokens.html": (view.MARK, view.page(tokens, named_as, str(folder))),
        "replay.json": (b'{\n "rlstab_replay"', json.dumps(results, indent=1) + "\n"),
        "replay.html": (MARK, page(results, effects.overlap, source=named_as, tokens="tokens.html")),
    }
    for name, (mark, _) in files.items():
        refuse_foreign(out / name, [mark], "a file of rlstab replay", "--out")
    for name, (_, text) in files.items():
        write_text(out / name, text, "--out")
    show(results, console)
    return out / "replay.html"


def _usable(dump: Dump) -> Dump:
    """The dump without the responses that no loss can be made of."""
    steps, notes = [], list(dump.notes)
    for step in dump.steps:
        kept, lost = step.usable()
        steps.append(kept)
        if lost:
            notes.append(f"step {step.number}: {lost} responses with values that are NaN or impossible are left out.")
    return Dump(steps, notes)


def responses_of(dump: Dump, effects: Effects, decode: Decode | None, limit: int) -> ResponseTraces:
    """The first responses of a dump, with what every objective would have done to their tokens."""
    traced = []
    for index, step in enumerate(dump.steps):
        if limit <= 0:
            break
        first = step.only(torch.arange(min(limit, len(step.tensors["lengths"]))))
        count, methods = len(first.batch), {}
        for name, actions in effects.actions.items():
            seen = {} if name in effects.left_out else actions[index]
            seen = {action: tokens[:count] for action, tokens in seen.items()}
            if any(bool(tokens.any()) for tokens in seen.values()):
                methods[name] = MethodTrace(name, seen, None, None)
        traced.append((first, Trace(token_ratio(first), methods)))
        limit -= len(first.tensors["lengths"])
    return choose(traced, decode, MOST_RESPONSES, dump.notes)


def chosen(names: Sequence[str], length: int) -> Mapping[str, TokenObjective]:
    """Objectives by the name of a method or preset, the path of a file, or ``file.py:Class``; all if no name is given.

    Args:
        names: of objectives.
        length: tokens of the longest response, for methods that need one as a setting.
    """
    with no_fit_warnings():  # methods stand alone, without what they were published with
        return {name: _objective(name, length) for name in names} or every_objective(length)


def _objective(name: str, length: int) -> TokenObjective:
    if name in METHODS.names():
        return load_objective(at_defaults(name, length))
    preset = PRESETS.get(name.removeprefix("preset:"))
    return preset.objective if preset else load_objective(name if is_file(name) else {"name": name})


def results_of(dump: Dump, verdict: Verdict, effects: Effects) -> dict[str, Any]:
    """The findings in a form that JSON can hold; the pages and the terminal show them."""
    loss = {"name": verdict.name, "agrees": verdict.agrees, "said": sentence(verdict), "findings": verdict.findings}
    return {
        "rlstab_replay": 1,
        "host": dump.steps[0].header.host,
        "steps": [step.number for step in dump.steps],
        "responses": sum(len(step.tensors["lengths"]) for step in dump.steps),
        "tokens": sum(len(step.batch) for step in dump.steps),
        "logits": any(step.batch.sum_p_sq is not None for step in dump.steps),
        "loss": {**loss, "error": plain(verdict.error)},
        "methods": effects.rows,
        "left_out": effects.left_out,
        "notes": dump.notes,
    }


def sentence(verdict: Verdict) -> str:
    """The verdict on the loss in one sentence."""
    if verdict.agrees is None:
        return f"It cannot be decided whether the loss was what it said: {verdict.compared}."
    digits = math.floor(-math.log10(min(max(1e-12, verdict.error), 1e12)))
    if verdict.agrees:
        return f"The loss is {verdict.name}: {verdict.compared} agree to {counted(digits, 'digit')}."
    if verdict.findings and digits >= 4:
        return f"The loss is {verdict.name}, to {counted(digits, 'digit')}, but its inputs are wrong."
    return f"The loss is not {verdict.name}: {verdict.compared} differ by up to {verdict.error:.2g} of the largest."


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print the verdict, and the methods that touch most."""
    console.print(escape(results["loss"]["said"]), style="bold")
    for text in (*results["loss"]["findings"], *results["notes"]):
        console.print(escape(text), style="yellow")
    rows, left_out = results["methods"], len(results["left_out"])
    actions = actions_in(rows)
    table = Table("method", box=box.SIMPLE, pad_edge=False)
    table.columns[0].min_width = max((len(row["name"]) for row in rows[:MOST_ROWS]), default=0)
    for name in (*actions, "cosine"):
        table.add_column(name, justify="right")
    for row in rows[:MOST_ROWS]:
        shares = [f"{row[action]:.1%}" if row[action] else "" for action in actions]
        table.add_row(escape(row["name"]), *shares, "" if row["cosine"] is None else f"{row['cosine']:.2f}")
    console.print(table)
    if len(rows) > MOST_ROWS or left_out:
        console.print(f"{max(len(rows) - MOST_ROWS, 0)} more on the page; {left_out} left out, with the reason.")
