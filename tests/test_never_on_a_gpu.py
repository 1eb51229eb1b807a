"""The page that lists what has never run on a GPU names every place of the code that is only for one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "docs/how-to/several-processes.md").read_text().partition("## What has never run on a GPU\n")[2]
#: What decides by the device, or only exists on one.
FOR_A_DEVICE = re.compile(
    r'torch\.cuda\.|\.is_cuda\b|"nccl"|"cuda"|pin_memory|^GPU_ROWS|CUDA_VISIBLE_DEVICES"'
    r"|(device\.type|device_type) (==|!=)|torch\.autocast\(self\.device",
    re.M,
)
#: In which words the page speaks of it, by file.
NAMED = {
    "bench/run.py": ["`rlstab bench` workers with a GPU each"],
    "core/chunks.py": ["a pool of values is"],
    "core/compare.py": ["comparisons, places"],
    "core/random.py": ["random numbers are torch's and not numpy's"],
    "core/select.py": ["a pool of values is"],
    "core/stats.py": ["CUDA as such"],
    "signals/__init__.py": ["takes 8192 rows at a time"],
    "signals/head.py": ["come out in float32"],
    "train/engines/choice.py": ["also with one process and `offload`"],
    "train/engines/fsdp2.py": ["with pinned memory"],
    "train/footprint.py": ["what `rlstab check` says of a GPU's memory"],
    "train/policy.py": ["bfloat16 on a device"],
    "train/processes.py": ["CUDA as such"],
    "train/sampling.py": ["at every eighth token"],
}


def test_all_code_for_a_device_is_on_the_page() -> None:
    found = {
        path.relative_to(ROOT / "rlstab").as_posix()
        for path in (ROOT / "rlstab").rglob("*.py")
        if FOR_A_DEVICE.search(path.read_text())
    }
    assert found == NAMED.keys(), "say on the page that it has never run on a GPU, and here in which words"
    text = " ".join(SECTION.split())
    missing = [words for places in NAMED.values() for words in places if words not in text]
    assert missing == []
