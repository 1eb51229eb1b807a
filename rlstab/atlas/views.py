"""Which panels show a method: chosen by what it fills and reads, so that a new method has a picture without asking."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlstab.atlas.cloud import live
from rlstab.atlas.effect import Decided, cloud_of, penalties
from rlstab.atlas.panel import Panel, Picture
from rlstab.atlas.ratio_views import over_ratio, over_reference
from rlstab.atlas.step_views import controller, lengths, lr_scale, mismatches, reports
from rlstab.atlas.token_views import acts, plane, rows, varies_within_responses
from rlstab.core.batch import MARKS
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import settings_of
from rlstab.explain.card_sections import CardError

#: Settings of a picture, for methods that require some, or whose defaults do little or nothing on the cloud.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cispo": {"cap": 2.0},
    "clip_cov": {"share": 0.05},
    "constant_length": {"length": 48},
    "kl_cov": {"share": 0.05},
    "lp_reg": {"share": 0.1},
    "random_mask": {"share": 0.1},
    "wapo": {"length": 48},
}
#: Kinds of methods, in the order of the gallery, with what their small pictures show.
KINDS: Mapping[str, tuple[str, str]] = {
    "ratio": (
        "Ratio and trust region",
        "What stands before the gradient of a token's log-prob (-4 to 4), over the ratio r of live and old probability "
        "(¼ to 4, logarithmic). Blue is a rewarded token (A = 1), vermilion a punished one (A = -1), grey an untouched "
        "one, r A. Dashed and dotted lines are other cases.",
    ),
    "mismatch": (
        "Mismatch of sampler and trainer",
        "The same over the ratio of old and rollout probability; grey is A.",
    ),
    "tokens": (
        "Single tokens",
        "The tokens of one optimizer step: probability across (10⁻⁵ to 1), entropy upwards (10⁻⁴ to 3 nats), both "
        "logarithmic; rewarded tokens on the left, punished ones on the right. Grey is left alone, black dropped or "
        "without weight, orange and vermilion damped, blue boosted, green under a penalty.",
    ),
    "responses": (
        "Whole responses",
        "The responses of the same step, a row each, from left to right; rewarded ones on the left, punished ones on "
        "the right. Colours are those of single tokens.",
    ),
    "penalties": (
        "Penalties on every token",
        "Each on a scale of its own, for it grows with the coefficient. The page says what is across.",
    ),
    "divisor": (
        "Divisor",
        "The weight of a token (0 to 2.5, 1 is a token mean) over the length of its response, up to 64 tokens. Where "
        "tokens of one response differ, over the place in it, on a scale of its own, a line for each of three "
        "responses.",
    ),
    "step": (
        "Whole optimizer step",
        "A number of the step over the root mean square log-ratio of two policies, nats, on the scale of the number.",
    ),
}
#: Letters of settings that fit beside the name.
_MANY = 90
REGION = frozenset({"ratio", "bounds", "surrogate", "gates"})
_TOKENS = frozenset({"keep", "weight", "bonus", "unclipped", "penalties"})
_ON_THE_CLOUD = (
    "The tokens of one optimizer step, the same for all methods: 32 responses whose rare tokens are far more frequent "
    "than in practice."
)


def method_of(cls: type[TokenObjective]) -> TokenObjective:
    """The method as it is drawn.

    Raises:
        CardError: a setting has no default, and nobody says with what to draw it.
    """
    chosen = SETTINGS.get(cls.name, {})
    missing = [one.name for one in settings_of(cls) if one.default is dataclasses.MISSING and one.name not in chosen]
    if missing:
        raise CardError(
            f"{cls.__qualname__}: '{missing[0]}' has no default, so the method cannot be drawn. Give it a value in "
            f"rlstab.atlas.views.SETTINGS."
        )
    return cls(**chosen)


def picture(method: TokenObjective) -> Picture:
    """All that is shown of a method; some panel always is."""
    kind, caption, panels, small = _chosen(method)
    values = ", ".join(f"{one.name} = {getattr(method, one.name)!r}" for one in settings_of(type(method)))
    chosen = _settings(method)
    return Picture(
        name=method.name,
        kind=kind,
        settings=chosen,
        values=values if 0 < len(values) <= _MANY else chosen,
        caption=caption,
        panels=tuple(panels),
        small=small,
    )


def _chosen(method: TokenObjective) -> tuple[str, str, list[Panel], int]:
    writes = method.writes
    for kind, moved, could in (
        ("ratio", "live", bool(writes & REGION)),
        ("mismatch", "sampler", "rollout_logprobs" in method.needs and bool(writes & _TOKENS)),
    ):
        caption, panels = over_ratio(method, moved) if could else ("", [])
        if panels:
            return kind, caption + _statistics(method), panels, 1
    if "aggregate" in writes:
        return _divisor(method)
    if "ref_logprobs" in method.needs and "penalties" in writes:
        return "penalties", *over_reference(method), 1
    for told, label, could, value in (
        ("What multiplies the learning rate,", "factor on the learning rate", "lr_scale" in writes, lr_scale),
        ("What it reports and does not change,", "metric", not writes, reports),
    ):
        if could and (panels := mismatches(method, value, label)):
            caption = f"{told} while the log-ratios of one optimizer step go from none to three times their size."
            return "step", caption, panels, 1
    if method.live_needs & {"entropies"}:
        return _price(method)
    return _cloud(method)


def _statistics(method: TokenObjective) -> str:
    measures = type(method).measure is not TokenObjective.measure
    return " Statistics of the step are those of the step in the gallery's clouds." if measures else ""


def _divisor(method: TokenObjective) -> tuple[str, str, list[Panel], int]:
    caption = "The responses of one optimizer step, the same for all methods."
    return "divisor", caption, [lengths(Decided.on(method, cloud_of(method)))], 1


def _price(method: TokenObjective) -> tuple[str, str, list[Panel], int]:
    """A payment for entropy: the same for every token, so what is shown is the price."""
    if panels := controller(method):
        caption = "What is paid for a nat of entropy of the live policy, while entropy is low and then high."
        return "penalties", caption, panels, 1
    decided = Decided.on(method, cloud_of(method))
    found = penalties(decided.part(decided.batch), live(decided.batch))["entropies"]
    low, high = float(found.min()), float(found.max())
    told = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    caption = f"{_ON_THE_CLOUD} The penalty puts {told} before the gradient of the entropy at each token in green."
    return "penalties", caption, plane(decided), 2


def _cloud(method: TokenObjective) -> tuple[str, str, list[Panel], int]:
    batch = cloud_of(method)
    decided = Decided.on(method, batch)
    later = ""
    if decided.state and not acts(decided, batch):
        decided, later = Decided.on(method, batch, 100), " It is the 100th of optimizer steps that are all alike."
    by_response = method.needs & set(MARKS) or not varies_within_responses(decided, batch)
    if by_response:
        return "responses", _ON_THE_CLOUD + later, rows(decided), 2
    return "tokens", _ON_THE_CLOUD + later, plane(decided), 2


def _settings(method: TokenObjective) -> str:
    """Those that were chosen for the picture; the others are the defaults."""
    own = SETTINGS.get(method.name, {})
    told = ", ".join(f"{name} = {value!r}" for name, value in own.items())
    others = len(settings_of(type(method))) - len(own)
    return f"{told}{', else defaults' if others else ''}" if own else "defaults" if others else "no settings"
