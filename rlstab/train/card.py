"""The model card: what a trained model is and how it came about, as ``README.md`` beside its weights.

It is written once, at the end of a run, and never over a file that is there. Its last line has a checksum of the rest:
a card that somebody changed is theirs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlstab.config.document import dump
from rlstab.config.own_code import short
from rlstab.config.runs import DatasetSettings, RunConfig
from rlstab.core.docstring import docstring, summary
from rlstab.core.method import Method
from rlstab.core.observe import Observe
from rlstab.core.walk import walk

NAME = "README.md"

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_MARK = re.compile(r"<!-- rlstab sha256 ([0-9a-f]{64}) -->\n")

#: Metrics of the end that a card shows, where the run has them, and what they are called there.
_SHOWN = {
    "eval/mean": "held-out prompts, sampled: mean reward",
    "eval/greedy": "held-out prompts, greedy: mean reward",
    "eval/pass@": "held-out prompts: pass@",
    "reward/mean": "training prompts, sampled: mean reward",
    "response/length": "training prompts: tokens of a response",
    "tokens/entropy": "training prompts: entropy, nats per token",
}


def write(folder: Path, run: RunConfig, about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Path | None:
    """Write the card of the model in a folder; None where a file of that name is there.

    Args:
        folder: with the weights.
        run: that trained it.
        about: versions and the command, as ``run.json`` has them.
        records: lines of ``metrics.jsonl``.
    """
    path = folder / NAME
    text = content(run, about, records)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{text}<!-- rlstab sha256 {_sum(text)} -->\n")
    except FileExistsError:
        return None
    return path


def is_untouched(path: Path) -> bool:
    """Whether a card is as :func:`write` wrote it."""
    try:
        body, _, last = path.read_text(encoding="utf-8").rpartition("<!-- ")
    except (OSError, ValueError):
        return False
    found = _MARK.fullmatch(f"<!-- {last}")
    return found is not None and found[1] == _sum(body)


def content(run: RunConfig, about: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """The card in Markdown, with the front matter that the hub reads."""
    model, adapter = run.model.name, run.model.adapter
    task = run.task.name if not isinstance(run.task, DatasetSettings) else run.task.path
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlstab", "reinforcement-learning", *(["lora"] if adapter else [])],
    }
    if _HUB_NAME.fullmatch(model) and not Path(model).exists():
        front["base_model"] = model
        front["base_model_relation"] = "adapter" if adapter else "finetune"
    if isinstance(run.task, DatasetSettings) and _HUB_NAME.fullmatch(task) and not Path(task).exists():
        front["datasets"] = [task]
    settings = short(run.model_dump(mode="json", exclude={"tracking"}))
    rollouts = max((int(one.get("rollout", 0)) for one in records), default=0)
    what = "A LoRA adapter for" if adapter else "Trained from"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n",
        f"# {Path(run.tracking.out).name}\n",
        f"{what} `{model}`, by reinforcement learning on the task `{task}` with "
        f"rlstab: {rollouts} rollout{'s' * (rollouts != 1)} of {run.rollout.prompts} x "
        f"{run.rollout.group} responses, with the seed {run.seed}. It was one run, and one run does not say how far "
        f"another seed would be off: the values below have no interval.\n",
        "## Objective\n",
        *_methods(run),
        "## Results\n",
        *_results(run, records),
        "## How it was made\n",
        f"    {_command(str(about.get('command', '')))}\n",
        _table(("", ""), [(name, str(about[name])) for name in _VERSIONS if name in about]),
        f"Run `{about.get('run_hash')}`, objective `{about.get('objective_hash')}`.\n",
        *(_code(about) if about.get("code") else ()),
        f"<details><summary>All settings</summary>\n\n```yaml\n{dump(settings)}```\n\n</details>\n",
    ]
    return "\n".join(parts) + "\n"


_VERSIONS = ("rlstab", "torch", "transformers", "accelerate", "python", "processes", "engine")


def _methods(run: RunConfig) -> list[str]:
    rows = []
    methods: list[Method[Any]] = [one.method for one in walk(run.composition)]
    for one in [*methods, *run.pipeline]:
        cls, only = (type(one.method), "Only observed. ") if isinstance(one, Observe) else (type(one), "")
        source = " ".join(docstring(cls).partition("Source:\n")[2].split())
        rows.append((f"`{one.label}`", f"{only}{summary(cls)}", source or "-"))
    return [_table(("method or stage", "what it does", "source"), rows)]


def _results(run: RunConfig, records: Sequence[Mapping[str, Any]]) -> list[str]:
    rows, known = [], {key for one in records for key in one}
    for name, words in _SHOWN.items():
        for key in sorted(one for one in known if one == name or (name[-1] == "@" and one.startswith(name))):
            having = [one for one in records if isinstance(one.get(key), int | float)]
            if having:
                first, last = having[0], having[-1]
                rows.append(
                    (
                        f"{words}{key.removeprefix(name)}",
                        f"{first[key]:.4g} (rollout {first['rollout']})",
                        f"{last[key]:.4g} (rollout {last['rollout']})",
                    )
                )
    if not rows:
        return ["None were kept.\n"]
    evaluated = f"Held-out values are of {run.evaluation.prompts} prompts x {run.evaluation.samples} responses.\n"
    return [_table(("", "first", "last"), rows), *([evaluated] if run.evaluation.every else [])]


def _code(about: Mapping[str, Any]) -> list[str]:
    named = ", ".join(f"`{name}` (sha256 {checksum}...)" for name, checksum in about["code"].items())
    return [f"It needs code that is not in this package: {named}.\n"]


def _command(text: str) -> str:
    first, _, rest = text.partition(" ")
    return f"{Path(first).name} {rest}".strip()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(one.replace('|', chr(92) + '|') for one in row)} |" for row in lines) + "\n"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
