"""What ``rlstab check`` tries of a run: everything local and cheap that ``rlstab train`` would refuse in seconds.

The data are opened, one answer is scored, the tokenizer and the configuration of the model are read. No weights are
loaded, nothing is asked of the network, and the trainer is not imported.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlstab.config.runs import RunConfig
from rlstab.config.settings import DatasetSettings
from rlstab.config.user_code import SHIPPED_MODELS
from rlstab.errors import ModelError
from rlstab.extras import how_to_install, missing, require, require_trackers
from rlstab.signals import slow_bf16
from rlstab.tasks.blocks import require_blocks
from rlstab.tasks.build import build_task
from rlstab.tasks.rewards import build_rewards, require_functions, score
from rlstab.tasks.task import Task

#: Characters of a prompt that are shown.
SHOWN = 300


def preflight(run: RunConfig) -> list[str]:
    """Try a run; the lines say what was seen, the last ones what was not checked.

    Raises:
        RlstabError: what training would raise.
    """
    lines: list[str] = []
    unchecked: list[str] = []
    require_trackers(run.tracking.trackers)
    if run.model.adapter is not None:
        require("lora", "model.adapter")
    if run.optimisation.precision == "bf16" and slow_bf16():
        lines.append("optimisation.precision: bf16 is slower than fp32 on this CPU: it has neither AVX512_BF16 nor AMX")
    task = None
    if isinstance(run.task, DatasetSettings) and _is_on_the_hub(run.task.path):
        require("datasets", "The task dataset")
        require_functions(run.reward)
        unchecked.append(f"the data set '{run.task.path}', which is on the hub, and the rewards on it")
    else:
        task = build_task(run.task)
        lines += _tried(run, task)
    if missing("train", "transformers"):
        unchecked.append(f"the model: transformers is not installed. {how_to_install('train')}")
    elif run.model.name not in SHIPPED_MODELS and _is_on_the_hub(run.model.name):
        unchecked.append(f"the model '{run.model.name}', which is on the hub")
    else:
        _require_model(run, task)
        unchecked.append("the weights of the model")
    return [*lines, *(f"not checked: {what}" for what in unchecked)]


def _is_on_the_hub(name: str) -> bool:
    """Whether a name of a model or data set is not that of a folder; a path that is not there is no name either."""
    return not name.startswith((".", "/", "~")) and not Path(name).is_dir()


def _tried(run: RunConfig, task: Task) -> list[str]:
    """What is seen of a task: its first prompt and how an empty answer to it scores."""
    if any(name.startswith("block_") for name in run.composition.needs | run.pipeline.needs):
        require_blocks(task, "a method or stage")
    example = task.example("train", 0)
    rewards = build_rewards(run.reward, task)
    scores = score(task, [example], [""], rewards=rewards)
    for workers in [task.workers, *(reward.workers for reward in rewards)]:
        if workers is not None:
            workers.close()
    told = f"scores {scores.rewards.item():g}"
    if scores.errors or scores.timed_out.any():
        told = f"cannot be scored, and would get 0: {' '.join(scores.errors) or 'it takes too long'}"
    sizes = [f"{'no end of' if size is None else size} prompts in `{split}`" for split, size in task.size.items()]
    return [
        f"task {task.name}: {', '.join(sizes)}; an empty answer {told}",
        f"first prompt: {example.prompt[:SHOWN]!r}",
    ]


def _require_model(run: RunConfig, task: Task | None) -> None:
    """Read what describes the model, and write the first prompts in its tokens, as training would.

    Raises:
        ConfigError, DataError, ModelError: the model, its tokenizer or its context do not fit the run.
    """
    from transformers import AutoConfig, AutoTokenizer

    from rlstab.models.loading import SHIPPED, load_part
    from rlstab.models.policy import Policy, require_prompts

    name = run.model.name
    tokenizer = load_part("tokenizer", name, AutoTokenizer.from_pretrained)
    described: Any = SimpleNamespace(config=load_part("configuration", name, AutoConfig.from_pretrained))
    if not any(SHIPPED.get(name, Path(name).expanduser()).glob("*.safetensors")):
        raise ModelError(f"model.name: '{name}' has no weights in safetensors. Convert them, or give another model.")
    if task is not None:
        require_prompts(Policy(described, tokenizer, 0, frozenset(), "fp32"), task, run.rollout)
