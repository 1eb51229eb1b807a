"""The picture of each method, chosen by what it fills and reads, so that a new method has one without asking.

A picture is a large drawing for the page of the method and a small one for the gallery, both SVG by matplotlib.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from torch import Tensor

from docs.hooks.measure import (
    BASE,
    LATER,
    LENGTH,
    LIMIT,
    MATTERS,
    RATIOS,
    Decided,
    cloud,
    differ,
    divisors,
    factors,
    live,
    over_ratios,
    penalties,
    untouched,
    what_matters,
)
from rlstab.core.batch import MARKS, TokenBatch
from rlstab.core.loss import Part
from rlstab.core.method_settings import settings_of
from rlstab.core.objective import TokenObjective
from rlstab.hosts import measures

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
#: Kinds of pictures in the order of the gallery, with what the small ones show.
KINDS: Mapping[str, tuple[str, str]] = {
    "ratio": (
        "Ratio and trust region",
        "What stands before the gradient of a token's log-prob (-4 to 4), over the ratio of live and old probability "
        "(¼ to 4, logarithmic). Blue is a rewarded token (A = 1), orange a punished one (A = -1), grey an untouched "
        "one. Dashed and dotted lines are other cases.",
    ),
    "mismatch": ("Mismatch of sampler and trainer", "The same over the ratio of old and rollout probability."),
    "tokens": (
        "Single tokens",
        "The tokens of one optimizer step: probability across (10⁻⁵ to 1), entropy upwards (10⁻⁴ to 3 nats), both "
        "logarithmic; rewarded tokens on the left, punished ones on the right. Grey is unchanged, black dropped or "
        "without weight, orange to red damped, blue boosted, green under a penalty.",
    ),
    "responses": (
        "Whole responses",
        "The responses of the same step, a row each, from left to right; rewarded ones on the left, punished ones on "
        "the right. Colours are those of single tokens.",
    ),
    "penalties": ("Penalties on every token", "Each on a scale that fits it. The page says what is across."),
    "divisor": (
        "Divisor",
        "The weight of a token (1 is a token mean) over the length of its response, or over its place in a response "
        "where tokens of one response differ.",
    ),
    "step": ("Whole optimizer step", "A number of the step over the distance of two policies."),
}
_ON_THE_CLOUD = (
    "The tokens of one optimizer step, the same for all methods: 32 responses whose rare tokens are far more frequent "
    "than in practice."
)
REGION = frozenset({"support", "ratio", "bounds", "surrogate", "gates"})
_TOKENS = frozenset({"keep", "weight", "bonus", "unclipped", "penalties"})

#: Of Okabe and Ito, whom the colour-blind can tell apart.
BLUE, SKY, ORANGE, VERMILION, GREEN, PURPLE = "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#a0447f"
GREY, PALE = "#8a8a8a", "#b4b4b4"
COLOURS, DASHES = (BLUE, VERMILION, GREEN, SKY, PURPLE, ORANGE), ("-", "--", ":")
#: Of factors, with the range that they cover.
SHADES = {
    "damped": (LinearSegmentedColormap.from_list("damped", [VERMILION, ORANGE, "#f2cb6b"]), LogNorm(0.3, 1)),
    "boosted": (LinearSegmentedColormap.from_list("boosted", ["#a9d6f0", SKY, BLUE]), LogNorm(1, 3)),
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rlstab",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.edgecolor": "#9a9a9a",
    "axes.grid": True,
    "grid.color": "#9a9a9a",
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}

Panel = Callable[[Axes], None]


@dataclass(frozen=True)
class Picture:
    """All that is shown of a method.

    Attributes:
        method: as it was measured.
        kind: heads its group in the gallery.
        caption: what is seen, and on what it was measured.
        panels: from left to right.
        small: how many of the first of them make the small picture.
    """

    method: TokenObjective
    kind: str
    caption: str
    panels: tuple[Panel, ...]
    small: int = 1

    def large_svg(self) -> str:
        """The panels side by side, each with its legend below."""
        figure = Figure(figsize=(4.2 * max(len(self.panels), 1.3), 4.3), layout="constrained")
        for ax, panel in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels, strict=True):
            panel(ax)
            if ax.get_legend_handles_labels()[1]:
                ax.legend(loc="upper left", bbox_to_anchor=(0, -0.15), borderaxespad=0, markerscale=1.5)
        return _svg(figure)

    def small_svg(self) -> str:
        """The first panels without words: their axes are those of the group."""
        figure = Figure(figsize=(2.7, 1.7), layout="constrained")
        axes = figure.subplots(1, self.small, squeeze=False)[0]
        for place, (ax, panel) in enumerate(zip(axes, self.panels[: self.small], strict=True)):
            panel(ax)
            ax.set(title="", xlabel="", ylabel="")
            ax.tick_params(labelsize=7, labelleft=place == 0)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def drawn(picture: Picture) -> dict[str, str]:
    """Both drawings, by the name of the file."""
    with mpl.rc_context(STYLE):
        name = picture.method.name
        return {f"{name}.svg": picture.large_svg(), f"{name}-small.svg": picture.small_svg()}


def method_of(cls: type[TokenObjective]) -> TokenObjective:
    """The method as it is drawn."""
    return cls(**SETTINGS.get(cls.name, {}))


def picture(method: TokenObjective) -> Picture:
    """What is shown of a method; some panel always is."""
    writes, needs = method.writes, method.needs
    for kind, moved, possible in (
        ("ratio", "live", bool(writes & REGION)),
        ("mismatch", "sampler", "rollout_logprobs" in needs and bool(writes & _TOKENS)),
        ("penalties", "reference", "ref_logprobs" in needs and "penalties" in writes),
    ):
        if possible and (panels := _over_ratios(method, moved)):
            return Picture(method, kind, _told_of_ratios(method, moved, len(panels) > 1), panels)
    if "aggregate" in writes:
        caption = "The responses of one optimizer step, the same for all methods."
        return Picture(method, "divisor", caption, (_lengths(Decided.on_cloud(method).part()),))
    if ("lr_scale" in writes or not writes) and (panels := _over_distances(method)):
        caption = "What the log-ratios of one optimizer step make of it, from none to three times their size."
        return Picture(method, "step", caption, panels)
    if "entropies" in method.live_needs and (price := _price(method)):
        caption = "What is paid for a nat of entropy of the live policy, while entropy is low and then high."
        return Picture(method, "penalties", caption, (price,))
    return _on_tokens(method)


# -- coefficients over a ratio -----------------------------------------------------------------------------------------

_ACROSS = {
    "live": "ratio: live / old probability",
    "sampler": "mismatch: old / rollout probability",
    "reference": "live / reference probability",
}


def _over_ratios(method: TokenObjective, moved: str) -> tuple[Panel, ...]:
    """A panel for each thing that matters besides the ratio; none where it is the coefficient of untouched tokens."""
    curves = over_ratios(method, moved)
    plain = torch.zeros_like(curves[BASE]) if moved == "reference" else untouched(moved)
    if moved != "reference" and not any(differ(values, plain) for values in curves.values()):
        return ()
    sides = {"any token": (0, GREEN)} if moved == "reference" else {"rewarded": (0, BLUE), "punished": (1, VERMILION)}

    def panel(ax: Axes, key: str) -> None:
        cases = {label: curves[case] for label, case in MATTERS.get(key, {"": BASE}).items()}
        ax.plot(RATIOS, plain[0], color=GREY, lw=1, label="no penalty" if moved == "reference" else "untouched")
        ax.plot(RATIOS, plain[1], color=GREY, lw=1)
        for side, (row, colour) in sides.items():
            alike: list[tuple[Tensor, list[str]]] = []  # cases that are one line share it
            for label, values in cases.items():
                same = next((labels for other, labels in alike if not differ(values[row:][:1], other)), None)
                if same is None:
                    alike.append((values[row:][:1], [label]))
                else:
                    same.append(label)
            for (values, labels), dash in zip(alike, DASHES, strict=False):
                told = f"{side}: {', '.join(labels)}" if len(alike) > 1 else side
                ax.plot(RATIOS, values[0], dash, color=colour, lw=2, label=told)
        ax.set_xscale("log", base=2)
        ax.set(title=key, xlabel=_ACROSS[moved], ylabel="coefficient of ∇ log p", xlim=(0.25, 4))
        _ticks(ax, "x", {0.25: "¼", 0.5: "½", 1: "1", 2: "2", 4: "4"})
        if moved != "reference":
            ax.set_ylim(-4, 4)

    return tuple((lambda ax, key=key: panel(ax, key)) for key in what_matters(curves) or [""])


def _told_of_ratios(method: TokenObjective, moved: str, several: bool) -> str:
    told = [
        "What stands before the gradient of a token's log-prob, by differentiating the loss. The token is in the "
        f"middle of a response of {LENGTH} tokens, which do not move unless it is said; its old probability is 0.1 "
        "unless it is said; A is 1 or -1."
    ]
    if moved == "live" and "anchor" in {setting.name for setting in settings_of(type(method))}:
        told.append("Sampler and trainer agree: `rollout_logprobs` is `old_logprobs`.")
    if moved != "live":
        told.append("The live policy is still the old one.")
    if several:
        told.append("A line ends where a probability would be above 1.")
    if moved == "reference":
        told = ["What only the penalty puts before the gradient of a token's log-prob; its advantage is 0."]
    if measures(method):
        told.append("Statistics of the step are those of the step in the gallery's clouds.")
    if method.init_state():
        told.append(f"Step {LATER}, where it is shown, follows {LATER - 1} like it.")
    return " ".join(told)


def _ticks(ax: Axes, side: str, labels: Mapping[float, str]) -> None:
    axis = ax.xaxis if side == "x" else ax.yaxis
    axis.set_major_locator(FixedLocator(list(labels)))
    axis.set_major_formatter(FixedFormatter(list(labels.values())))
    axis.set_minor_locator(NullLocator())


# -- the tokens of the cloud, by what is done to them ------------------------------------------------------------------

_POWERS = {1e-4: "10⁻⁴", 1e-2: "0.01", 1: "1"}


def _on_tokens(method: TokenObjective) -> Picture:
    decided, later, kind = Decided.on_cloud(method), "", "penalties"
    if decided.state and not any(name != "left alone" for name, *_ in _done_to(decided.part())):
        decided, later = Decided.on_cloud(method, 100), " It is the 100th of optimizer steps that are all alike."
    part = decided.part()
    batch = part.batch
    if "entropies" in method.live_needs:
        slopes = penalties(part, live(batch))["entropies"]
        later = f" The penalty puts {slopes.min():.3g} before the gradient of the entropy at each token in green."
    else:
        code = torch.zeros(len(batch))
        for number, (_, where, _, _) in enumerate(_done_to(part)):
            code[where] = number
        first = torch.stack([code[batch.sequence == row][0] for row in range(batch.num_sequences)])
        whole = bool(method.needs & set(MARKS)) or torch.equal(code, first[batch.sequence])
        kind = "responses" if whole else "tokens"
    panels = tuple(
        _cloud_panel(part, side, title, kind == "responses")
        for title, side in (("Rewarded", batch.advantages > 0), ("Punished", batch.advantages < 0))
    )
    return Picture(method, kind, _ON_THE_CLOUD + later, panels, small=2)


def _cloud_panel(part: Part, side: Tensor, title: str, by_response: bool) -> Panel:
    """Probability against entropy; or a row for each response, the longest above."""
    batch = part.batch
    lengths = batch.sequence.bincount()
    rows = sorted(set(batch.sequence[side].tolist()), key=lambda row: int(lengths[row]))
    place = torch.zeros(len(lengths)).scatter_(0, torch.tensor(rows), torch.arange(1.0, len(rows) + 1))
    x, y = (
        (batch.position + 1, place[batch.sequence])
        if by_response
        else (batch.logprobs.exp(), batch.signal("entropies"))
    )

    def panel(ax: Axes) -> None:
        for label, where, colour, shades in _done_to(part):
            if bool((here := where & side).any()):
                label = f"{label}: {int(here.sum())}"
                if shades is None:
                    size = 3 if colour == PALE else 4
                    ax.plot(x[here], y[here], "o", color=colour, ms=size, mew=0, label=label)
                else:
                    cmap, norm = SHADES[label.partition(",")[0]]
                    ax.scatter(x[here], y[here], 16, shades[here], lw=0, label=label, cmap=cmap, norm=norm)
        if by_response:
            ax.set(title=f"{title} responses", xlabel="place of the token in its response", xlim=(0, LIMIT + 1))
            ax.set(ylabel="responses, the longest above", yticks=[])
        else:
            ax.set(xscale="log", yscale="log", xlim=(7e-6, 1.6), ylim=(7e-5, 5), title=f"{title} tokens")
            ax.set(xlabel="probability of the token", ylabel="entropy, nats")
            _ticks(ax, "x", {1e-5: "10⁻⁵", 1e-3: "0.001", 1e-1: "0.1"})
            _ticks(ax, "y", _POWERS)

    return panel


def _done_to(part: Part) -> Iterator[tuple[str, Tensor, str, Tensor | None]]:
    """What is done to tokens with an advantage: name, which tokens, a colour, and a factor for each that shades it.

    Every token is in one of them.
    """
    terms, batch = part.terms, part.batch
    left = batch.advantages != 0
    nowhere = torch.zeros_like(left)
    factor = factors(part, live(batch))
    held = nowhere.clone()
    for penalty in terms.penalties.values():
        held |= torch.ones_like(left) if penalty.where is None else penalty.where
    gone = factor.abs() < 1e-9
    tests: dict[str, tuple[Tensor, str]] = {
        "left alone": ((factor - 1).abs() < 1e-3, PALE),
        "dropped": (nowhere if terms.keep is None else ~terms.keep, "#111111"),
        "weight 0, still counted": (gone & (nowhere if terms.weight is None else terms.weight == 0), "#111111"),
        "stopped": (gone, "#111111"),
        "turned around": (factor < 0, PURPLE),
        "damped": (factor < 1, ""),
        "boosted": (factor > 1, ""),
    }
    if terms.unclipped is not None:
        tests = {"unclipped": (terms.unclipped, PURPLE), **tests}
    for name, (test, colour) in {"under a penalty": (held, GREEN), **tests}.items():
        where = left & test
        left = left & ~test
        if bool(where.any()):
            low, high = float(factor[where].min()), float(factor[where].max())
            told = name if colour else f"{name}, x {low:.2g}" + (f" to {high:.2g}" if high - low > 5e-3 else "")
            yield told, where, colour, None if colour else factor


# -- numbers of a response or of a whole optimizer step ----------------------------------------------------------------


def _lengths(part: Part) -> Panel:
    """The weight of a token over the length of its response, or over its place where tokens of one response differ."""
    batch, weights = part.batch, divisors(part)
    lengths = batch.sequence.bincount()
    spread = [weights[batch.sequence == row] for row in range(len(lengths))]
    by_place = any(float(weight.max() - weight.min()) > 1e-9 for weight in spread)
    order = sorted(range(len(lengths)), key=lambda row: int(lengths[row]))

    def panel(ax: Axes) -> None:
        ax.axhline(1.0, color=GREY, lw=1, label="token mean")
        if by_place:
            for row, colour in zip((order[0], order[len(order) // 2], order[-1]), COLOURS, strict=False):
                here = batch.sequence == row
                ax.plot(batch.position[here] + 1, weights[here], color=colour, label=f"{int(lengths[row])} tokens")
            ax.set(title="By the place in the response", xlabel="place of the token in its response")
        else:
            for name, side, colour in (
                ("rewarded", batch.advantages > 0, BLUE),
                ("punished", batch.advantages < 0, VERMILION),
            ):
                rows = [row for row in order if bool(side[batch.sequence == row].any())]
                ax.plot(lengths[rows], [spread[row][0] for row in rows], ".-", color=colour, label=name)
            ax.set(title="By the length of the response", xlabel="length of the response, tokens")
        ax.set(ylabel="weight of a token", ylim=(0, max(2.5, 1.05 * float(weights.max()))), xlim=(0, LIMIT + 4))

    return panel


def _over_distances(method: TokenObjective) -> tuple[Panel, ...]:
    """Numbers of the step over the distance of two policies; large and small numbers in panels of their own."""
    for title, moved in (("Between trainer and sampler", _sampled), ("Since the rollout", _drifted)):
        across, rows = [], []
        for times in range(31):
            step = moved(Decided.on_cloud(method).batch, times / 10)
            across.append(float((step.logprobs - step.signal("rollout_logprobs")).square().mean().sqrt()))
            rows.append(_numbers(Decided.on(method, step)))
        lines = {name: [row[name] for row in rows] for name in rows[0]}
        lines = {name: values for name, values in lines.items() if max(values) - min(values) > 1e-9}
        large = {name: values for name, values in lines.items() if max(map(abs, values)) > 0.5}
        small = {name: values for name, values in lines.items() if name not in large}
        if lines:
            return tuple(_lines(title, across, some) for some in (large, small) if some)
    return ()


def _lines(title: str, across: list[float], lines: Mapping[str, list[float]]) -> Panel:
    def panel(ax: Axes) -> None:
        for place, (name, values) in enumerate(lines.items()):
            ax.plot(across, values, DASHES[place // 6 % 3], color=COLOURS[place % 6], label=name)
        ax.set(title=title, xlabel="root mean square log-ratio, nats", ylabel="value")

    return panel


def _numbers(decided: Decided) -> dict[str, float]:
    """What multiplies the learning rate, or else the metrics."""
    terms = decided.part().terms
    if "lr_scale" in decided.method.writes:
        return {"factor on the learning rate": 1.0 if terms.lr_scale is None else float(terms.lr_scale)}
    return {name: mean.value for name, mean in terms.report.items() if float(mean.count)}


def _sampled(batch: TokenBatch, times: float) -> TokenBatch:
    """The sampler reports other log-probs; the policy has not moved since."""
    gap = batch.old_logprobs - batch.signal("rollout_logprobs")
    return replace(batch, old_logprobs=batch.logprobs, rollout_logprobs=(batch.logprobs - times * gap).clamp(max=0.0))


def _drifted(batch: TokenBatch, times: float) -> TokenBatch:
    """Sampler and trainer agree; the policy has moved since."""
    old = (batch.logprobs - times * (batch.logprobs - batch.old_logprobs)).clamp(max=0.0)
    return replace(batch, old_logprobs=old, rollout_logprobs=old)


def _price(method: TokenObjective) -> Panel | None:
    """What a controller asks for while the entropy is low and, from a step on, high; None where that is all one."""
    turn, steps = 60, range(1, 101)
    low, high = (replace(cloud(), entropies=scale * cloud().signal("entropies")) for scale in (0.3, 3.0))
    state, prices = method.init_state(), []
    for step in steps:
        decided = Decided.on(method, low if step < turn else high, state=state)
        state = decided.state
        prices.append(-sum(penalty.coefficient for penalty in decided.part().terms.penalties.values()))
    if len(set(prices)) == 1:
        return None

    def panel(ax: Axes) -> None:
        nats = [float(batch.signal("entropies").mean()) for batch in (low, high)]
        told = f"mean entropy {nats[0]:.2f} nats before, {nats[1]:.2f} from here on"
        ax.axvline(turn, color=GREY, ls="--", lw=1, label=told)
        ax.plot(steps, prices, color=BLUE, label="price")
        ax.set(title="Over optimizer steps", xlabel="optimizer step", ylabel="price of a nat of entropy")

    return panel


def settings_in_words(method: TokenObjective) -> str:
    """With which settings it was drawn."""
    values = ", ".join(f"`{key.name}={getattr(method, key.name)!r}`" for key in settings_of(type(method)))
    return values or "no settings"
