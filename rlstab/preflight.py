"""What ``rlstab check`` tries of a run: everything local and cheap that ``rlstab train`` would refuse in seconds.

The data are opened, one answer is scored, the tokenizer and the configuration of the model are read. No weights are
loaded, nothing is asked of the network, and the trainer is not imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from rlstab.config.runs import RunConfig
from rlstab.config.settings import DatasetSettings
from rlstab.config.user_code import SHIPPED_MODELS
from rlstab.errors import ConfigError, DataError, ModelError
from rlstab.extras import how_to_install, missing, require
from rlstab.hub import first_line
from rlstab.signals import slow_bf16
from rlstab.tasks.blocks import require_blocks
from rlstab.tasks.build import build_task
from rlstab.tasks.rewards import build_rewards, require_functions, score
from rlstab.tasks.task import Example, Prompt, Split, Task, in_words

#: Characters of a prompt that are shown.
SHOWN = 300


def preflight(run: RunConfig) -> list[str]:
    """Try a run; the lines say what was seen, the last ones what was not checked.

    Raises:
        RlstabError: what training would raise.
    """
    lines: list[str] = []
    unchecked: list[str] = []
    for name in run.tracking.trackers:
        if find_spec(name) is None:
            raise ConfigError(f"tracking.trackers: {name} is not installed. Install it, or remove it here.")
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
    if scores.errors or scores.timed_out:
        told = f"cannot be scored, and would get 0: {' '.join(scores.errors) or 'it takes too long'}"
    sizes = [f"{'no end of' if size is None else size} prompts in `{split}`" for split, size in task.size.items()]
    return [
        f"task {task.name}: {', '.join(sizes)}; an empty answer {told}",
        f"first prompt: {example.prompt[:SHOWN]!r}",
    ]


def _require_model(run: RunConfig, task: Task | None) -> None:
    """Read what describes the model, and write the first prompts in its tokens.

    Raises:
        ConfigError, DataError, ModelError: the model, its tokenizer or its context do not fit the run.
    """
    from transformers import AutoConfig, AutoTokenizer

    name = run.model.name
    shipped = Path(__file__).parent / "data" / name
    source = shipped if name in SHIPPED_MODELS else Path(name).expanduser()
    if not source.is_dir():
        raise ModelError(f"model.name: there is no folder '{source}'. Give one, a name on the hub, or a shipped model.")
    try:
        config: Any = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # foreign files fail in every way
        raise ModelError(
            f"model.name: '{name}' cannot be loaded: {first_line(error)}. Give a folder that holds a transformers "
            f"model with safetensors weights and its tokenizer."
        ) from error
    if not any(source.glob("*.safetensors")):
        raise ModelError(f"model.name: '{name}' has no weights in safetensors. Convert them, or give another model.")
    chat = run.rollout.chat
    if chat and tokenizer.chat_template is None:
        raise ModelError(
            f"rollout.chat is true, and the tokenizer of '{name}' has no chat template. Take a model that was trained "
            f"on chats, or set it to false."
        )
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    examples = [] if task is None else [task.example(split, 0) for split in get_args(Split)]
    for example in examples:
        tokens = len(_tokens(tokenizer, example, chat))
        if context is not None and tokens + run.rollout.max_new_tokens > context:
            raise DataError(
                f"rollout.max_new_tokens: a prompt of {tokens} tokens and {run.rollout.max_new_tokens} new tokens "
                f"exceed the context of {context} of '{name}'. Lower it, shorten the prompts, or take another model."
            )


def _tokens(tokenizer: Any, example: Example, chat: bool) -> list[int]:
    prompt: Prompt = example.asked
    if example.messages and not chat:
        raise ConfigError("rollout.chat is false, and the prompts of the task are lists of messages. Set it to true.")
    try:
        if chat:
            turns = [{"role": turn.role, "content": turn.content} for turn in example.messages]
            turns = turns or [{"role": "user", "content": example.prompt}]
            return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
        tokens = list(tokenizer(example.prompt)["input_ids"])
    except Exception as error:  # tokenizers raise a bare Exception for text outside their vocabulary
        raise DataError(
            f"the tokenizer of '{tokenizer.name_or_path}' cannot encode the prompt {in_words(prompt)[:60]!r}: "
            f"{str(error).split('!')[0]}. Change the prompts, or take another model."
        ) from error
    if not tokens:
        raise DataError("the first prompt has no token. Give the task a prompt_template with text.")
    return tokens
