"""Settings, evidence and live outputs on which every method has something to do."""

import contextlib
import dataclasses
import itertools

import torch

from rlstab.core.batch import SIGNALS
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import Setting, settings_of
from rlstab.errors import OutOfRange
from rlstab.zoo import METHODS


def shipped() -> list[type[TokenObjective]]:
    """The methods of rlstab itself, by name."""
    return [cls for cls in map(METHODS.get, METHODS.names()) if cls.__module__.startswith("rlstab.zoo.")]


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
    methods = []
    for chosen in itertools.product(*map(values, settings)):
        with contextlib.suppress(OutOfRange):
            methods.append(cls(**{setting.name: value for setting, value in zip(settings, chosen, strict=True)}))
    return methods


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
