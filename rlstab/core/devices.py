"""What a device can compute."""

from __future__ import annotations

from functools import cache

import torch


@cache
def counting_device(device: torch.device) -> torch.device:
    """Where sums and thresholds over tokens are computed: the device, or the CPU where that has no float64 (mps)."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except TypeError:
        return torch.device("cpu")
    return device
