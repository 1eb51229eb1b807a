"""The page of a look: all findings in one HTML file that loads nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from markupsafe import Markup

from rlstab.console import counted
from rlstab.look.finding import Look
from rlstab.page.render import rendered, safe_json
from rlstab.report.formatting import MINUS, axis, in_order, listed, round_step, setting, significant
from rlstab.signs import SIGNS
from rlstab.signs.metric import Metric, running_means
from rlstab.visible import visible

if TYPE_CHECKING:  # what only a dump has imports torch
    from rlstab.look.alternatives import Alternative, Alternatives, Top
    from rlstab.look.gradient import Gradient, Token
    from rlstab.record import Step
    from rlstab.record.token_texts import Decode

    Responses: TypeAlias = Callable[[int, int], Mapping[str, Any]]

#: Marker in the head of a page that rlstab wrote.
MARK = b'<meta name="rlstab-look"'
#: Curves on a page; those of metrics by which a sign was found come first.
STRIPS = 8
#: Number of tokens of a response that are shown around a token, and in all.
AROUND, MOST_TOKENS = 8, 600
#: Markers of signs that are nearer than this share of the width, in %, share one.
NEAR = 4.0
#: A curve that moves by less than this share of its size is not drawn.
FLAT = 0.02
#: Significant digits of a number that a reader asks for.
DIGITS = 4
#: Values of a curve of which the thick line is the mean.
RUN = 10
#: Before the length of a step.
TIMES = "\u00d7"
#: Characters of a prompt, its last ones.
PROMPT = 120


def page(run: Look) -> str:
    """The HTML. Nothing that a file says is read as HTML or script."""
    curves = _curves(run)
    response = cache(partial(_response, run.steps, run.decode))
    gradient = None if run.gradient is None else _gradient(run.gradient, response)
    methods, data = (None, {}) if run.methods is None else _methods(run.methods, run.steps, response)
    sections = {
        "curves": ("Curves", curves),
        "loss": ("Loss", run.loss if run.steps else None),
        "sampler": ("Sampler", run.sampler),
        "gradient": ("Gradient", gradient),
        "methods": ("Methods", methods),
        "tokens": ("Tokens", methods),
    }
    context = {
        "speaks": _speaks(run),
        "what": _what(run),
        "contents": [(id_, name) for id_, (name, section) in sections.items() if section],
        "run": run,
        "curves": curves,
        "gradient": gradient,
        "methods": methods,
        "numbers": {"data": Markup(safe_json({**(curves["data"] if curves else {}), **data}))},
    }
    functions = {
        **{"counted": counted, "percent": _percent, "ceiling": _ceiling, "decades": _decades},
        "running": partial(running_means, width=RUN),
        **{"median": median, "signs": SIGNS, "listed": listed, "did": _did, "turn": _turn, "length": _length},
    }
    return rendered("look/look.html", functions | context)


def _what(run: Look) -> str:
    log, parts = run.log, [run.title]
    if run.steps:
        parts.append(run.steps[0].header.host)
    elif log is not None:
        parts.append(log.writer)
    if log is not None:
        parts.append(counted(log.rollouts, log.unit))
    if run.steps:
        tokens = sum(len(step.batch) for step in run.steps)
        parts.append(f"{counted(len(run.steps), 'optimizer step')} recorded, {tokens:,} tokens")
    return " · ".join(parts)


def _speaks(run: Look) -> list[tuple[str, str]]:
    """What is known apart from the signs: each in a few words, with its figures."""
    facts = []
    if run.loss is not None:
        agrees = {True: "what it said", False: "not what it said", None: "not known"}[run.loss.agrees]
        facts.append((f"The loss is {agrees}", run.loss.compared))
    if run.sampler is not None:
        facts.append(("Sampler and trainer", run.sampler.sentence))
    if run.gradient is not None:
        share = run.gradient.half_tokens / run.gradient.tokens
        facts.append(("Half of the gradient", f"comes from {_percent(share)} of the tokens"))
    if run.diagnosis is not None and run.diagnosis.fired:
        facts += [(f"Absent: {SIGNS[sign.name].title}", sign.text) for sign in run.diagnosis.looked_at]
    return facts[:4]


# -- curves ------------------------------------------------------------------------------------------------------------


def _curves(run: Look) -> dict[str, Any] | None:
    """The metrics of the log as strips over one axis; None without any."""
    log = run.log
    metrics = {} if log is None else {name: curve for name, curve in log.metrics.items() if len(curve[0]) > 1}
    if log is None or not metrics:
        return None
    first = min(int(steps[0]) for steps, _ in metrics.values())
    last = max(int(steps[-1]) for steps, _ in metrics.values())
    signs = run.diagnosis.fired if run.diagnosis else ()
    shows = [next((name for name in SIGNS[sign.name].reads if name in log.metrics), "") for sign in signs]
    telling = [name for name in shows if name in metrics]
    ordered = dict.fromkeys([*telling, *in_order(set(metrics))])
    ends = {name: (values.min(), values.max()) for name, (_, values) in metrics.items()}
    moves = {name for name, (lowest, high) in ends.items() if not high - lowest <= FLAT * max(abs(high), abs(lowest))}
    moving = [name for name in ordered if name in telling or name in moves]
    flat = [f"{axis(name).title} {setting(float(metrics[name][1][-1]))}" for name in ordered if name not in moving]

    def left(step: float) -> float:
        return round(100 * (step - first) / max(last - first, 1), 2)

    flags: list[tuple[float, list[int]]] = []
    for step, number in sorted((sign.step or 0, number) for number, sign in enumerate(signs, 1)):
        if not flags or left(step) - flags[-1][0] > NEAR:
            flags.append((left(step), []))
        flags[-1][1].append(number)
    strips, data = [], {}
    for name in moving[:STRIPS]:
        (steps, values), (lowest, highest) = metrics[name], map(float, ends[name])
        low = min(0.0, lowest) if axis(name).zero else lowest
        high = highest if highest > low else low + 1
        strips.append(
            {
                "metric": name,
                "title": axis(name).title,
                "name": log.names.get(name, name),
                "signs": [number for number, metric in enumerate(shows, 1) if metric == name],
                "raw": _path(steps, values, left, low, high),
                "mean": _path(steps, running_means(values, RUN), left, low, high) if len(steps) > 2 * RUN else "",
                **{"low": low, "high": high, "lowest": lowest, "highest": highest},
                **{"start": float(values[0]), "end": Metric(name, steps, values).end},
            }
        )
        data[name] = dict(zip(steps.tolist(), significant(values, DIGITS), strict=True))
    stride = int(round_step(max((last - first) / 5, 1)))
    marks = [step for step in range(stride, last, stride) if first + stride / 2 < step < last - stride / 2]
    return {
        "strips": strips,
        "flags": flags,
        "ticks": [(left(step), step) for step in (first, *marks, last)],
        "flat": "; ".join(flat),
        "data": {"first": first, "last": last, "unit": log.unit, "curves": data},
    }


def _path(steps: Any, values: Any, left: Any, low: float, high: float) -> str:
    points = [
        f"{10 * left(step):.0f} {58 - 56 * (value - low) / (high - low):.1f}"
        for step, value in zip(steps.tolist(), values.tolist(), strict=True)
        if math.isfinite(value)
    ]
    return f"M{'L'.join(points)}" if points else ""


# -- charts, which the template draws ----------------------------------------------------------------------------------


def _percent(share: float) -> str:
    if share < 0.1:
        return "0" if not share else "< 0.1 %" if share < 0.001 else f"{100 * share:.1f} %"
    return f"{100 * share:.0f} %"


def _ceiling(values: Sequence[float]) -> float:
    """A number of one digit that is as large as all finite ones of them."""
    largest = max(filter(math.isfinite, values), default=0.0)
    size = 10.0 ** math.floor(math.log10(max(largest, 1e-12)))
    return max(math.ceil(largest / size - 1e-9), 1) * size


def _decades(error: float) -> float:
    """The position of an error on an axis from 1e-8 to 1."""
    return 1 + math.log10(max(1e-12, error)) / 8


def _gradient(gradient: Gradient, response: Responses) -> dict[str, Any]:
    pairs = (gradient.quadrants[side, "rare"] for side in ("rewarded", "punished"))
    rare, rare_tokens = map(sum, zip(*pairs, strict=True))
    sentence = (
        f"{_percent(rare)} of it goes into rare tokens, which are {_percent(rare_tokens)} of all. Half comes from "
        f"{gradient.half_tokens:,} of {gradient.tokens:,} tokens and from {gradient.half_groups:,} of "
        f"{gradient.groups:,} groups."
    )
    if gradient.turns:
        turns = (f"{_percent(share)} ({_percent(of_tokens)})" for share, of_tokens in gradient.turns)
        sentence += f" By turn, and of the tokens: {', '.join(turns)}."
    return {
        **vars(gradient),
        "said": sentence,
        "positions": [pair for pair in gradient.positions if any(pair)] or [(0.0, 0.0)],
        "largest": [_token(token, response(token.step, token.response)) for token in gradient.largest],
    }


def _token(token: Token, response: Mapping[str, Any]) -> dict[str, Any]:
    tokens, position = response["tokens"], token.position
    before = "".join(tokens[max(0, position - AROUND) : position])
    return {
        "prompt": response["prompt"][-40:],
        "before": f"{'…' if position > AROUND else ''}{before}",
        "text": tokens[position],
        "after": "".join(tokens[position + 1 : position + 1 + AROUND])
        + ("…" if position + 1 + AROUND < len(tokens) else ""),
        "step": response["step"],
        "advantage": f"{response['advantage'][position]:+.2f}".replace("-", MINUS),
        "p": f"{response['p'][position]:.3g}",
        "share": f"{100 * token.share:.2f}".replace("-", MINUS),
    }


# -- methods and tokens ------------------------------------------------------------------------------------------------


def _response(steps: Sequence[Step], decode: Decode | None, step_index: int, response: int) -> dict[str, Any]:
    """A response of a dump as the page shows it."""
    from rlstab.record.token_texts import token_texts

    step = steps[step_index]
    where = step.row == response
    ids, prompt = step.tensors["ids"][where].tolist(), step.prompts[response].tolist()
    tokens = [f" {token_id}" for token_id in ids] if decode is None else token_texts(decode, ids)
    prompt_text = "" if not prompt else f"({len(prompt)} tokens)" if decode is None else decode(prompt)
    sampled, rewards = step.tensors.get("rollout_logprobs"), step.tensors.get("rewards")
    reward = None if rewards is None else float(rewards[response])
    return {
        "step": step.number,
        "id": str(int(step.batch.sequence_ids[response])),
        "reward": reward if reward is not None and math.isfinite(reward) else None,
        "prompt": visible(prompt_text[-PROMPT:], spaces=False),
        "tokens": list(map(visible, tokens)),
        "p": significant(step.tensors["logprobs"][where].exp().tolist(), DIGITS),
        "q": None if sampled is None else significant(sampled[where].exp().tolist(), DIGITS),
        "advantage": significant(step.tensors["advantages"][where].tolist(), DIGITS),
    }


def _did(row: Alternative) -> str:
    from rlstab.record import ACTIONS

    verbs = {"dropped": "drops", "clipped": "clips", "regularised": "penalises", "unclipped": "frees"}
    named = {action: verbs.get(action, f"{action.removesuffix('ed')}s") for action in ACTIONS}
    acted = [f"{named[action]} {_percent(share)}" for action, share in row.actions.items() if share >= 0.0005]
    defaults = {"region": "changes the ratio", "mean": "changes the weights of responses"}
    return ", ".join(acted) or defaults.get(row.acts_on, "")


def _turn(row: Alternative) -> str:
    return f"{row.turn:.0f}°" if row.turn >= 10 else f"{row.turn:.1f}°"


def _length(row: Alternative) -> str:
    return f"{TIMES} {row.length:.2g}"


def _methods(
    methods: Alternatives, steps: Sequence[Step], response: Responses
) -> tuple[dict[str, Any], dict[str, Any]]:
    from rlstab.look.alternatives import ACTS_ON, LENGTH, TURN

    acting = [row for row in methods.rows if row.acts]
    groups = [(title, [row for row in acting if row.acts_on == group]) for group, title in ACTS_ON.items()]
    sentence = "None would have changed the gradient of these steps visibly."
    if acting:
        furthest = max(acting, key=lambda row: row.turn)
        sentence = (
            f"{furthest.name} would turn its gradient most, by {_turn(furthest)}, with a step {_length(furthest)}."
        )
    objectives = [methods.own, *acting]
    context = {
        "said": f"{methods.told} {sentence}".strip(),
        "steps": f"{counted(len(methods.numbers), 'optimizer step')} of the dump",
        "groups": [(title, shown) for title, shown in groups if shown],
        "idle": [row for row in methods.rows if not row.acts],
        "index": {row.name: index for index, row in enumerate(acting, 1)},
        "least": f"{TURN:g}° and change its length by less than {100 * LENGTH:g} %",
        "left_out": sorted(methods.left_out.items(), key=lambda pair: (pair[1], pair[0])),
        "presets": methods.presets,
        "responses": f"{sum(len(step.tensors['lengths']) for step in steps):,}",
        "choices": list(enumerate(["This run's objective", *(f"{row.name}, {row.joins}" for row in acting)])),
    }
    data = {
        "objectives": [[_top(top) for top in row.top] for row in objectives],
        "responses": {
            f"{top.step}-{top.response}": _cut(response(top.step, top.response))
            for row in objectives
            for top in row.top
        },
    }
    return context, data


def _top(top: Top) -> dict[str, Any]:
    is_weighed = any(value not in (1.0, None) for value in top.weight)
    return _cut(
        {
            "response": f"{top.step}-{top.response}",
            "share": significant([top.share], DIGITS)[0],
            "shares": significant(top.tokens, DIGITS),
            "did": top.did,
            "ratio": significant(top.ratio, DIGITS),
            "weight": significant(top.weight, DIGITS) if is_weighed else None,
        }
    )


def _cut(record: Mapping[str, Any]) -> dict[str, Any]:
    """With the first :data:`MOST_TOKENS` tokens of what it has by token."""
    return {name: value[:MOST_TOKENS] if isinstance(value, list) else value for name, value in record.items()}
