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
from rlstab.report.formatting import axis, in_order, listed, round_step, setting, significant
from rlstab.signs import SIGNS
from rlstab.signs.metric import Metric, running_means
from rlstab.visible import visible

if TYPE_CHECKING:  # what only a dump has imports torch
    from rlstab.look.alternatives import Alternative, Alternatives
    from rlstab.look.gradient import Gradient
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
    curves, data = _curves(run)
    response = cache(partial(_response, run.steps, run.decode))
    gradient = None if run.gradient is None else _gradient(run.gradient, response)
    methods, tokens = (None, {}) if run.methods is None else _methods(run.methods, run.steps, response)
    speaks = _speaks(run)
    parts = [run.title, run.steps[0].header.host if run.steps else run.log.writer]
    parts.append(counted(run.log.rollouts, run.log.unit))
    if run.steps:
        count = sum(len(step.batch) for step in run.steps)
        parts.append(f"{counted(len(run.steps), 'optimizer step')} recorded, {count:,} tokens")
    context = {
        **{"counted": counted, "percent": _percent, "ceiling": _ceiling, "decades": _decades},
        "running": partial(running_means, width=RUN),
        **{"median": median, "signs": SIGNS, "listed": listed, "did": _did, "turn": _turn, "length": _length},
        "speaks": speaks,
        "what": " · ".join(parts),
        "run": run,
        "curves": curves,
        "gradient": gradient,
        "methods": methods,
        "around": AROUND,
        "numbers": {"data": Markup(safe_json(data | tokens))},
    }
    return rendered("look/look.html", context)


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
    if run.diagnosis.fired:
        facts += [(f"Absent: {SIGNS[sign.name].title}", sign.text) for sign in run.diagnosis.looked_at]
    return facts[:4]


# -- curves ------------------------------------------------------------------------------------------------------------


def _curves(run: Look) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The metrics of the log as strips over one axis, and their numbers; None without any."""
    log, signs = run.log, run.diagnosis.fired
    metrics = {name: Metric(name, *curve) for name, curve in log.metrics.items() if len(curve[0]) > 1}
    if not metrics:
        return None, {}
    first = min(int(metric.steps[0]) for metric in metrics.values())
    last = max(int(metric.steps[-1]) for metric in metrics.values())
    shows = [next((name for name in SIGNS[sign.name].reads if name in log.metrics), "") for sign in signs]
    drawn, flat = list[Metric](), list[str]()
    for name in dict.fromkeys([*shows, *in_order({*metrics})]):
        if (metric := metrics.get(name)) is not None:
            low, high = metric.values.min(), metric.values.max()
            if name in shows or not high - low <= FLAT * max(abs(high), abs(low)):
                drawn.append(metric)
            else:
                flat.append(f"{axis(name).title} {setting(float(metric.values[-1]))}")

    def left(step: float) -> float:
        return round(100 * (step - first) / max(last - first, 1), 2)

    flags: list[tuple[float, list[int]]] = []
    for step, number in sorted((sign.step or 0, number) for number, sign in enumerate(signs, 1)):
        if not flags or left(step) - flags[-1][0] > NEAR:
            flags.append((left(step), []))
        flags[-1][1].append(number)
    strips = []
    for metric in drawn[:STRIPS]:
        lowest, highest = float(metric.values.min()), float(metric.values.max())
        low = min(0.0, lowest) if axis(metric.name).zero else lowest
        high = highest if highest > low else low + 1
        path = partial(_path, metric.steps, left=left, low=low, high=high)
        strips.append(
            {
                "metric": metric,
                "title": axis(metric.name).title,
                "name": log.names.get(metric.name, metric.name),
                "signs": [number for number, name in enumerate(shows, 1) if name == metric.name],
                "raw": path(metric.values),
                "mean": path(running_means(metric.values, RUN)) if len(metric.steps) > 2 * RUN else "",
                **{"low": low, "high": high, "lowest": lowest, "highest": highest, "end": metric.end},
            }
        )
    numbers = {
        metric.name: dict(zip(metric.steps.tolist(), metric.values.tolist(), strict=True)) for metric in drawn[:STRIPS]
    }
    stride = int(round_step(max((last - first) / 5, 1)))
    marks = [step for step in range(stride, last, stride) if first + stride / 2 < step < last - stride / 2]
    return {
        "strips": strips,
        "flags": flags,
        "ticks": [(left(step), step) for step in (first, *marks, last)],
        "flat": "; ".join(flat),
    }, {"first": first, "last": last, "unit": log.unit, "curves": _short(numbers)}


def _path(steps: Any, values: Any, *, left: Any, low: float, high: float) -> str:
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
        "largest": [(token, response(token.step, token.response)) for token in gradient.largest],
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
    return {
        "step": step.number,
        "id": str(int(step.batch.sequence_ids[response])),
        "reward": None if rewards is None else float(rewards[response]),
        "prompt": visible(prompt_text[-PROMPT:], spaces=False),
        "tokens": list(map(visible, tokens)),
        "p": step.tensors["logprobs"][where].exp().tolist(),
        "q": None if sampled is None else sampled[where].exp().tolist(),
        "advantage": step.tensors["advantages"][where].tolist(),
    }


def _did(row: Alternative) -> str:
    verbs = {"dropped": "drops", "clipped": "clips", "regularised": "penalises", "unclipped": "frees"}
    acted = [
        f"{verbs.get(action, action.removesuffix('ed') + 's')} {_percent(share)}"
        for action, share in row.actions.items()
        if share >= 0.0005
    ]
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
    context = {
        **vars(methods),
        "said": f"{methods.told} {sentence}".strip(),
        "groups": [(title, shown) for title, shown in groups if shown],
        "idle": [row for row in methods.rows if not row.acts],
        "index": {row.name: index for index, row in enumerate(acting, 1)},
        "least": f"{TURN:g}° and change its length by less than {100 * LENGTH:g} %",
        "left_out": sorted(methods.left_out.items(), key=lambda pair: (pair[1], pair[0])),
        "responses": f"{sum(len(step.tensors['lengths']) for step in steps):,}",
        "choices": list(enumerate(["This run's objective", *(f"{row.name}, {row.joins}" for row in acting)])),
    }
    tops, responses = list[list[dict[str, Any]]](), {}
    for row in (methods.own, *acting):
        tops.append([])
        for top in row.top:
            key = f"{top.step}-{top.response}"
            responses[key] = response(top.step, top.response)
            weight = top.weight if any(value not in (1.0, None) for value in top.weight) else None
            by_token = {"shares": top.tokens, "did": top.did, "ratio": top.ratio, "weight": weight}
            tops[-1].append({"response": key, "share": top.share, **by_token})
    return context, _short({"objectives": tops, "responses": responses})


def _short(data: Any) -> Any:
    """Numbers with :data:`DIGITS`, and of what a response has by token the first :data:`MOST_TOKENS`."""
    if isinstance(data, Mapping):
        return {name: _short(value) for name, value in data.items()}
    if isinstance(data, list):
        return list(map(_short, data[:MOST_TOKENS]))
    return significant([data], DIGITS)[0] if isinstance(data, float) else data
