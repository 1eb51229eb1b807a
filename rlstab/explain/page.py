"""``rlstab explain``: in words, what a composition does to a token, costs, equals, and cannot do.

Every section is a function from a composition (and its run, where there is one) to lines of Markdown; the terminal
shows the same Markdown.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from rlstab.config import Document, RunConfig, objective_hash, run_hash
from rlstab.config.objectives import build_objective
from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.compose import Composition, Within
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.settings import settings_of
from rlstab.core.terms import Terms
from rlstab.explain.cards import card
from rlstab.explain.hosts import HOSTS, measures
from rlstab.explain.interactions import Kind, inert, interactions, unsafe, walk
from rlstab.explain.table import COSTS, read
from rlstab.presets import PRESETS, Preset, preset
from rlstab.zoo import METHODS
from rlstab.zoo.token_mean import TokenMean

#: Fields of Terms in the order in which the loss uses them, and what happens to a token there.
STAGES: Mapping[str, str] = {
    "keep": "Drop",
    "bonus": "Change the advantage",
    "ratio": "Ratio",
    "bounds": "Trust region",
    "exempt": "Exempt from the trust region",
    "gates": "Gate",
    "weight": "Weight",
    "aggregate": "Average",
    "penalties": "Penalty",
    "lr_scale": "Learning rate",
    "report": "Only observed",
}
#: Where nobody has a say.
_OTHERWISE = {
    "keep": "No token is dropped.",
    "bounds": "None: a token pulls with its ratio times its advantage, however far the ratio has gone.",
}
_ADVANTAGES = {
    "grpo": "the reward of its response minus the mean of the group, divided by the group's standard deviation",
    "dr_grpo": "the reward of its response minus the mean of the group",
    "rloo": "the reward of its response minus the mean of the others in the group",
}
_RATIOS = {
    "live": "the live policy itself, so it is exactly 1 and only its gradient counts",
    "rollout": "the policy that sampled, as the sampler reported it",
    "recompute": "the policy that sampled, by one more forward of the trainer",
}
#: What it costs the trainer that ships to differentiate an output of the live policy.
_LIVE_COSTS = {
    "entropies": "in the pass that gives the log-probs",
    "log_kept_mass": "one more reduction over the vocabulary in that pass, on the tokens that read it",
}
#: Presets that nobody published.
_OURS = ("recommended",)
_TITLES: Mapping[Kind, str] = {
    "against": "Against each other",
    "redundant": "Little left to do",
    "beside": "Good to know",
}


def explain(
    source: str, overrides: Mapping[str, Any], console: Console | None = None, *, markdown: bool = False
) -> None:
    """Print what a composition means, in words.

    Args:
        source: path of a run file or of an objective, or names of methods and presets with commas between.
        overrides: values of a run by dotted path.
        console: where to print.
        markdown: print the Markdown itself.

    Raises:
        ConfigError, Conflict: see :func:`rlstab.config.load_run`.
    """
    named = _are_names(source) and not overrides
    show(page(source, *(_named(source) if named else read(source, overrides))), console, markdown=markdown)


def explain_preset(name: str, console: Console | None = None, *, markdown: bool = False) -> None:
    """Print what a preset means; see :func:`explain`.

    Raises:
        UnknownName: no preset has this name.
    """
    recipe = preset(name)
    assert isinstance(recipe.objective, Composition)
    show(page(f"preset {name}", recipe.objective, None, about=recipe), console, markdown=markdown)


def show(text: str, console: Console | None = None, *, markdown: bool = False) -> None:
    """Print a page, or with ``markdown`` the Markdown that it is made of."""
    console = console or Console()
    if markdown:
        console.file.write(text)
    else:
        console.print(Markdown(text, hyperlinks=False))


def page(title: str, objective: Composition, run: RunConfig | None, about: Preset | None = None) -> str:
    """All sections as Markdown."""
    estimator = _estimator(run) if run else about.estimator if about else None
    sections = {
        "What happens to a token": story(objective, run, estimator),
        "What it needs and costs": costs(objective, run),
        "Which recipe it is": recipes(objective, estimator),
        "What its methods do to each other": pairs(objective),
        "What does nothing, and warnings": idle(objective, run),
        "Where it can run": hosts(objective),
    }
    hashes = f"Objective `{objective_hash(objective)}`" + (f", run `{run_hash(run)}`." if run else ".")
    body = "\n\n".join(f"## {head}\n\n" + "\n".join(lines) for head, lines in sections.items() if lines)
    return f"# {title}\n\n{about.about + ' ' if about else ''}{hashes}\n\n{body}\n"


def _are_names(source: str) -> bool:
    """Words with commas between, and no file of this name."""
    return not Path(source).exists() and all(re.fullmatch(r"\w+", name.strip()) for name in source.split(","))


def _named(source: str) -> tuple[Composition, None]:
    names = [name.strip() for name in source.split(",")]
    items = [{"preset": name} if name in PRESETS and name not in METHODS.names() else {"name": name} for name in names]
    return build_objective(Document.of({"objective": items})), None


def _estimator(run: RunConfig) -> str:
    """`grpo` without the standard deviation is `dr_grpo`."""
    return "dr_grpo" if run.advantage.estimator == "grpo" and not run.advantage.std else run.advantage.estimator


# -- what happens to a token ---------------------------------------------------------------------------------------


def story(objective: Composition, run: RunConfig | None, estimator: str | None) -> list[str]:
    """One numbered line for each thing that happens, in the order of the loss."""
    lines = []
    if estimator:
        epsilon = f" plus {run.advantage.epsilon}" if run and estimator == "grpo" else ""
        lines.append(
            f"**Advantage.** `{estimator}`: {_ADVANTAGES[estimator]}{epsilon}. All tokens of a response share it."
        )
    if run:
        lines.append(f"**Ratio.** Against {_RATIOS[str(run.optimisation.old_logprobs)]}.")
    parts, stated = _parts(objective), [leaf.method for leaf in walk(objective)]
    for field, head in STAGES.items():
        told = [
            f"`{name}`{_among(around)}{'' if method in stated else ', the default'}: {text}"
            for name, (method, around) in parts.items()
            if (text := method.in_words().get(field))
        ]
        lines += [f"**{head}.** {text}" for text in told or [_OTHERWISE.get(field, "")] if text]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _among(around: tuple[str, ...]) -> str:
    return f", among the tokens that `{'` and `'.join(around)}` keeps" if around else ""


# -- what it needs and costs ---------------------------------------------------------------------------------------


def costs(objective: Composition, run: RunConfig | None) -> list[str]:
    """Signals, passes, rows of the backward, state, statistics: what comes on top of plain GRPO."""
    lines = [_reads(objective, name) for name in sorted(objective.needs)]
    lines += [
        f"- `{name}` of the live policy, with gradient, for {_who(objective, 'live_needs', name)}: "
        f"{_LIVE_COSTS.get(name, 'yours to provide')}."
        for name in sorted(objective.live_needs)
    ]
    if not lines:
        lines.append("- No signal beyond log-probs and advantages.")
    if run:
        lines.append(_passes(objective, run))
    lines.append(_rows(objective))
    state = [
        f"`{leaf.method.name}` ({', '.join(one)})" for leaf in walk(objective) if (one := leaf.method.init_state())
    ]
    lines.append(f"- State, saved with the checkpoint: {'; '.join(state) or 'none'}.")
    deciding = dict.fromkeys(leaf.method.name for leaf in walk(objective) if measures(leaf.method))
    if deciding:
        lines.append(
            f"- {_listed(iter(deciding))} {'decides' if len(deciding) == 1 else 'decide'} by statistics over the whole "
            f"optimizer step, all micro-batches and ranks, before the first backward pass. {_refresh(run)}{_scope(run)}"
        )
    return lines


def _reads(objective: Composition, name: str) -> str:
    what, cost = SIGNALS.get(name, "a signal of your own"), COSTS.get(name, "yours to provide")
    return f"- `{name}`, for {_who(objective, 'needs', name)}: {what}. {cost[0].upper()}{cost[1:]}."


def _who(objective: Composition, attribute: str, name: str) -> str:
    return _listed(leaf.method.name for leaf in walk(objective) if name in getattr(leaf.method, attribute))


def _listed(names: Iterator[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _passes(objective: Composition, run: RunConfig) -> str:
    optimisation, found = run.optimisation, []
    if optimisation.old_logprobs == "recompute":
        found.append("one a rollout for the old log-probs")
    if "ref_logprobs" in objective.needs:
        found.append("one a rollout of the reference model")
    if optimisation.refresh == "step":
        found.append("one an optimizer step for fresh evidence")
    beyond = "; ".join(found) or "none"
    steps, rollout = optimisation.optimizer_steps_per_rollout, f"{run.rollout.prompts} x {run.rollout.group} responses"
    taken = f"{steps} optimizer step{'s' * (steps != 1)} a rollout of {rollout}"
    return f"- {taken}. Forward passes beyond sampling and the loss: {beyond}."


def _rows(objective: Composition) -> str:
    dense = everywhere(objective)
    if dense:
        listed = _listed(iter(dense))
        return (
            f"- {listed} {'acts' if len(dense) == 1 else 'act'} on every token, so every token has a gradient, also "
            f"one that is dropped: the backward through the vocabulary head skips no row (`head/live_fraction` is 1)."
        )
    silencing = _listed(leaf.method.name for leaf in walk(objective) if _silences(leaf.method))
    who = f", silenced by {silencing}" if silencing else ""
    return (
        f"- A token without a gradient (advantage 0{who}, stopped by the trust region; and under no penalty) has no "
        f"row in the backward through the vocabulary head where that starts from hidden states "
        f"(`rlstab.signals.token_signals`); from logits, only what comes after them is saved. The metric "
        f"`tokens/live` is the share whose policy term can have a gradient, `head/live_fraction` that of the rows that "
        f"had a backward."
    )


def _silences(method: TokenObjective) -> bool:
    """It drops tokens, or gives some the weight 0."""
    return "keep" in method.writes or any(
        one.weight is not None and bool((one.weight == 0).any()) for one in _tried(method)
    )


def everywhere(objective: Composition) -> list[str]:
    """Methods whose penalty acts on every token, found by trying them."""
    return [
        key
        for key, method in objective.keyed.items()
        if not isinstance(method, Within)  # whose inner method has the tokens that the outer one keeps
        and any(
            penalty.coefficient != 0 and (penalty.where is None or bool(penalty.where.all()))
            for terms in _tried(method)
            for penalty in terms.penalties.values()
        )
    ]


def _tried(method: TokenObjective) -> Iterator[Terms]:
    """What a method asks for in three steps whose entropy is so low that controllers act."""
    count = 64
    dice = torch.Generator().manual_seed(0)
    values = {name: 1e-6 * torch.rand(8, 8, generator=dice) for name in {"entropies", *method.needs}}
    known: dict[str, Any] = {name: values[name] for name in values if name in SIGNALS}
    batch = TokenBatch.from_padded(
        response_mask=torch.ones(8, 8),
        advantages=torch.tensor([1.0, -1.0]).repeat(4),
        old_logprobs=-9 * torch.rand(count, generator=dice).view(8, 8),
        extra={name: values[name] for name in values if name not in SIGNALS},
        **known,
    )
    state: State | None = None
    for _ in range(3):
        plan = make_plan(method, [batch], state)
        state = plan.state
        yield plan.terms(batch)


def _refresh(run: RunConfig | None) -> str:
    if run is None:
        return "Of which policy (`refresh`) and over how much (`scope`) is for the run to say."
    if run.optimisation.refresh == "step":
        return "`refresh: step`: of the policy at the start of each optimizer step."
    if run.optimisation.optimizer_steps_per_rollout == 1:
        return "`refresh: rollout`: of the policy that sampled, which is the one that learns."
    return "`refresh: rollout`: of the policy that sampled, also in the later optimizer steps, when it is older."


def _scope(run: RunConfig | None) -> str:
    return (
        " `scope: microbatch`: no, of each micro-batch alone." if run and run.optimisation.scope == "microbatch" else ""
    )


# -- which recipe it is --------------------------------------------------------------------------------------------


def recipes(objective: Composition, estimator: str | None) -> list[str]:
    """Whether it is a preset, else the nearest ones and every difference."""
    found = {name: differences(objective, estimator, one) for name, one in PRESETS.items()}
    name, *others = _nearest(found)
    if found[name]:
        lines = [f"- Nearest: `{name}` ({PRESETS[name].about.rstrip('.')}). This one {'; '.join(found[name])}."]
    else:
        lines = [f"- Equals `{name}`: {PRESETS[name].about}"]
    if others:
        lines.append(f"- As near: {_listed(iter(others))}.")
    if name in _OURS:
        published, *others = _nearest({key: one for key, one in found.items() if key not in _OURS})
        about = PRESETS[published].about.rstrip(".")
        as_near = f" As near: {_listed(iter(others))}." if others else ""
        told = "; ".join(found[published])
        lines.append(f"- Nearest that is published: `{published}` ({about}). This one {told}.{as_near}")
    alone = f" An objective alone has no advantage estimator; `{name}` takes `{PRESETS[name].estimator}`."
    return [
        *lines,
        f"- Compared are the loss and the advantage estimator; a preset records no model, data or schedule."
        f"{alone if estimator is None else ''}",
    ]


def _nearest(found: Mapping[str, list[str]]) -> list[str]:
    least = min(map(_distance, found.values()))
    return [name for name, one in found.items() if _distance(one) == least]


def differences(objective: Composition, estimator: str | None, recipe: Preset) -> list[str]:
    """What an objective lacks, adds and sets otherwise, as ends of a sentence; only settings that have an effect."""
    mine, theirs = _parts(objective), _parts(recipe.objective)
    found = [f"lacks `{name}`" for name in theirs if name not in mine]
    found += [f"adds `{name}`" for name in mine if name not in theirs]
    for name in mine.keys() & theirs.keys():
        (one, around), (other, around_other) = mine[name], theirs[name]
        if one.in_words() != other.in_words():
            settings = [(key.name, getattr(one, key.name), getattr(other, key.name)) for key in settings_of(type(one))]
            found += [f"sets `{name}.{key}` to {new} instead of {old}" for key, new, old in settings if new != old]
        if around != around_other:
            found.append(f"has `{name}` {_place(around)} instead of {_place(around_other)}")
    if estimator not in (None, recipe.estimator):
        found.append(f"takes the advantage `{estimator}` instead of `{recipe.estimator}`")
    return sorted(found)


def _place(around: tuple[str, ...]) -> str:
    return f"within `{'`, `'.join(around)}`" if around else "on all tokens"


def _distance(found: list[str]) -> int:
    """A method more or less weighs as much as three settings."""
    return sum(3 if one.startswith(("lacks", "adds")) else 1 for one in found)


def _parts(objective: TokenObjective) -> dict[str, tuple[TokenObjective, tuple[str, ...]]]:
    """Methods by name, numbered where one stands several times, with those within which each acts.

    A composition without an owner of the aggregation is a token mean, so that is one of its parts.
    """
    leaves = list(_placed(objective, ()))
    if "aggregate" not in objective.writes:
        leaves.append((TokenMean(), ()))
    several, seen = Counter(one.name for one, _ in leaves), Counter[str]()
    parts = {}
    for one, around in leaves:
        seen[one.name] += 1
        parts[f"{one.name}_{seen[one.name]}" if several[one.name] > 1 else one.name] = one, around
    return parts


def _placed(method: TokenObjective, around: tuple[str, ...]) -> Iterator[tuple[TokenObjective, tuple[str, ...]]]:
    if isinstance(method, Composition):
        for one in method.members:
            yield from _placed(one, around)
    elif isinstance(method, Within):
        yield from _placed(method.outer, around)
        yield from _placed(method.inner, (*around, *(leaf.method.name for leaf in walk(method.outer))))
    else:
        yield method, around


# -- what pulls against what, what does nothing, where it can run --------------------------------------------------


def pairs(objective: Composition) -> list[str]:
    """What is declared of the methods, two at a time."""
    found = [f"- **{_TITLES[kind]}:** {text}" for kind, text in interactions(objective)]
    return found or ["Nothing is known of its methods that hinders or surprises."]


def idle(objective: Composition, run: RunConfig | None) -> list[str]:
    """Methods that do nothing at their settings or in the run, and what makes the run unsafe."""
    found = [f"- **Warning:** {text}" for text in (unsafe(objective, run) if run else [])]
    if run:
        found += [f"- {text}" for text in inert(objective, run)]
    elif "bounds" in objective.writes:
        found.append("- The trust region acts only with several optimizer steps a rollout: with one the ratio is 1.")
    found += [
        f"- {leaf.method!r} does nothing: {why}"
        for leaf in walk(objective)
        if (why := _identity(leaf.method)) is not None
    ]
    return found or ["Nothing is known to be idle or unsafe."]


def _identity(method: TokenObjective) -> str | None:
    """Why a method changes no loss at its settings, if they are those of one of the Limits of its card."""
    cls, why = type(method), ""
    if not settings_of(cls) or not cls.__module__.startswith("rlstab.zoo."):
        return None
    for item in card(cls).items("Limits"):
        head, _, text = item.partition(": ")
        why = why if text.startswith("likewise") else text
        call = re.fullmatch(rf"``{cls.__name__}\((.*)\)``", head)
        if call and cls(**_literals(call[1])) == method:
            return why.replace("``", "`")
    return None


def _literals(keywords: str) -> dict[str, Any]:
    """The keywords of a call, as Python writes them."""
    call = ast.parse(f"f({keywords})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


def hosts(objective: Composition) -> list[str]:
    """Our trainer, a loop of one's own, and what the hooks of others would hand over."""
    rows = [
        f"| {one.name} | {one.hook} | {', '.join(one.lacks(objective)) or 'nothing'} | "
        f"{'reading it' if one.read else 'running it'} |"
        for one in HOSTS
    ]
    needs = sorted(f"`{name}`" for name in objective.needs) + sorted(f"live `{name}`" for name in objective.live_needs)
    listed = ", ".join(["log-probs, old log-probs, advantages", *needs])
    foreign = [name for name in sorted(objective.needs) if name not in SIGNALS]
    own = f"no: it does not provide {', '.join(f'`{name}`' for name in foreign)}" if foreign else "yes"
    return [
        f"- rlstab's own trainer (`rlstab train`): {own}.",
        f"- A loop of yours: yes, if it holds {listed}; it calls the objective, or `make_plan` where an "
        "optimizer step comes in parts.",
        "- Other trainers: no adapter ships yet. What the hook of each, as of mid-2026, does not hand over:",
        "",
        "| trainer | hook | lacks, for this objective | known by |",
        "|---|---|---|---|",
        *rows,
    ]
