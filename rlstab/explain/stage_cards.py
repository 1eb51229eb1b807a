"""The pages of all stages, and how they follow one another."""

from __future__ import annotations

import ast
import doctest
import re
import sys
from collections.abc import Collection, Mapping
from types import FunctionType

from rlstab.core.batch import SIGNALS
from rlstab.explain.card_page import MARK, listed, parameters, yaml_of
from rlstab.explain.card_sections import Card, card
from rlstab.explain.exclusions import shipped as methods
from rlstab.explain.markdown_text import body, inline, table
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.stages.response_batch import EVIDENCE
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, RewardShaper, RolloutExpander, Stage

#: The kinds in the order in which a rollout runs through them, with the heading of each and how many a run has.
KINDS: Mapping[type[Stage], tuple[str, str]] = {
    PromptSelector: ("Which prompts", "A run has one, `in_order` without another."),
    RewardShaper: (
        "What a response earns",
        "A run has any number. Each sees the reward of the scorer, and what they give is added to it.",
    ),
    RolloutExpander: (
        "What else to sample, and what to drop",
        "A run has any number, asked in the order of the list. A group is dropped as a whole.",
    ),
    AdvantageEstimator: (
        "What a response is worth",
        "A run has one, `grpo` without another. It sees what is learnt from, just before it is learnt.",
    ),
}
#: What a stage may read that it has to name in its `needs`.
BEYOND = frozenset({*EVIDENCE, *SIGNALS, "logprobs", "prompt_features"})


def shipped() -> list[type[Stage]]:
    """The stages of rlstab itself, by name; those of other packages have pages of their own."""
    return [cls for cls in map(STAGES.get, STAGES.names()) if cls.__module__.startswith("rlstab.stages.")]


def kind_of(cls: type[Stage]) -> type[Stage]:
    """Which of :data:`KINDS` a stage is."""
    return next(kind for kind in KINDS if issubclass(cls, kind))


def page(card: Card[Stage], beside: Mapping[str, str]) -> str:
    """The page of a card, in the Markdown of GitHub.

    Args:
        card: of any stage, also of another package.
        beside: names of stages and methods, with where their pages are.
    """
    cls = card.cls
    beside = {name: where for name, where in beside.items() if name != cls.name}
    recipes = [f"`{name}`" for name in PRESETS if cls.name in brought(name)]
    pieces = [
        f"{MARK}; edit {cls.__qualname__}. -->",
        f"# `{cls.name}` · `{cls.__qualname__}`",
        f"**{inline(card.summary, beside)}**",
        table(
            ["what it acts on", "in Python", "in YAML", "in the presets"],
            [
                [
                    cls.kind,
                    f"`from {cls.__module__} import {cls.__qualname__}`",
                    f"`{yaml_of(cls)}`",
                    ", ".join(recipes) or "none",
                ]
            ],
        ),
    ]
    for name, text in card.sections.items():
        pieces.append(f"## {name}")
        if name == "Parameters" and card.parameters:
            pieces.append(parameters(card, beside))
        else:
            pieces += body(with_imports(cls, text) if name == "Example" else text, beside)
        if name == "Interacts" and (told := _declared(cls, beside)):
            pieces.append(listed(told))
        if name == "Limits" and cls.about.exceptions:
            pieces.append("Laws of `rlstab.testing` that it does not obey:")
            pieces.append(listed(f"*{law}*: {inline(why, beside)}" for law, why in cls.about.exceptions.items()))
    return "\n\n".join(pieces) + "\n"


def with_imports(cls: type[Stage], example: str) -> str:
    """An example that can be pasted anywhere: with imports of what a doctest finds in the module of the class."""
    source = "".join(one.source for one in doctest.DocTestParser().get_examples(example))
    names = sorted({node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)})
    there = {name: vars(sys.modules[cls.__module__]).get(name) for name in names}
    lines = sorted(
        f">>> from {one.__module__} import {name}\n"
        for name, one in there.items()
        if isinstance(one, type | FunctionType) and not re.search(rf"import .*\b{name}\b", source)
    )
    before, prompt, session = example.partition(">>> ")
    session = f"{prompt}{session}"
    own = re.match(r"(?:>>> (?:import|from) .*\n)*", session)
    assert own is not None  # it matches nothing at all
    return f"{before}{own[0]}{''.join(lines)}{session[own.end() :]}"


def brought(preset: str) -> set[str]:
    """Names of the stages that a preset brings."""
    recipe = PRESETS[preset]
    return {recipe.estimator, *(one.name for one in recipe.stages)}


def _declared(cls: type[Stage], beside: Collection[str]) -> list[str]:
    """What a class declares of others, and other stages of it."""
    found = [("Conflict", name, why) for name, why in cls.excludes.items()]
    found += [("Conflict", one.name, one.excludes[cls.name]) for one in shipped() if cls.name in one.excludes]
    found += [("Published with", name, why) for name, why in cls.about.expects.items()]
    return [f"**{title}:** {inline(f'`{name}`', beside)}: {inline(why, beside)}" for title, name, why in found]


def pages(methods_at: str) -> dict[str, str]:
    """File name to text: one page per stage, and ``index.md``.

    Args:
        methods_at: the folder of the pages of methods, as seen from these.
    """
    cards = [card(cls) for cls in shipped()]
    beside = {cls.name: f"{methods_at}/{cls.name}.md" for cls in methods()}
    beside |= {one.cls.name: f"{one.cls.name}.md" for one in cards}
    found = {f"{one.cls.name}.md": page(one, beside) for one in cards}
    return {**found, "index.md": index(cards, beside, methods_at)}


def index(cards: Collection[Card[Stage]], beside: Mapping[str, str], methods_at: str) -> str:
    """All stages in the order of a rollout, side by side."""
    pieces = [
        f"{MARK}. -->",
        "# All stages",
        f"What acts outside the loss; the [methods]({methods_at}/index.md) act in it. A rollout runs through the four "
        "kinds in the order of this page. One page each, made from the class (`rlstab cards`). [Stages](../stages.md) "
        "says how they work, and how to write your own.",
    ]
    for kind, (head, how_many) in KINDS.items():
        here = [one for one in cards if issubclass(one.cls, kind)]
        pieces += [f"## {head}", inline(how_many, beside)]
        if here:
            header = ["stage", "what it does", "reads beyond the basics", "state", "arXiv"]
            pieces.append(table(header, [_row(one, beside) for one in here]))
    clashes = [f"`{cls.name}` and `{name}`: {why}" for cls in shipped() for name, why in cls.excludes.items()]
    evidence = [f"`{name}`: {what}" for name, (_, what) in EVIDENCE.items()]
    pieces += [
        "## What cannot act together",
        inline("Two stages of a kind that a run has once" + (", and:" if clashes else "."), beside),
        *([listed(inline(one, beside) for one in clashes)] if clashes else []),
        "## Evidence",
        "The basics are rewards, lengths, whether a response ended, its prompt, its group, and where it branches from. "
        f"Beyond them a stage may need a [signal of tokens]({methods_at}/index.md), `logprobs` of the policy that "
        "learns, `prompt_features`, which are the mean input embedding of each prompt, or:",
        listed(evidence),
    ]
    return "\n\n".join(pieces) + "\n"


def _row(one: Card[Stage], beside: Mapping[str, str]) -> list[str]:
    cls = one.cls
    arxiv = dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", one.sections["Source"]))
    read = [name for name in dict.fromkeys(re.findall(r"``(\w+)``", one.sections["Reads"])) if name in BEYOND]
    return [
        f"[`{cls.name}`]({cls.name}.md)",
        inline(one.summary, {name: where for name, where in beside.items() if name != cls.name}),
        ", ".join(f"`{name}`" for name in read) or "none",
        ", ".join(f"`{key}`" for key in one.named("State")) or "none",
        ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in arxiv) or "none",
    ]
