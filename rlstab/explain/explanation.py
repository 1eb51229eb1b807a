"""``rlstab explain``: in words, what a composition does to a token, what it costs, and where it can run.

Every section is a function from a composition, and its run if there is one, to lines of Markdown; the terminal shows
the same Markdown. The pages of single methods in the docs are made by ``docs/hooks/pages.py``.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from rich.markdown import Markdown

from rlstab.config import RunConfig, objective_hash, run_hash
from rlstab.config.user_code import is_user_code
from rlstab.console import Terminal
from rlstab.core.batch import BASICS
from rlstab.core.compose import Composition, numbered, walk
from rlstab.core.objective import Leaf, TokenObjective, active_methods
from rlstab.explain import stages
from rlstab.explain.check import read
from rlstab.explain.costs import costs
from rlstab.explain.notes import idle, pairs
from rlstab.files import exists
from rlstab.hosts import HOSTS
from rlstab.presets import PRESETS, Preset, preset
from rlstab.signals import TRAINER_SIGNALS
from rlstab.stages.pipeline import Pipeline
from rlstab.visible import visible
from rlstab.zoo import METHODS
from rlstab.zoo.token_mean import TokenMean

#: Fields of Terms in the order in which the loss uses them, and what each does to a token.
STORY: Mapping[str, str] = {
    "keep": "Drop",
    "bonus": "Change the advantage",
    "support": "Log-probs",
    "ratio": "Ratio",
    "bounds": "Trust region",
    "surrogate": "In place of the ratio",
    "unclipped": "Exempt from the trust region",
    "gates": "Gate",
    "weight": "Weight",
    "aggregate": "Average",
    "penalties": "Penalty",
    "lr_scale": "Learning rate",
    "report": "Only observed",
}
_RATIOS = {
    "live": "the live policy itself, so it is exactly 1 and only its gradient counts",
    "rollout": "the policy that sampled, as the sampler reported it",
    "recompute": "the policy that sampled, by one more forward pass of the trainer",
}


def explain(source: str, overrides: Mapping[str, Any]) -> str:
    """What a composition means, in words, as Markdown.

    Args:
        source: path of a run file or of an objective, or names of methods and presets, separated by commas.
        overrides: values of a run by dotted path.

    Raises:
        ConfigError, Conflict: see :func:`rlstab.config.load_run`.
    """
    names = [name.strip() for name in source.split(",")]
    if exists(source) or not all(re.fullmatch(r"\w+", name) or is_user_code(name) for name in names):
        return page(source, *read(source, overrides))
    # a name that a method and a preset share means the method; a note says how to name the preset
    ambiguous = [name for name in names if name in PRESETS and name in METHODS.names()]
    items = [{"preset" if name in PRESETS and name not in ambiguous else "name": name} for name in names]
    notes = (f"This is the method `{name}`; the preset is `rlstab explain --preset {name}`. " for name in ambiguous)
    return page(source, *read({"objective": items}, overrides), note="".join(notes))


def explain_preset(name: str, overrides: Mapping[str, Any]) -> str:
    """What a preset means; see :func:`explain`.

    Raises:
        UnknownName: no preset has this name.
        ConfigError: a run has no such setting.
    """
    recipe = preset(name)
    return page(f"preset {name}", *read({"objective": {"preset": name}}, overrides), about=recipe)


def show(text: str, *, markdown: bool = False) -> None:
    """Print an explanation, with ``markdown`` as Markdown."""
    if markdown:
        sys.stdout.write(visible(text, spaces=False))
    else:
        Terminal().print(Markdown(text, hyperlinks=False))


def page(title: str, objective: Composition, run: RunConfig | None, about: Preset | None = None, note: str = "") -> str:
    """All sections as Markdown, after a note where there is one."""
    pipeline = run.pipeline if run else about.pipeline if about else None
    sections = {
        "What happens in a rollout": stages.rollout(pipeline, run) if pipeline else [],
        "What happens to a token": story(objective, run, pipeline),
        "What it needs and costs": costs(objective, run) + (stages.needs(pipeline) if pipeline else []),
        "What its methods do to each other": pairs(objective, pipeline),
        "What does nothing, and warnings": idle(objective, run),
        "Where it can run": _where(objective),
    }
    hashes = f"Objective `{objective_hash(objective)}`" + (f", run `{run_hash(run)}`." if run else ".")
    body = "\n\n".join(f"## {head}\n\n" + "\n".join(lines) for head, lines in sections.items() if lines)
    return f"# {title}\n\n{about.about + ' ' if about else ''}{note}{hashes}\n\n{body}\n"


def story(objective: Composition, run: RunConfig | None, pipeline: Pipeline | None) -> list[str]:
    """One numbered line for each action, in the order of the loss."""
    lines = []
    if pipeline:
        estimator = pipeline.estimator
        lines.append(f"**Advantage.** `{estimator.name}`: one for each {estimator.per}.")
    if run:
        lines.append(f"**Ratio.** Against {_RATIOS[str(run.optimisation.old_logprobs)]}.")
    stated = {leaf.name for leaf in walk(objective)}
    for field, head in STORY.items():
        texts = [
            f"`{name}`{_among(leaf)}{'' if leaf.name in stated else ', the default'}: {text}"
            for name, leaf in parts(objective).items()
            if (text := leaf.method.in_words().get(field))
        ]
        lines += [f"**{head}.** {text}" for text in texts or [_otherwise(field, objective)] if text]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def parts(objective: TokenObjective) -> dict[str, Leaf]:
    """The methods of an objective by name, numbered if one occurs several times.

    A composition in which no method aggregates is a token mean, which then is one of its parts.
    """
    leaves = list(walk(objective))
    if "aggregate" not in objective.writes:
        leaves.append(Leaf(TokenMean()))
    return numbered([(leaf.name, leaf) for leaf in leaves])


def _otherwise(field: str, objective: Composition) -> str:
    """What happens if no method fills a field; for a trust region, only if nothing replaces it."""
    if field == "keep":
        return "No token is dropped."
    replaced = any(
        method.writes & {"surrogate", "gates"} and "trust region" in method.about.addresses
        for method in active_methods(objective)
    )
    if field != "bounds" or "surrogate" in objective.writes or replaced:
        return ""
    if "ratio" in objective.writes:
        return "None beyond the ratio: a token pulls with its ratio times its advantage."
    return "None: a token pulls with its ratio times its advantage, however far the ratio has gone."


def _among(leaf: Leaf) -> str:
    outer_names = "` and `".join(outer.name for outer in leaf.around)
    return f", among the tokens that `{outer_names}` keeps" if outer_names else ""


def _where(objective: Composition) -> list[str]:
    """Where it can be trained: one line for the trainers that can, and one for each that cannot."""
    lacks = {"rlstab train": [f"`{name}`" for name in sorted(objective.needs - TRAINER_SIGNALS - BASICS)]}
    lacks |= {f"{host.titled} ({host.adapter})": host.lacks(objective) for host in HOSTS.values()}
    able = [where for where, missing in lacks.items() if not missing]
    needs = sorted(f"`{name}`" for name in objective.needs - BASICS)
    needs += sorted(f"live `{name}`" for name in objective.live_needs)
    return [
        f"- Your own loop, where it holds {', '.join(['log-probs, old log-probs, advantages', *needs])}.",
        *([f"- Also {', '.join(able)}; `rlstab check FILE --host NAME` says what to set there."] if able else []),
        *(f"- Not {where}: it lacks {', '.join(missing)}." for where, missing in lacks.items() if missing),
    ]
