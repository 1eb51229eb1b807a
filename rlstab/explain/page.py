"""``rlstab explain``: in words, what a composition does to a token, costs, equals, and cannot do.

Every section is a function from a composition (and its run, where there is one) to lines of Markdown; the terminal
shows the same Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from rlstab.config import Document, RunConfig, load_run, objective_hash, run_hash
from rlstab.config.objectives import build_objective
from rlstab.config.user_code import is_user_code, located
from rlstab.console import Terminal
from rlstab.core.compose import Composition
from rlstab.explain import stage_words
from rlstab.explain.costs import costs
from rlstab.explain.idle import idle
from rlstab.explain.interactions import pairs
from rlstab.explain.recipes import recipes
from rlstab.explain.story import story
from rlstab.explain.table import read
from rlstab.files import exists
from rlstab.hosts import HOSTS
from rlstab.presets import PRESETS, Preset, preset
from rlstab.signals import TRAINER_SIGNALS
from rlstab.visible import visible
from rlstab.zoo import METHODS


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
    if _are_names(source):
        text = page(source, *_with(_named(source), overrides), note=_also_presets(source))
    else:
        text = page(source, *read(source, overrides))
    show(text, console, markdown=markdown)


def explain_preset(
    name: str, overrides: Mapping[str, Any], console: Console | None = None, *, markdown: bool = False
) -> None:
    """Print what a preset means; see :func:`explain`.

    Raises:
        UnknownName: no preset has this name.
        ConfigError: a run has no such setting.
    """
    recipe = preset(name)
    composed, run = _with([{"preset": name}], overrides)
    show(page(f"preset {name}", composed, run, about=recipe), console, markdown=markdown)


def show(text: str, console: Console | None = None, *, markdown: bool = False) -> None:
    """Print a page, or with ``markdown`` the Markdown that it is made of."""
    console = console or Terminal()
    if markdown:
        console.file.write(visible(text, spaces=False))
    else:
        console.print(Markdown(text, hyperlinks=False))


def page(title: str, objective: Composition, run: RunConfig | None, about: Preset | None = None, note: str = "") -> str:
    """All sections as Markdown, after a note where there is one."""
    pipeline = run.pipeline if run else about.pipeline if about else None
    sections = {
        "What happens in a rollout": stage_words.rollout(pipeline, run) if pipeline else [],
        "What happens to a token": story(objective, run, pipeline),
        "What it needs and costs": costs(objective, run) + (stage_words.needs(pipeline) if pipeline else []),
        "Which recipe it is": recipes(objective, pipeline),
        "What its methods do to each other": pairs(objective, pipeline),
        "What does nothing, and warnings": idle(objective, run),
        "Where it can run": _where(objective),
    }
    hashes = f"Objective `{objective_hash(objective)}`" + (f", run `{run_hash(run)}`." if run else ".")
    body = "\n\n".join(f"## {head}\n\n" + "\n".join(lines) for head, lines in sections.items() if lines)
    return f"# {title}\n\n{about.about + ' ' if about else ''}{note}{hashes}\n\n{body}\n"


def _where(objective: Composition) -> list[str]:
    """Rlstab's own trainer, and every host that an adapter ships for: that it can, or what it lacks."""
    lacks = {"rlstab's own trainer": [f"`{name}`" for name in sorted(objective.needs - TRAINER_SIGNALS)]}
    lacks |= {f"{host.titled}, through `{host.adapter}`": host.lacks(objective) for host in HOSTS.values()}
    lines = [f"- Not in {where}: it lacks {', '.join(missing)}." for where, missing in lacks.items() if missing]
    able = [where for where, missing in lacks.items() if not missing]
    needs = sorted(f"`{name}`" for name in objective.needs) + sorted(f"live `{name}`" for name in objective.live_needs)
    own = f"- In your own loop, which holds {', '.join(['log-probs, old log-probs, advantages', *needs])}."
    return [*([f"- In {'; '.join(able)}."] if able else []), *lines, own]


def _are_names(source: str) -> bool:
    """Words, or classes of files, with commas between, and no file of this name."""
    return not exists(source) and all(re.fullmatch(r"\w+", one) or is_user_code(one) for one in _names(source))


def _named(source: str) -> list[dict[str, str]]:
    return [
        {"preset": name} if name in PRESETS and name not in METHODS.names() else {"name": name}
        for name in _names(source)
    ]


def _with(items: list[dict[str, str]], overrides: Mapping[str, Any]) -> tuple[Composition, RunConfig | None]:
    """An objective, and where settings of a run are given the run of them and of defaults."""
    if not overrides:
        return build_objective(located(Document.of({"objective": items}))), None
    run = load_run({"objective": items}, overrides)
    return run.composition, run


def _names(source: str) -> list[str]:
    return [name.strip() for name in source.split(",")]


def _also_presets(source: str) -> str:
    """A name that a method and a preset share means the method; this says where the preset is."""
    both = [name for name in _names(source) if name in PRESETS and name in METHODS.names()]
    return "".join(f"This is the method `{name}`; the preset is `rlstab explain --preset {name}`. " for name in both)
