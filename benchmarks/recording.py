"""What :mod:`benchmarks.published` and :mod:`benchmarks.authors` store of a published loss: its value and gradient."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.conformance.inputs import CUTS, load, tensors

Loss = Callable[[dict[str, Tensor], Tensor], "tuple[Tensor, Tensor | None]"]


def run(loss: Loss, name: str, parts: list[list[int]], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Add loss and gradient of the parts; ``selected`` where the loss says which tokens it chose."""
    values = tensors(name, dtype)
    gradient, chosen = torch.zeros_like(values["live"]), torch.zeros_like(values["live"])
    total, says = 0.0, False
    for rows in parts:
        live = values["live"][rows].clone().requires_grad_()
        part_loss, selected = loss({key: value[rows].clone() for key, value in values.items()}, live)
        part_loss.backward()
        assert live.grad is not None
        total, gradient[rows] = total + part_loss.item(), live.grad
        if selected is not None:
            says, chosen[rows] = True, selected.to(dtype)
    assert not gradient[values["mask"] == 0].any()
    result = {"loss": _number(total), "gradient": [[_number(value) for value in row] for row in gradient.tolist()]}
    return result | ({"selected": chosen.int().tolist()} if says else {})


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def case(
    loss: Loss, inputs: str, cut: str | list[list[int]] | None = None, dtype: str = "float64", **settings: Any
) -> dict[str, Any]:
    """What is stored: where it came from, and loss and gradient; ``cut`` may list the rows of each part."""
    rows = len(load("inputs")[inputs]["advantages"])
    parts = [list(range(rows))] if cut is None else CUTS[cut] if isinstance(cut, str) else cut
    given = {"inputs": inputs, "parts": parts, "dtype": dtype, "settings": settings}
    return given | run(loss, inputs, parts, getattr(torch, dtype))


class Config(dict):
    """Settings that are read as attributes and as items; what is absent is None."""

    __getattr__ = dict.get
