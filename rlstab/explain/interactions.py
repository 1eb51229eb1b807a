"""What methods do to each other, and what a run leaves them to do: declared once, found in a composition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from rlstab.config.drift import why_idle
from rlstab.core.compose import Composition, Within
from rlstab.core.objective import TokenObjective
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.top_entropy import TopEntropyMask

if TYPE_CHECKING:
    from rlstab.config.runs import RunConfig

#: ``against``: one undoes what the other does. ``redundant``: both do one thing, or one leaves the other little to do.
#: ``beside``: they do not hinder each other, and what comes of it may surprise.
Kind = Literal["against", "redundant", "beside"]

#: Stands in the table for every method that drops tokens.
MASK = "any mask"
#: Those of which the card of a method says that they act on every token.
_EVERY_TOKEN = ("kl", "entropy_bonus", "adaptive_entropy")


@dataclass(frozen=True)
class Interaction:
    """What one method does to another.

    Attributes:
        first, second: names of methods, or :data:`MASK`. The card of one of them names the other under Interacts.
        kind: see :data:`Kind`.
        why: one or two sentences; the names are filled in for ``{first}`` and ``{second}``.
        where: holds only for methods with these settings.
        nested: also holds where one of them acts within the other.
    """

    first: str
    second: str
    kind: Kind
    why: str
    where: Callable[[Any, Any], bool] = lambda first, second: True
    nested: bool = True


def _leaves_nothing(s2t: S2TMask, top: TopEntropyMask) -> bool:
    """s2t's threshold is then not above the one below which top_entropy silences everything."""
    return s2t.population == "all" and s2t.quantile <= 1 - top.share


INTERACTIONS: tuple[Interaction, ...] = (
    Interaction(
        "s2t",
        "stare",
        "against",
        "{first} and {second} act in opposite directions on the same tokens, rare ones that were rewarded: {first} "
        "drops them, {second} pulls harder at them. {first} wins, and {second}'s share still counts the tokens that "
        "{first} drops. within({first}, {second}) takes the share among the live ones.",
        nested=False,
    ),
    *(
        Interaction(
            "stare",
            bonus,
            "against",
            "an entropy bonus lifts the mean entropy and so holds {first}'s gate shut.",
        )
        for bonus in ("entropy_bonus", "adaptive_entropy")
    ),
    *(
        Interaction(
            "kl",
            bonus,
            "against",
            "{second} pulls away from a reference that is sure of itself, {first} pulls back to it.",
        )
        for bonus in ("entropy_bonus", "adaptive_entropy")
    ),
    Interaction(
        "constant_length",
        MASK,
        "against",
        "{first} divides by a fixed length, so the tokens that {second} drops still count in it.",
    ),
    Interaction(
        "stare",
        "top_entropy",
        "against",
        "{second} silences rare tokens at places where the policy was sure, and {first}'s share still counts them.",
        nested=False,
    ),
    Interaction(
        "s2t",
        "top_entropy",
        "redundant",
        "{second} silences every token that {first} would drop.",
        where=_leaves_nothing,
        nested=False,
    ),
    Interaction(
        "s2t",
        "top_entropy",
        "redundant",
        "{second} silences every token below its own entropy threshold, so {first} decides only about those above it.",
        where=lambda s2t, top: not _leaves_nothing(s2t, top),
    ),
    Interaction(
        "entropy_bonus",
        "adaptive_entropy",
        "redundant",
        "{first} and {second} pay for the same thing, and the controller does not know of the other's price.",
    ),
    *(
        Interaction(
            mask,
            "random_mask",
            "redundant",
            "a token that either of {first} and {second} drops is dropped, so {second} is no control of {first}.",
        )
        for mask in ("s2t", "top_entropy")
    ),
    *(
        Interaction(
            penalty,
            MASK,
            "beside",
            "{first} acts on every token, also on those that {second} drops: penalties follow no mask.",
            nested=False,
        )
        for penalty in _EVERY_TOKEN
    ),
    Interaction(
        "stare",
        "lp_reg",
        "beside",
        "{first} damps and {second} holds the same tokens, rare ones that were punished, so the effects add up.",
        where=lambda stare, lp_reg: stare.variant == "C2",
    ),
    Interaction(
        "lp_reg",
        "top_entropy",
        "beside",
        "a token that {second} silences keeps the penalty of {first}: penalties follow no mask.",
        nested=False,
    ),
    Interaction(
        "s2t",
        "lp_reg",
        "beside",
        "both choose rare tokens, and never the same one: {first} rewarded, {second} punished ones.",
    ),
    Interaction(
        "clip_higher",
        "lp_reg",
        "beside",
        "the tokens that {second} holds are exempt from the trust region of {first}.",
        where=lambda clip, lp_reg: lp_reg.form == "code",
    ),
)


@dataclass(frozen=True)
class Leaf:
    """A method of an objective.

    Attributes:
        method: itself, neither a composition nor a `within`.
        path: the `within` around it, from the outside: for each a number that no other has, and the side.
    """

    method: TokenObjective
    path: tuple[tuple[int, Literal["outer", "inner"]], ...] = ()

    def nested(self, other: Leaf) -> bool:
        """One of the two acts within the other."""
        sides = dict(self.path)
        return any(sides.get(number, side) != side for number, side in other.path)


def walk(objective: TokenObjective, path: tuple[tuple[int, Literal["outer", "inner"]], ...] = ()) -> Iterator[Leaf]:
    """The methods of an objective, those inside `within` too."""
    if isinstance(objective, Composition):
        for one in objective.members:
            yield from walk(one, path)
    elif isinstance(objective, Within):
        yield from walk(objective.outer, (*path, (id(objective), "outer")))
        yield from walk(objective.inner, (*path, (id(objective), "inner")))
    else:
        yield Leaf(objective, path)


def interactions(objective: TokenObjective) -> list[tuple[Kind, str]]:
    """What the methods of an objective do to each other: kind and sentence, those that matter most first."""
    leaves = list(walk(objective))
    found = {
        (one.kind, one.why.format(first=first.method.name, second=second.method.name)): None
        for one in INTERACTIONS
        for first in leaves
        for second in leaves
        if _is(first.method, one.first)
        and _is(second.method, one.second)
        and one.where(first.method, second.method)
        and (one.nested or not first.nested(second))
    }
    return sorted(found, key=lambda item: get_args(Kind).index(item[0]))


def _is(method: TokenObjective, name: str) -> bool:
    return "keep" in method.writes if name == MASK else method.name == name


def inert(objective: Composition, run: RunConfig) -> list[str]:
    """Methods and settings that cannot act in a run, each with the reason."""
    optimisation, found = run.optimisation, []
    one_step = optimisation.optimizer_steps_per_rollout == 1
    found += [
        f"{key if not one.writes - {'bounds', 'gates', 'ratio'} else f'the trust region of {key}'} cannot act: {why}"
        for key, one in objective.keyed.items()
        for drift in sorted(one.reads_drift)
        if (why := why_idle(drift, optimisation)) is not None
    ]
    if run.rollout.group == 1:
        found.append(
            "rollout.group = 1: a response has nothing to be compared with, so every advantage is 0, and nothing but a "
            "penalty moves the policy."
        )
    if one_step and optimisation.refresh == "step" and optimisation.old_logprobs != "rollout":
        found.append(
            "optimisation.refresh = step: with one optimizer step per rollout the policy has not moved, and one more "
            "forward makes the same evidence again."
        )
    advantage = run.advantage
    unread: tuple[str, ...] = () if advantage.std else ("epsilon", "ddof")
    if advantage.estimator != "grpo":
        unread = ("std", "epsilon", "ddof")
    return found + [
        f"advantage.{name}: nothing is divided by a standard deviation, so it is not read."
        for name in unread
        if getattr(advantage, name) != type(advantage).model_fields[name].default
    ]


def unsafe(objective: Composition, run: RunConfig) -> list[str]:
    """What makes a run unsafe, each with the reason."""
    optimisation, found = run.optimisation, []
    if optimisation.optimizer_steps_per_rollout > 1 and not objective.writes & {"bounds", "gates"}:
        found.append(
            f"{optimisation.optimizer_steps_per_rollout} optimizer steps per rollout and no method with bounds or "
            f"gates: nothing stops a token whose ratio has run away. Add clip_higher."
        )
    if optimisation.scope == "microbatch":
        found.append("optimisation.scope = microbatch: the loss depends on how the optimizer step is cut.")
    return found
