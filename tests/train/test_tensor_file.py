"""A file of tensors that are made whole one after the other is what safetensors reads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlstab.train.tensor_file import write_tensors


def test_it_is_what_safetensors_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = {
        "wide": torch.randn(3, 5, dtype=torch.float64),
        "flipped": torch.randn(4, 6).T,
        "narrow": torch.randn(7).bfloat16(),
        "half": torch.randn(1, 3).half(),
        "true": torch.tensor([True, False, True]),
        "number": torch.tensor(7, dtype=torch.int64),
        "none": torch.zeros(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    asked: list[str] = []
    names = {id(one): name for name, one in given.items()}

    def whole(one: Tensor) -> Tensor:
        asked.append(names[id(one)])
        return one

    write_tensors(tmp_path / "some.safetensors", given, whole)
    found = load_file(tmp_path / "some.safetensors")
    assert asked == list(given)
    assert found.keys() == given.keys()
    for name, one in given.items():
        assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
        assert torch.equal(found[name], one)
