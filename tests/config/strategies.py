"""Random settings, objectives and runs."""

import string
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlstab
from rlstab import TokenObjective, compose, within
from rlstab.config.objectives import settings_as_yaml
from rlstab.core.method_settings import Setting, settings_of
from rlstab.errors import Conflict, OutOfRange
from rlstab.stages.stage import Stage
from rlstab.zoo import METHODS
from tests.examples import STAGE_EXAMPLES

#: A search for unforeseen cases: a short one in every run, a long one with the slow tests.
searched = pytest.mark.parametrize("examples", [6, pytest.param(1500, marks=pytest.mark.slow)])


def search(strategy: st.SearchStrategy[Any], examples: int, check: Callable[[Any], None]) -> None:
    """``check`` holds for this many drawn values."""
    settings(max_examples=examples)(given(strategy)(check))()


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Every value that a setting accepts, and no other."""
    low, high = (
        next((bound for name in names if (bound := getattr(setting.range, name, None)) is not None), None)
        for names in (("ge", "gt"), ("le", "lt"))
    )
    drawn: st.SearchStrategy[Any] = st.integers(low, high)
    if setting.choices or bool in setting.kinds:
        drawn = st.sampled_from(setting.choices or (False, True))
    elif float in setting.kinds:
        drawn = st.floats(low, high, allow_nan=False, allow_infinity=False)
    return (st.none() if setting.optional else st.nothing()) | drawn.filter(setting.accepts)


def _made(cls: type[TokenObjective], settings: dict[str, Any]) -> TokenObjective | None:
    try:
        return cls(**settings)
    except OutOfRange:  # two settings that want another order
        return None


@cache
def methods(*names: str) -> st.SearchStrategy[Any]:
    """A method with random settings, of the given names or of any."""

    def with_settings(name: str) -> st.SearchStrategy[Any]:
        cls = METHODS.get(name)
        drawn = st.fixed_dictionaries({setting.name: values(setting) for setting in settings_of(cls)})
        return drawn.map(partial(_made, cls)).filter(lambda method: method is not None)

    return st.sampled_from(names or rlstab.available()).flatmap(with_settings)


MASKS = methods("s2t", "top_entropy")


@st.composite
def fitting(draw: st.DrawFn, candidates: st.SearchStrategy[TokenObjective], most: int) -> TokenObjective:
    """A composition of what fits together among random methods, never empty."""
    chosen: list[TokenObjective] = []
    for method in draw(st.lists(candidates, min_size=1, max_size=most)):
        try:
            compose(*chosen, method)
        except Conflict:
            continue
        chosen.append(method)
    return compose(*chosen)


@st.composite
def nested(draw: st.DrawFn) -> TokenObjective:
    """``within`` of methods or of compositions."""
    outer = draw(MASKS.filter(lambda method: "keep" in method.writes))
    inner: Any = draw(methods("stare", "s2t", "kl") | fitting(methods("stare", "s2t", "kl", "entropy_bonus"), 3))
    return within(outer, inner.members[0] if len(getattr(inner, "members", ())) == 1 else inner)


def objectives() -> st.SearchStrategy[Any]:
    """Any composition."""
    return fitting(methods() | nested(), 5)


NUMBERS = st.floats(1e-9, 1e9)
COUNTS = st.integers(1, 10**6)
#: What YAML, terminals and files treat differently.
LETTERS = string.printable + "\0\x1b\x7f\x85\xa0éß\u0301ⅷ\u200b\u2028\u2029\u202e\ufeff\ufffe丁\U0001d7d9\U0010ffff"


def texts(size: int, *, every: bool = False) -> st.SearchStrategy[str]:
    """Of :data:`LETTERS`, or of all of Unicode, which hypothesis takes a second to list in a new clone."""
    return st.text(max_size=size) if every else st.lists(st.sampled_from(LETTERS), max_size=size).map("".join)


TEXTS = texts(12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def part(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with the values that are given, and some of those that are drawn."""
    drawn = {key: value for key, value in fields.items() if isinstance(value, st.SearchStrategy)}
    return st.fixed_dictionaries({key: st.just(fields[key]) for key in fields.keys() - drawn.keys()}, optional=drawn)


TASKS = st.one_of(
    part(name="countdown", numbers=st.integers(2, 6), low=st.integers(1, 5), high=st.integers(9, 99)),
    part(name="chain", modulus=st.none() | st.integers(2, 10), flaky=st.floats(0, 0.9), needs_junk=st.booleans()),
    part(
        name="reasoning_gym", dataset="chain_sum", options=st.dictionaries(TEXTS, PLAIN), threshold=st.none() | NUMBERS
    ),
    part(name="jsonl", path="a", eval_path=st.none() | TEXTS, scorer=st.sampled_from(["exact", "math_verify"])),
)


def together(stages: list[Stage]) -> bool:
    """Whether no stage excludes another."""
    there = {name for stage in stages for name in (stage.name, stage.kind)}
    return not there & {name for stage in stages for name in stage.excludes}


#: Of selectors and of estimators a run has one; `gdpo` reads several rewards, and these runs have one.
STAGE_LISTS = (
    st.lists(
        st.sampled_from([stage for several in STAGE_EXAMPLES.values() for stage in several if stage.name != "gdpo"]),
        max_size=4,
        unique_by=lambda stage: stage.kind if stage.kind in ("prompts", "advantages") else stage.name,
    )
    .filter(together)
    .map(lambda stages: [{"name": stage.name, **settings_as_yaml(stage)} for stage in stages])
)

#: The sections of a run other than its objective.
SECTIONS = part(
    model=part(name=TEXTS, reference=st.none() | TEXTS),
    task=TASKS,
    rollout=part(
        group=st.integers(2, 10**5),
        max_new_tokens=COUNTS,
        temperature=st.floats(1e-3, 1e3),
        stop=st.none() | TEXTS.filter(bool),
        chat=st.booleans(),
        precision=st.sampled_from([None, "bf16", "fp8", "int8", "int4", "int3", "int2"]),
        weight_noise=st.sampled_from([0.0, 0.3]),
    ),
    stages=STAGE_LISTS,
    optimisation=part(
        rollouts=COUNTS,
        epochs=st.integers(1, 4),
        mini_batches=st.sampled_from([1, 2, 4, 8, 16]),
        lr=st.floats(0, 1),
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
        old_logprobs=st.sampled_from([None, "recompute", "rollout"]),
        precision=st.sampled_from(["fp32", "bf16"]),
    ),
    engine=st.sampled_from(["auto", "fsdp2", {"name": "ddp"}, {"name": "fsdp2", "offload": True}]),
    evaluation=part(samples=8, every=st.integers(0, 99), pass_at=st.lists(st.integers(1, 8))),
    tracking=part(out=TEXTS.filter(bool), trackers=st.lists(st.sampled_from(["wandb", "tensorboard"])), samples=COUNTS),
    seed=st.integers(0, 2**32 - 1),
)
