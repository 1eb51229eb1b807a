"""The page of a replay: the verdict on the loss, what each method would have done, and which of them overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from statistics import fmean
from typing import Any

from markupsafe import Markup
from torch import Tensor

from rlstab.replay.dumps import Dump
from rlstab.replay.effects import Effects
from rlstab.replay.host_loss import Verdict
from rlstab.report.formatting import MINUS, NOTHING, counted, decimals, ranges
from rlstab.report.output import digest, resource
from rlstab.report.safe_read import plain
from rlstab.report.template import rendered
from rlstab.report.token_traces import Method, Sample, Tokens
from rlstab.trace.effects import ACTIONS
from rlstab.trace.token_texts import token_texts

#: What a page of ours has in its head.
MARK = b'<meta name="rlstab-replay"'
#: What an objective has one number of in each step; see :class:`rlstab.replay.effects.Effect`.
METRICS = ("touched", "norm", "cosine", "entropy")
#: Objectives in the table of overlaps: those that touch most, but not every token.
MOST_OVERLAPS = 12
#: Width and height of a curve over steps, pixels.
CURVE = (150, 26)


def rows_of(effects: Effects) -> list[dict[str, Any]]:
    """By objective, means over steps: for the table, the terminal and JSON. Those that touch most come first.

    ``shares`` by action, the :data:`METRICS` (None where one is not known), and ``steps`` with these by step.
    """
    rows: list[dict[str, Any]] = []
    for name, of_method in effects.by_name.items():
        columns = {metric: [getattr(effect, metric) for effect in of_method] for metric in METRICS}
        steps = {key: [value if math.isfinite(value) else None for value in values] for key, values in columns.items()}
        shares = {action: fmean(effect.shares.get(action, 0.0) for effect in of_method) for action in ACTIONS}
        rows.append({"name": name, "shares": shares, **{key: _mean(steps[key]) for key in METRICS}, "steps": steps})
    return sorted(rows, key=lambda row: (-row["touched"], row["name"]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def sentence(verdict: Verdict) -> str:
    """The verdict on the loss in one sentence."""
    if verdict.agrees is None:
        return f"Whether the loss was what it said cannot be told: {verdict.compared}."
    digits = math.floor(-math.log10(max(verdict.error, 1e-12)))
    if verdict.agrees:
        return f"The loss is {verdict.name}: {verdict.compared} agree to {counted(digits, 'digit')}."
    if verdict.findings and math.isfinite(verdict.error) and digits >= 4:
        return f"The loss is {verdict.name}, to {counted(digits, 'digit')}, and what goes into it is wrong."
    return f"The loss is not {verdict.name}: {verdict.compared} differ by up to {verdict.error:.2g} of the largest."


def page(dump: Dump, verdict: Verdict, effects: Effects, *, source: str, tokens: str) -> str:
    """The HTML. It asks for nothing, and nothing that a file says is read as HTML or script.

    Args:
        dump: what was read.
        verdict: on the loss.
        effects: of every objective.
        source: names the dump.
        tokens: address of the page of tokens.
    """
    rows, folder = rows_of(effects), resources.files("rlstab.replay")
    template, script = ((folder / f"replay.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    single = [row for row in rows if not row["name"].startswith("preset:")]
    groups = {"Methods": single, "Presets": [row for row in rows if row not in single]}
    functions = {"counted": counted, "ranges": ranges, "decimals": decimals, "percent": _percent, "figure": _figure}
    context = {
        "policy": Markup(digest(script)),
        "script": Markup(script),
        "style": Markup(resource("page.css")),
        "source": source,
        "dump": dump,
        "numbers": [step.number for step in dump.steps],
        "responses": sum(len(step.tensors["lengths"]) for step in dump.steps),
        "count": sum(len(step.batch) for step in dump.steps),
        "lead": sentence(verdict),
        "findings": verdict.findings,
        "groups": {title: of_kind for title, of_kind in groups.items() if of_kind},
        "curves": _curves(rows) if len(dump.steps) > 1 else {},
        "size": CURVE,
        "actions": actions_in(rows),
        "logits": any(step.batch.sum_p_sq is not None for step in dump.steps),
        "overlap": effects.overlap,
        "acting": [row["name"] for row in single or rows if 0 < row["touched"] < 1][:MOST_OVERLAPS],
        "left_out": effects.left_out,
        "tokens": tokens,
    }
    return rendered(template, functions, context)


def actions_in(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What any of the objectives did."""
    return [action for action in ACTIONS if any(row["shares"][action] for row in rows)]


def _percent(share: float) -> str:
    return "" if not share else "< 0.1" if share < 0.001 else f"{share:.1%}"[:-1]


def _figure(value: float | None, sign: str = "-") -> str:
    return NOTHING if value is None else f"{value:{sign}#.2g}".rstrip(".").replace("-", MINUS)


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By objective, the points of a line over steps for each metric, on a scale that all objectives share."""
    curves: dict[str, list[str]] = {row["name"]: [] for row in rows}
    for metric in METRICS:
        known = [value for row in rows for value in row["steps"][metric] if value is not None]
        low, high = min(known, default=0.0), max(known, default=1.0)
        for row in rows:
            values = row["steps"][metric]
            across, up = (CURVE[0] - 4) / (len(values) - 1), (CURVE[1] - 4) / ((high - low) or 1)
            places = [(place, value) for place, value in enumerate(values) if value is not None]
            points = [f"{2 + place * across:.1f},{2 + (high - value) * up:.1f}" for place, value in places]
            curves[row["name"]].append(" ".join(points))
    return curves


def samples_of(dump: Dump, effects: Effects, decode: Any, limit: int) -> Tokens:
    """The responses of a dump for the token viewer, with what every objective would have done; the first ones.

    Args:
        dump: what was read.
        effects: of every objective.
        decode: of a tokenizer, or None.
        limit: responses.
    """
    samples: list[Sample] = []
    for place, step in enumerate(dump.steps):
        batch, ids, rewards = step.batch, step.tensors["ids"][step.mask], step.tensors.get("rewards")
        columns = {
            "surprisal": -batch.old_logprobs,
            "advantages": batch.advantages,
            "ratio": (batch.logprobs - batch.old_logprobs).clamp(-20, 20).exp(),
            **({} if batch.entropies is None else {"entropies": batch.entropies}),
        }
        for row in range(min(batch.num_sequences, limit - len(samples))):
            where = (batch.sequence == row).nonzero().squeeze(-1)
            own, prompt = ids[where].tolist(), step.prompts[row].tolist()
            if not own:
                continue
            known = "" if not prompt else f"({len(prompt)} tokens)" if decode is None else decode(prompt)
            acting = {name: _places(of_method[place].actions, where) for name, of_method in effects.by_name.items()}
            samples.append(
                Sample(
                    rollout=step.number,
                    response=str(int(batch.sequence_ids[row])),
                    group=str(int(batch.group_ids[row])),
                    prompt=known,
                    reward=None if rewards is None else plain(float(rewards[row])),
                    tokens=[""] * len(own) if decode is None else token_texts(decode, own),
                    ids=own,
                    methods={name: Method(name, actions) for name, actions in acting.items() if actions},
                    **{name: plain(values[where].tolist()) for name, values in columns.items()},
                )
            )
    notes = [*dump.notes]
    if decode is None:
        notes.append("The dump has token ids and no text. Give the folder of its tokenizer with --tokenizer.")
    return Tokens(samples, notes)


def _places(actions: Mapping[str, Tensor], where: Tensor) -> Mapping[str, list[int]]:
    touched = {action: tokens[where].nonzero().squeeze(-1).tolist() for action, tokens in actions.items()}
    return {action: touched[action] for action in ACTIONS if touched.get(action)}
