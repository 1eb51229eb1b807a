"""The token viewer: one HTML file that holds everything it needs, and a short form for the terminal."""

from __future__ import annotations

import base64
import hashlib
import heapq
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rlstab.errors import ReportError
from rlstab.files import is_foreign
from rlstab.report.folder import read_json
from rlstab.report.tokens import Method, Numbers, Sample, Tokens, read_tokens
from rlstab.trace.effects import ACTIONS
from rlstab.visible import visible

#: Responses on a page, and in the terminal, where nothing else is asked for.
PAGE_LIMIT, TERMINAL_LIMIT = 2000, 8

#: What a page of ours has in its title.
MARK = b"<title>Tokens of "


def write_view(
    source: str | Path,
    out: str | Path | None = None,
    *,
    rollout: int | None = None,
    limit: int | None = None,
    tokenizer: str | Path | None = None,
) -> Path:
    """Write the page of a trace, and return where.

    Args:
        source: see :func:`rlstab.report.tokens.read_tokens`.
        out: of the page; None is ``view.html`` in a run folder, or the name of the trace file with ``.html``.
        rollout: only this one.
        limit: responses, those of the largest influence; None is 2000.
        tokenizer: see :func:`rlstab.report.tokens.read_tokens`.

    Raises:
        ReportError: nothing to show, or the page cannot be written.
    """
    source = Path(source)
    found = choose(read_tokens(source, tokenizer), rollout, PAGE_LIMIT if limit is None else limit)
    if out is None:
        out = source / "view.html" if source.is_dir() else source.with_suffix(".html")
    out = Path(out)
    try:
        if is_foreign(out, MARK):
            raise ReportError(f"{out} exists, is no page of `rlstab view`, and is left alone. Give --out another file.")
        out.write_text(page(found, source), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{out}: cannot be written: {error.strerror}. Give --out another file.") from error
    return out


def choose(found: Tokens, rollout: int | None, limit: int) -> Tokens:
    """The samples of one rollout, and of these at most ``limit``, those of the largest influence, in their order.

    Raises:
        ReportError: no sample of this rollout, or no sample wanted.
    """
    if limit < 1:
        raise ReportError(f"--limit {limit}: expected a number of at least 1.")
    samples = [one for one in found.samples if rollout is None or one.rollout == rollout]
    if not samples:
        traced = sorted({one.rollout for one in found.samples})
        raise ReportError(f"rollout {rollout} was not traced. Give one of {', '.join(map(str, traced))}.")
    notes = list(found.notes)
    if len(samples) > limit:
        notes.append(
            f"{len(samples)} responses were read; here are the {limit} of the largest influence. --limit changes that."
        )
        largest = heapq.nlargest(limit, range(len(samples)), key=lambda place: sum(samples[place].influence()))
        samples = [samples[place] for place in sorted(largest)]
    return Tokens(samples, notes)


def page(found: Tokens, source: Path) -> str:
    """The HTML of some samples. It asks for nothing, and nothing that a file says is read as HTML or script."""
    folder = resources.files("rlstab.report")
    style, script = ((folder / f"view.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        f"form-action 'none'"
    )
    return Template((folder / "view.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        title=html.escape(visible(f"Tokens of {_named(source)}", spaces=False)),
        style=style,
        script=script,
        data=_inert(_data(found, source)),
    )


def everywhere(samples: Sequence[Sample]) -> set[tuple[str, str]]:
    """Keys of methods with what they do to every token of every sample: marks would only hide the rest."""
    found: set[tuple[str, str]] | None = None
    for sample in samples:
        here = {
            (key, action)
            for key, method in sample.methods.items()
            for action, places in method.actions.items()
            if len(places) == len(sample.tokens)
        }
        found = here if found is None else found & here
    return found or set()


def _named(source: Path) -> str:
    """A run of a bench is named by what the bench calls it: of the folder, ``seed-0`` alone says nothing."""
    folder = source if source.is_dir() else source.parent
    place = read_json(folder / "bench.json")[0] or {}
    parts = [str(place[key]) for key in ("bench", "setting", "method") if place.get(key)]
    return ", ".join([*parts, f"seed {place['seed']}"]) if parts and "seed" in place else source.resolve().name


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _inert(data: Any) -> str:
    """JSON that is safe in a script element: no text in it ends the element or opens a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for one in "<>&\u2028\u2029":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return text


def _data(found: Tokens, source: Path) -> dict[str, Any]:
    names: dict[str, str] = {}
    acts: dict[str, set[str]] = {}
    always = everywhere(found.samples)
    for sample in found.samples:
        for key, method in sample.methods.items():
            names[key] = method.name
            acts.setdefault(key, set()).update(one for one in method.actions if (key, one) not in always)
    return {
        "source": visible(str(source), spaces=False),
        "notes": [visible(one, spaces=False) for one in found.notes],
        "actions": ACTIONS,
        "methods": {_key(key): visible(name, spaces=False) for key, name in sorted(names.items())},
        "acts": {_key(key): sorted(one) for key, one in acts.items()},
        "done": sorted(set().union(*acts.values())),
        "everywhere": [f"{_key(key)} {action}" for key, action in sorted(always)],
        "samples": [_sample(one) for one in found.samples],
    }


def _key(key: str) -> str:
    return visible(key)


def _sample(one: Sample) -> dict[str, Any]:
    influence = one.influence()
    return {
        "rollout": one.rollout,
        "optimizer": one.optimizer_step,
        "response": visible(one.response, spaces=False),
        "group": None if one.group is None else visible(one.group, spaces=False),
        "prompt": visible(one.prompt, spaces=False),
        "reward": one.reward,
        "tokens": [visible(text) for text in one.tokens],
        "ids": one.ids,
        "surprisal": _column(one.surprisal),
        "entropy": _column(one.entropies),
        "advantage": _column(one.advantages),
        "ratio": _column(one.ratio),
        "weight": _column(one.weight),
        "bonus": _column(one.bonus),
        "gate": _column(one.gate),
        "influence": _column([_short(value) for value in influence]),
        "total": _short(sum(influence)),
        "methods": {_key(key): _method(method) for key, method in one.methods.items()},
    }


def _method(one: Method) -> dict[str, Any]:
    line: dict[str, Any] = dict(one.actions)
    if one.weight:
        line["weights"] = list(one.weight.items())
    if one.bonus:
        line["bonuses"] = list(one.bonus.items())
    if one.gate:
        line["gates"] = list(one.gate.items())
    return line


def _column(values: Numbers) -> Numbers | float | None:
    """One number where all are equal; the page reads both."""
    return values[0] if values and all(one == values[0] for one in values) else values or None


def _short(value: float) -> float:
    return float(f"{value:.4g}")
