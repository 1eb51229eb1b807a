"""Every method carries a card, and what the card says is what the method does."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import itertools
import re
import sys
from typing import ClassVar

import pytest
import torch

import rlstab
from rlstab.core.batch import SIGNALS, PolicyOutputs, TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.compose import compose
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.settings import Setting, settings_of
from rlstab.zoo import METHODS

SECTIONS = (
    "Problem",
    "Equation",
    "Reads",
    "Writes",
    "Denominator",
    "Parameters",
    "State",
    "Deviations",
    "Interacts",
    "Limits",
    "Example",
    "Source",
)
BASIC = ("old_logprobs", "logprobs", "advantages", "sequence", "position", "sequence_ids", "group_ids")
#: Methods of other packages may be installed beside ours; their cards are theirs.
NAMES = [name for name in rlstab.available() if METHODS.get(name).__module__.startswith("rlstab.")]

every_method = pytest.mark.parametrize("cls", [pytest.param(METHODS.get(name), id=name) for name in NAMES])


def card(cls: type[TokenObjective]) -> dict[str, str]:
    """Section to its text, without the common indent; the line before the first section under ``""``."""
    texts: dict[str, list[str]] = {"": []}
    current = ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        header = re.fullmatch(r"([A-Z]\w+):", line)
        if header:
            current = header[1]
            assert current not in texts, f"two sections {current}"
            texts[current] = []
        else:
            assert not current or not line or line.startswith("    "), f"{current}: not indented: {line!r}"
            texts[current].append(line)
    return {name: inspect.cleandoc("\n".join(["", *lines])).strip() for name, lines in texts.items()}


def items(section: str) -> list[str]:
    """The ``- `` items of a section, each on one line."""
    return [" ".join(item.split()) for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]]


def heads(section: str) -> list[str]:
    """What stands in double backticks at the start of each item."""
    found = [re.match(r"((?:live )?)``([^`]+)``", item) for item in items(section)]
    return [one[1] + one[2] for one in found if one]


def examples(cls: type[TokenObjective]) -> list[TokenObjective]:
    """One instance for each combination of choices, and of None and a number; other settings at their default."""

    def values(setting: Setting) -> list[object]:
        if setting.choices:
            return list(setting.choices)
        some = next(value for value in (0.5, 2, 2.0) if setting.accepts(value))
        required = setting.default is dataclasses.MISSING
        return [None, some] if setting.optional else [some if required else setting.default]

    settings = settings_of(cls)
    return [
        cls(**dict(zip((one.name for one in settings), chosen, strict=True)))
        for chosen in itertools.product(*(values(one) for one in settings))
    ]


def test_nothing_is_registered_without_a_name_here() -> None:
    assert len(NAMES) >= 11


@every_method
def test_sections_stand_in_order(cls: type[TokenObjective]) -> None:
    found = card(cls)
    assert tuple(found) == ("", *SECTIONS)
    assert all(found.values()), [name for name, text in found.items() if not text]
    assert len(found[""].splitlines()) == 1


@every_method
def test_example_runs(cls: type[TokenObjective]) -> None:
    module = sys.modules[cls.__module__]
    tests = [
        one for one in doctest.DocTestFinder(recurse=False).find(cls, cls.__name__, module, globs={}) if one.examples
    ]
    assert len(tests) == 1
    printed: list[str] = []
    result = doctest.DocTestRunner().run(tests[0], out=printed.append)
    assert result.failed == 0, "".join(printed)
    assert ">>> " in card(cls)["Example"]
    assert ">>> " not in "".join(text for name, text in card(cls).items() if name != "Example")


@every_method
def test_parameters_are_the_fields(cls: type[TokenObjective]) -> None:
    section = card(cls)["Parameters"]
    settings = settings_of(cls)
    assert heads(section) == [one.name for one in settings]
    assert len(items(section)) == len(settings)
    if not settings:
        assert section == "none"
    for item, setting in zip(items(section), settings, strict=True):
        required = setting.default is dataclasses.MISSING
        stated = f"{setting}, {'required' if required else f'default {setting.default!r}'}. "
        assert re.match(rf"``{setting.name}``(?: \([^)]+\))?: {re.escape(stated)}\S", item), (item, stated)


@every_method
def test_writes_are_declared(cls: type[TokenObjective]) -> None:
    declared = frozenset().union(*(one.writes for one in examples(cls)))
    assert sorted(heads(card(cls)["Writes"])) == sorted(declared)


@every_method
def test_reads_are_declared(cls: type[TokenObjective]) -> None:
    section = card(cls)["Reads"]
    needs = frozenset().union(*(one.needs for one in examples(cls)))
    live_needs = frozenset().union(*(one.live_needs for one in examples(cls)))
    named = heads(section)
    assert len(named) == len(set(named))
    assert {name for name in named if name in SIGNALS} == needs
    assert {name.removeprefix("live ") for name in named if name.startswith("live ")} - {"logprobs"} == live_needs
    if not named:
        assert section.startswith("nothing")


class WatchedBatch(TokenBatch):
    """Remembers which of its tensors were looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> object:
        if name in BASIC or name in SIGNALS:
            WatchedBatch.seen.add(name)
        return super().__getattribute__(name)


class WatchedPolicy(PolicyOutputs):
    """Remembers which of its tensors were looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> object:
        if name in ("logprobs", "entropies", "log_kept_mass"):
            WatchedPolicy.seen.add(f"live {name}")
        return super().__getattribute__(name)


@every_method
def test_reads_are_what_is_read(cls: type[TokenObjective]) -> None:
    tensors = evidence()
    watched = WatchedBatch.from_padded(**tensors)
    policy = WatchedPolicy.from_padded(watched, **live(tensors))
    anchor = PolicyOutputs.from_padded(watched, **live(tensors))
    WatchedBatch.seen.clear()
    WatchedPolicy.seen.clear()
    for method in examples(cls):
        state = method.init_state()
        for _ in range(2):
            stat, state = method.settle([watched], state, LocalComm())
            for penalty in method.terms(watched, stat, state).penalties.values():
                penalty.fn(policy, anchor)
    assert set(heads(card(cls)["Reads"])) == WatchedBatch.seen | WatchedPolicy.seen


@every_method
def test_state_keys(cls: type[TokenObjective]) -> None:
    section = card(cls)["State"]
    keys = list(examples(cls)[0].init_state())
    assert heads(section) == keys
    if not keys:
        assert section == "none"


@every_method
def test_denominator(cls: type[TokenObjective]) -> None:
    first = re.match(r"\w+", card(cls)["Denominator"])
    assert first is not None
    assert first[0] in ("kept", "all", "untouched")
    writes = frozenset().union(*(one.writes for one in examples(cls)))
    assert (first[0] == "kept") == ("keep" in writes)


@every_method
def test_interacts_names_other_methods(cls: type[TokenObjective]) -> None:
    section = items(card(cls)["Interacts"])
    assert [item.partition(":")[0] for item in section] == ["good with", "careful with", "surprising"]
    for item in section:
        assert set(re.findall(r"``(\w+)``", item)) & (set(NAMES) - {cls.name}), item


@every_method
def test_deviations_and_source(cls: type[TokenObjective]) -> None:
    assert all(item.startswith("From ") for item in items(card(cls)["Deviations"]))
    assert re.search(r"\b(19|20)\d\d\b", card(cls)["Source"])
    assert re.search(r"arXiv \d{4}\.\d{5}", card(cls)["Source"])


def evidence() -> dict[str, torch.Tensor]:
    """Twelve tokens of three responses with every signal; mean entropy near 0.1, so that all controllers act."""
    draw = torch.Generator().manual_seed(7)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    logprobs = -4 * torch.rand(3, 5, generator=draw, dtype=torch.float64)
    signals = {
        "response_mask": mask,
        "advantages": torch.tensor([1.3, -0.7, 0.2], dtype=torch.float64),
        "old_logprobs": logprobs,
        "logprobs": logprobs + 0.3 * torch.randn(3, 5, generator=draw, dtype=torch.float64),
        "entropies": 0.2 * torch.rand(3, 5, generator=draw, dtype=torch.float64),
        "max_logprobs": -0.1 * torch.rand(3, 5, generator=draw, dtype=torch.float64),
        "log_kept_mass": -0.1 * torch.rand(3, 5, generator=draw, dtype=torch.float64),
    }
    others = SIGNALS.keys() - signals.keys()
    return signals | {name: -torch.rand(3, 5, generator=draw, dtype=torch.float64) for name in sorted(others)}


def live(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Live outputs for that evidence, a little further on, as leaves."""
    return {
        "logprobs": (tensors["logprobs"] - 0.2).requires_grad_(),
        "entropies": (tensors["entropies"] + 0.05).requires_grad_(),
        "log_kept_mass": (tensors["log_kept_mass"] - 0.05).requires_grad_(),
    }


def losses(*methods: TokenObjective) -> list[torch.Tensor]:
    """Loss and gradients of three steps with state."""
    tensors = evidence()
    batch, objective, state = TokenBatch.from_padded(**tensors), compose(*methods), None
    found = []
    for _ in range(3):
        outputs = live(tensors)
        plan = make_plan(objective, [batch], state)
        loss = plan.loss(batch, PolicyOutputs.from_padded(batch, **outputs)).loss
        loss.backward()
        found.append(loss.detach())
        found += [torch.zeros_like(one) if one.grad is None else one.grad for one in outputs.values()]
        state = plan.state
    return found


LIMITS = [
    pytest.param(name, expression, id=f"{name}: {expression}")
    for name in NAMES
    for expression in heads(card(METHODS.get(name))["Limits"])
]


@pytest.mark.parametrize(("name", "expression"), LIMITS)
def test_limits_are_the_identity_bit_for_bit(name: str, expression: str) -> None:
    cls = METHODS.get(name)
    method = eval(expression, {cls.__name__: cls})
    assert isinstance(method, cls)
    assert all(torch.equal(one, other) for one, other in zip(losses(method), losses(), strict=True))


@every_method
def test_limits_name_a_setting_where_there_is_one(cls: type[TokenObjective]) -> None:
    section = card(cls)["Limits"]
    assert items(section)
    assert heads(section) or any("No setting makes it so" in item for item in items(section))


def test_sequence_mean_is_the_identity_on_equal_lengths() -> None:
    tensors = evidence()
    tensors["response_mask"] = torch.tensor([[1, 1, 1, 1, 0]]).expand(3, 5)
    batch = TokenBatch.from_padded(**tensors)
    policy = PolicyOutputs.from_padded(batch, **live(tensors))
    assert torch.equal(compose(rlstab.SequenceMean())(batch, policy).loss, compose()(batch, policy).loss)


def test_constant_length_is_the_identity_at_the_mean_length() -> None:
    mean = int(evidence()["response_mask"].sum()) // 3
    found = zip(losses(rlstab.ConstantLength(length=mean)), losses(), strict=True)
    assert all(torch.equal(one, other) for one, other in found)
    assert not torch.equal(losses(rlstab.ConstantLength(length=mean + 1))[0], losses()[0])
