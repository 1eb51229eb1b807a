"""Writing a safetensors file with one of its tensors in memory at a time.

The library's own ``save_file`` takes all of them at once, which for tensors in shards are all of the model's moments in
one process. The format is eight bytes of length, a header in JSON, and the bytes of the tensors:
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> None:
    """Write tensors by name, in their order; readers find them by :func:`safetensors.torch.load_file`.

    Args:
        path: of the file, which is replaced.
        tensors: each may be a shard that has the shape of the whole.
        whole: makes a plain tensor of one of them, on any device; asked once for each, in their order.

    Raises:
        OSError: it cannot be written.
    """
    header, end = {}, 0
    for name, one in tensors.items():
        size = one.numel() * one.element_size()
        header[name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for one in tensors.values():
            plain = whole(one).detach().cpu().contiguous()
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
