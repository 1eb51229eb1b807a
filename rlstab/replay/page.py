"""The page of a replay: the verdict on the loss, what each method would have done, and which of them overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from markupsafe import Markup
from torch import Tensor

from rlstab.replay.dumps import Dump
from rlstab.replay.effects import METRICS, Effects
from rlstab.report.formatting import MINUS, NOTHING, counted, decimals, ranges
from rlstab.report.output import digest, resource
from rlstab.report.template import rendered
from rlstab.report.token_traces import Method, Sample, Tokens
from rlstab.safe_read import plain
from rlstab.trace.effects import ACTIONS
from rlstab.trace.token_texts import token_texts

#: What a page of ours has in its head.
MARK = b'<meta name="rlstab-replay"'
#: Objectives in the table of overlaps: those that touch most, but not every token.
MOST_OVERLAPS = 12
#: Width and height of a curve over steps, pixels.
CURVE = (150, 26)


def page(results: Mapping[str, Any], overlap: Mapping[tuple[str, str], float], *, source: str, tokens: str) -> str:
    """The HTML. It asks for nothing, and nothing that a file says is read as HTML or script.

    Args:
        results: see :func:`rlstab.replay.replay.results_of`.
        overlap: see :class:`rlstab.replay.effects.Effects`.
        source: names the dump.
        tokens: address of the page of tokens.
    """
    rows, folder = results["methods"], resources.files("rlstab.replay")
    template, script = ((folder / f"replay.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    single = [row for row in rows if not row["name"].startswith("preset:")]
    groups = {"Methods": single, "Presets": [row for row in rows if row not in single]}
    functions = {"counted": counted, "ranges": ranges, "decimals": decimals, "percent": _percent, "figure": _figure}
    context = {
        "policy": Markup(digest(script)),
        "script": Markup(script),
        "style": Markup(resource("page.css")),
        "source": source,
        "results": results,
        "groups": {title: of_kind for title, of_kind in groups.items() if of_kind},
        "curves": _curves(rows) if len(results["steps"]) > 1 else {},
        "size": CURVE,
        "actions": actions_in(rows),
        "overlap": overlap,
        "acting": [row["name"] for row in single or rows if 0 < row["touched"] < 1][:MOST_OVERLAPS],
        "tokens": tokens,
    }
    return rendered(template, functions, context)


def actions_in(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What any of the objectives did."""
    return [action for action in ACTIONS if any(row[action] for row in rows)]


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
            acting = {
                name: _places(steps[place], where)
                for name, steps in effects.actions.items()
                if name not in effects.left_out
            }
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
