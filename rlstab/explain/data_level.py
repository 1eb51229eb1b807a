"""What of an objective reaches a loss that cannot be changed, through its mask and its advantages: facts.

``rlstab check --host data`` and the adapter :mod:`rlstab.adapters.data` read them,
and the tables of docs/hosts/data.md are printed from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from rlstab.core.comm import LocalComm
from rlstab.core.compose import Composition
from rlstab.core.objective import TokenObjective, ask
from rlstab.core.observe import Observe
from rlstab.core.settings import settings_of
from rlstab.core.terms import Bounds
from rlstab.core.walk import walk
from rlstab.errors import ConfigError, RlstabError
from rlstab.explain.exclusions import shipped
from rlstab.explain.sample import sample
from rlstab.presets import PRESETS

#: Fields of Terms that a mask, advantages per token, and the settings of a clipped policy loss can say, and how.
REACHES: Mapping[str, str] = {
    "keep": "the mask",
    "weight": "the advantage, times the weight",
    "bonus": "the advantage, plus the bonus",
    "bounds": "the clip of the host",
    "aggregate": "the advantage, times what the host's divisor lacks",
}
#: What a method asks for where it fills one of the other fields.
REFUSED: Mapping[str, str] = {
    "penalties": "a penalty, a term of the loss with a gradient of its own",
    "gates": "a trust region other than one clip of the ratio",
    "pull": "a replacement for the ratio",
    "ratio": "another ratio",
    "exempt": "tokens without a trust region",
    "lr_scale": "another learning rate",
}
PER_TOKEN = "a clip of its own for each token"


def refusal(method: TokenObjective) -> str | None:
    """What a method asks for that a mask and advantages cannot say; None where they can say all of it."""
    for leaf in walk(method):
        if isinstance(leaf.method, Observe):
            continue
        for name, what in REFUSED.items():
            if name in leaf.method.writes:
                return what
        bounds = own_bounds(leaf.method)
        if bounds is not None and (isinstance(bounds.low, Tensor) or isinstance(bounds.high, Tensor)):
            return PER_TOKEN
    return None


def require_data_level(objective: Composition) -> None:
    """Refuse what no mask and no advantages can say.

    Raises:
        ConfigError: names the method, what it asks for, and what to change.
    """
    for key, method in objective.keyed.items():
        what = refusal(method)
        if what is not None:
            raise ConfigError(
                f"'{key}' asks for {what}: a loss mask and advantages cannot say it. Remove '{key}', or train where "
                f"the loss itself can be changed, such as with rlstab.adapters.trl."
            )


def own_bounds(objective: TokenObjective) -> Bounds | None:
    """The trust region that an objective asks for, from a part without tokens."""
    if "bounds" not in objective.writes:
        return None
    empty = objective.empty_part()
    with torch.no_grad():
        stat, state = objective.settle([empty], objective.init_state(), LocalComm())
        return ask(objective, empty, stat, state).bounds


def methods_table() -> list[str]:
    """Markdown: what becomes of every method of rlstab at the data level."""
    rows: dict[str, list[str]] = {}
    for cls in shipped():
        several = _at_each_choice(cls)
        refused = next((what for one in several if (what := refusal(one)) is not None), None)
        fields = [how for name, how in REACHES.items() if any(name in one.writes for one in several)]
        says = f"refused: {refused}" if refused else f"exact: {'; '.join(fields) or 'it only reports'}"
        rows.setdefault(says, []).append(f"`{cls.name}`")
    return [
        "| methods | at the data level |",
        "|---|---|",
        *(f"| {', '.join(rows[one])} | {one} |" for one in sorted(rows)),
    ]


def presets_table() -> list[str]:
    """Markdown: every preset, exact or refused, and because of which methods."""
    lines = ["| preset | at the data level |", "|---|---|"]
    for name, one in PRESETS.items():
        asks = {leaf.name: refusal(leaf.method) for leaf in walk(one.objective)}
        why = [f"`{key}` asks for {what}" for key, what in asks.items() if what is not None]
        lines.append(f"| `{name}` | {'refused: ' + '; '.join(why) if why else 'exact'} |")
    return lines


def _at_each_choice(cls: type[TokenObjective]) -> list[TokenObjective]:
    """A method at its defaults, and at each value of its settings that are a choice."""
    found = [one for one in [sample(cls)] if one is not None]
    choices = [[(one.name, value) for value in one.choices] for one in settings_of(cls) if one.choices]
    for chosen in itertools.product(*choices) if choices else ():
        try:
            found.append(cls(**dict(chosen)))
        except (RlstabError, TypeError):  # other settings have no default, or do not fit
            continue
    return found
