"""What ``rlstab check`` says about memory."""

from __future__ import annotations

import math
import re
from itertools import islice
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from transformers import AutoTokenizer

from rlstab.config.runs import RunConfig
from rlstab.errors import ConfigError, RlstabError
from rlstab.tasks.build import build_task
from rlstab.train.footprint import BACKWARD, Engine, Footprint, footprint, shape_of
from rlstab.train.policy import load_part

#: So many of the first prompts are measured; a longer one may follow.
MEASURED = 64
#: As ``python -m benchmarks scale`` finds it.
LIBRARIES = "about 0.5 GiB on a CPU"
_UNITS = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def bytes_of(text: str) -> int:
    """The bytes that a size such as ``24GB``, ``24GiB`` or ``512M`` means.

    Raises:
        ConfigError: it is none.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(|M|G|T|Mi|Gi|Ti)B?\s*", text)
    if found is None or not math.isfinite(float(found[1])) or not float(found[1]):
        raise ConfigError(f"--memory {text}: expected a size such as 24GB, 80GiB or 512MB.")
    return int(float(found[1]) * _UNITS[found[2]])


def describe_memory(run: RunConfig, processes: int = 1, memory: int | None = None) -> RenderableType:
    """A table: what a run holds in each process, and what would fit; or one line that says why that is not known.

    Args:
        run: its settings.
        processes: that it will have.
        memory: bytes that each of them has, None where nothing is asked about that.
    """
    try:
        longest = longest_prompt(run)
        tokens = longest + run.rollout.max_new_tokens
        shape = shape_of(run, tokens)
    except (RlstabError, ImportError, AttributeError, TypeError, NotImplementedError) as error:
        return f"memory: not known: {escape(str(error).partition(chr(10))[0])}"
    engine: Engine = "ddp" if processes > 1 else "one process"
    if run.engine.name != "auto" and (run.engine.name == "fsdp2" or processes > 1):
        engine = run.engine.name
    second = "ref_logprobs" in run.composition.needs and (run.model.adapter is None or run.model.reference is not None)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    found = footprint(shape, run, engine, processes, reference=second, device=device)
    where = "GPU" if device == "cuda" else "CPU"
    table = Table(title_justify="left", title=f"memory of each process on a {where} ({engine}, {processes} in all)")
    table.add_column("when")
    table.add_column("what")
    table.add_column("size", justify="right")
    for when, parts in (("always", found.standing), *found.phases.items()):
        for what, size in parts.items():
            table.add_row(when, what, in_words(size))
            when = ""
    fullest = max(found.phases, key=found.held_in)
    table.add_row("[bold]at most[/]", f"in {fullest}", f"[bold]{in_words(found.peak)}[/]")
    whole = shape.whole
    trained = "" if whole.trained == whole.weights else f", {_short(whole.trained)} of them trained"
    lines = [
        f"{_short(whole.weights)} parameters{trained}, {found.per_parameter:.3g} bytes for each; "
        f"{in_words(found.per_response)} of activations for each response in a micro-batch, at {longest} tokens of "
        f"prompt and {run.rollout.max_new_tokens} of answer, {in_words(found.per_response // tokens)} for each token. "
        f"Not in it: Python, torch and other libraries ({LIBRARIES}), and what the allocator wastes."
    ]
    if memory is not None:
        lines.append(_fits(found, run, memory))
    return Group(table, *lines)


def in_words(size: int) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:.0f} {name}"
    return f"{size} B"


def _fits(found: Footprint, run: RunConfig, memory: int) -> str:
    size, wanted = found.micro_batch_size(memory), run.optimisation.micro_batch_size
    most = _short(found.parameters(memory))
    model = f"at one response at a time there is room for about {most} parameters, if activations stay as they are"
    if not size:
        cause = found.too_much(memory) or f"{BACKWARD} of one response"
        return f"{in_words(memory)}: too little for {cause}; {model}. Lower rollout.batch_size, or set engine: fsdp2."
    verdict = "fits" if memory >= found.peak else f"does not fit: set optimisation.micro_batch_size to at most {size}"
    return f"{in_words(memory)}: micro_batch_size {wanted} {verdict}. The largest that fits is {size}; {model}."


def _short(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def longest_prompt(run: RunConfig) -> int:
    """Tokens of the longest of the first training prompts."""
    tokenizer: Any = load_part("tokenizer", run.model.name, AutoTokenizer.from_pretrained)
    task = build_task(run.task)
    prompts = (task.example("train", index).prompt for index in range(task.size["train"] or MEASURED))
    longest = 0
    for prompt in islice(prompts, MEASURED):
        text = prompt if isinstance(prompt, str) else "\n".join(one.content for one in prompt)
        longest = max(longest, len(tokenizer(text)["input_ids"]))
    return longest
