"""The data and the reward of chain.yaml; run as a script, this file writes the data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rlstab.models import SHIPPED
from rlstab.tasks.chain import Chain

TASK = Chain()
TOKENIZER = AutoTokenizer.from_pretrained(SHIPPED["chain-tiny"])


def correct(prompts: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
    """1 for the right answer; from the ids, since an answer ends with `$`, the EOS token."""
    answers = TOKENIZER.batch_decode(completion_ids)
    return [TASK.score(TASK.example("train", number), answer) for number, answer in zip(index, answers, strict=True)]


def rows(*_: Any, **__: Any) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
    """The transformation that axolotl applies to the rows of the file; they need none."""
    return (lambda row, **_: row), {}


if __name__ == "__main__":
    lines = [{"prompt": TASK.example("train", number).prompt, "index": number} for number in range(512)]
    Path("runs").mkdir(exist_ok=True)
    Path("runs/chain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
