"""What a method reads and fills, seen by watching it, against what its class and its card say."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Set
from typing import ClassVar

import torch

from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.objective import TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.settings import Setting, settings_of
from rlstab.core.stats import Settled, settle
from rlstab.errors import OutOfRange
from rlstab.explain.card_sections import BASICS, card


class WatchedBatch(TokenBatch):
    """Remembers which of its tensors were looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> object:
        if name in BASICS or name in SIGNALS:
            WatchedBatch.seen.add(name)
        return super().__getattribute__(name)


class WatchedPolicy(PolicyOutputs):
    """Remembers which of its tensors were looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> object:
        if name in ("logprobs", "entropies", "log_kept_mass"):
            WatchedPolicy.seen.add(name)
        return super().__getattribute__(name)


def examples(cls: type[TokenObjective]) -> list[TokenObjective]:
    """One instance for each combination of choices, and of None and a number; other settings at their default.

    Combinations that the method refuses are left out.
    """

    def values(setting: Setting) -> list[object]:
        if setting.choices:
            return list(setting.choices)
        if bool in setting.kinds:
            return [False, True]
        some = next(value for value in (0.5, 2, 2.0) if setting.accepts(value))
        required = setting.default is dataclasses.MISSING
        return [None, some] if setting.optional else [some if required else setting.default]

    settings = settings_of(cls)
    found = []
    for chosen in itertools.product(*(values(one) for one in settings)):
        with contextlib.suppress(OutOfRange):
            found.append(cls(**dict(zip((one.name for one in settings), chosen, strict=True))))
    return found


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
    signals["truncated"] = torch.tensor([0.0, 1.0, 0.0])
    signals["branch"] = torch.tensor([0.0, 0.0, 1.0])
    signals["block_ids"] = torch.tensor([[0, 0, 1, 1, -1], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]])
    others = SIGNALS.keys() - signals.keys()
    return signals | {name: -torch.rand(3, 5, generator=draw, dtype=torch.float64) for name in sorted(others)}


def live(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Live outputs for that evidence, a little further on, as leaves."""
    return {
        "logprobs": (tensors["logprobs"] - 0.2).requires_grad_(),
        "entropies": (tensors["entropies"] + 0.05).requires_grad_(),
        "log_kept_mass": (tensors["log_kept_mass"] - 0.05).requires_grad_(),
    }


def differences(cls: type[TokenObjective]) -> list[str]:
    """Where reading and filling differ from `needs`, `live_needs`, `writes`, `Penalty.reads` and the card."""
    said = card(cls)
    read, filled, keys, found = set(), set(), set(), []
    for method in examples(cls):
        seen, lively, wrote, wrong = watch(method)
        found += [f"{method!r}: {one}" for one in wrong]
        found += [
            f"{method!r}: {one}"
            for one in [
                *compare(
                    "reads '{}', which `needs` does not name",
                    "`needs` names '{}'",
                    # where the live policy is its own denominator: the old log-probs of the ratio are not meant
                    watch(method, live_ratio=True)[0] & (SIGNALS.keys() | {"logprobs", "old_logprobs"}),
                    method.needs,
                ),
                *compare(
                    "reads the live '{}', which `live_needs` does not name",
                    "`live_needs` names '{}'",
                    lively - {"logprobs"},
                    method.live_needs,
                ),
                *compare("fills '{}', which `writes` does not name", "`writes` names '{}'", wrote, method.writes),
            ]
        ]
        read |= seen | {f"live {name}" for name in lively}
        filled |= wrote
        keys |= method.init_state().keys()
    for section, what in (("Reads", read), ("Writes", filled), ("State", keys)):
        heads = said.heads(section)
        where = f"the card's {section}"
        found += compare(
            f"{cls.__name__} has '{{}}', which {where} does not name", f"{where} names '{{}}'", what, set(heads)
        )
        if len(heads) != len(set(heads)):
            found.append(f"{where} names something twice: {', '.join(heads)}.")
    return found


def compare(undeclared: str, surplus: str, done: set[str], declared: Set[str]) -> list[str]:
    """A line for what is done and not declared, and for what is declared and not done."""
    return [f"{undeclared.format(name)}." for name in sorted(done - declared)] + [
        f"{surplus.format(name)}, and nothing comes of it." for name in sorted(declared - done)
    ]


def watch(method: TokenObjective, *, live_ratio: bool = False) -> tuple[set[str], set[str], set[str], list[str]]:
    """What two steps read of the evidence and of the live policy, what they fill, and penalties that mislead."""
    tensors = evidence()
    batch = WatchedBatch.from_padded(live_ratio=live_ratio, **tensors)
    policy = WatchedPolicy.from_padded(batch, **live(tensors))
    anchor = WatchedPolicy.from_padded(batch, **live(tensors))
    WatchedBatch.seen.clear()
    state, lively, filled, wrong = method.init_state(), set(), set(), []
    for _ in range(2):
        # not by method.settle, which would refuse to measure a batch without tokens that lacks an undeclared signal
        first = settle([method.measure(batch)], LocalComm())
        stat = Settled({**first, **settle([method.measure_again(batch, first)], LocalComm())})
        state = method.advance(state, stat)
        terms = method.terms(batch, stat, state)
        filled |= terms.filled()
        for name, penalty in terms.penalties.items():
            WatchedPolicy.seen.clear()
            penalty.fn(policy, anchor)
            beyond = WatchedPolicy.seen - {"logprobs"}
            if beyond != penalty.reads:
                wrong.append(
                    f"the penalty '{name}' reads the live {sorted(beyond)}, its `reads` are {sorted(penalty.reads)}."
                )
            lively |= WatchedPolicy.seen
    return set(WatchedBatch.seen), lively, filled, wrong
