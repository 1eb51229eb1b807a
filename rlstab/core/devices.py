"""What a device can compute, and copies to and from it.

A program queues work on an accelerator and runs ahead of it. Reading any value makes the host wait until the queue is
empty, so values that are read together are copied together, and copies to the device do not wait.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def counting_device(device: torch.device) -> torch.device:
    """Where sums and thresholds over tokens are computed: the device, or the CPU where that has no float64 (mps)."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except TypeError:
        return torch.device("cpu")
    return device


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device, without waiting for it; a tensor that is already there is returned as it is."""
    return values.to(device, non_blocking=values.device.type == "cpu" and device.type != "mps")


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, without gradient; those of a device are copied together, as bytes."""
    copies = [tensor.detach() for tensor in tensors]
    for device in {tensor.device for tensor in copies if tensor.device.type != "cpu"}:
        indices = [index for index, tensor in enumerate(copies) if tensor.device == device]
        indices.sort(key=lambda index: -copies[index].element_size())  # keeps each tensor aligned
        flat = [copies[index].reshape(-1).view(torch.uint8) for index in indices]
        pieces = torch.cat(flat).cpu().split([values.numel() for values in flat])
        for index, piece in zip(indices, pieces, strict=True):
            copies[index] = piece.view(copies[index].dtype).view(copies[index].shape)
    return copies
