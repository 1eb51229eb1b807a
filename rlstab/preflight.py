"""What ``rlstab check`` tries of a run: everything local and cheap that ``rlstab train`` would refuse in seconds.

The data are opened, one answer is scored, the tokenizer and the configuration of the model are read. No weights are
loaded, the network is not used, and the trainer is not imported.
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.progress import track

from rlstab.config.runs import RunConfig
from rlstab.config.settings import OTHER_MODELS, DatasetSettings, ReasoningGymSettings, TaskSettings, TextSettings
from rlstab.config.user_code import SHIPPED_MODELS
from rlstab.console import Terminal
from rlstab.errors import ModelError
from rlstab.extras import how_to_install, missing, require, require_trackers
from rlstab.files import from_home
from rlstab.signals import slow_bf16
from rlstab.tasks.build import build_task
from rlstab.tasks.evidence import require_evidence
from rlstab.tasks.rewards import build_rewards, require_functions, score
from rlstab.tasks.scorers import as_mathematics
from rlstab.tasks.task import Example, Task

#: Characters of a prompt that are printed.
PROMPT_SHOWN = 300

#: Right answers that are scored, evenly from each split.
ANSWERS = 64


def preflight(run: RunConfig) -> list[str]:
    """Try a run; the lines are the findings, and the last ones say what was not checked.

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
        lines += _try_model(run, task)
        unchecked.append("the weights of the model")
    return [*lines, *(f"not checked: {subject}" for subject in unchecked)]


def _is_on_the_hub(name: str) -> bool:
    """Whether the name of a model or data set is neither a folder nor written as a path."""
    return not name.startswith((".", "/", "~")) and not Path(name).is_dir()


def _tried(run: RunConfig, task: Task) -> list[str]:
    """Findings about a task: its first prompt, and the score of an empty answer."""
    require_evidence(run, task)
    example = task.example("train", 0)
    rewards = build_rewards(run.reward, task, getattr(run.task, "environment", None) or ())
    scores = score(task, [example], [""], rewards=rewards, whole=[""])
    silent = never_right(run.task, task) if any(reward.workers is None for reward in rewards) else []
    for workers in [task.workers, *(reward.workers for reward in rewards)]:
        if workers is not None:
            workers.close()
    result = f"scores {scores.rewards.item():g}"
    if scores.errors or scores.timed_out.any():
        result = f"cannot be scored, and would get 0: {' '.join(scores.errors) or 'it takes too long'}"
    sizes = [f"{'unlimited' if size is None else size} prompts in `{split}`" for split, size in task.size.items()]
    return [
        f"task {task.name}: {', '.join(sizes)}; an empty answer {result}",
        f"first prompt: {example.prompt[:PROMPT_SHOWN]!r}",
        *silent,
    ]


def never_right(settings: TaskSettings, task: Task) -> list[str]:
    """A note on right answers to which the scorer of the task does not give 1, so that no completion can be right."""
    if not isinstance(settings, TextSettings | ReasoningGymSettings):
        return []
    examples = []
    for split, size in task.size.items():
        count = ANSWERS if size is None else size
        examples += [task.example(split, index * count // min(ANSWERS, count)) for index in range(min(ANSWERS, count))]
    pairs = [(example, text) for example in examples if (text := _right_completion(settings, example)) is not None]
    scores = score(task, [example for example, _ in pairs], [text for _, text in pairs])
    wrong = [(pair, reward) for pair, reward in zip(pairs, scores.rewards.tolist(), strict=True) if reward < 1]
    if not wrong:
        return [f"right answers: {len(pairs)} tried, all score 1"] if pairs else []
    (example, text), reward = wrong[0]
    error = f" ({scores.errors[0]})" if scores.errors else ""
    return [
        f"note: {len(wrong)} of {len(pairs)} right answers do not score 1, so the policy cannot be right there: "
        f"{example.where or example.prompt[:60]!r} has the answer {example.answer!r:.80}, and {text!r:.80} scores "
        f"{reward:g}{error}. Look at the answers, task.scorer and task.answer_pattern."
    ]


#: A pattern that matches one text: letters, and characters that are escaped where they would mean something else.
_PLAIN = re.compile(r"(?:\\\W|[^\\()\[\]{}?*+|.^$])*")


def _right_completion(settings: TextSettings | ReasoningGymSettings, example: Example) -> str | None:
    """The right answer as a completion may have it.

    None if the data set gives none, or the pattern is more than a text with white space around one group.
    """
    answer = example.answer if isinstance(settings, TextSettings) else example.answer.get("answer")
    if not isinstance(answer, str):
        return None
    if isinstance(settings, TextSettings) and settings.scorer == "math_verify":
        answer = as_mathematics(answer)
    pattern = settings.answer_pattern or "()"
    head, _, rest = pattern.removeprefix("^").removesuffix("$").partition("(")
    around = [re.sub(r"\\s[*+]?", " ", text) for text in (head, rest.rpartition(")")[2])]
    if pattern.count("(") > 1 or not all(map(_PLAIN.fullmatch, around)):
        return None
    return answer.join(re.sub(r"\\(\W)", r"\1", text) for text in around)


# -- the model ---------------------------------------------------------------------------------------------------------


def _try_model(run: RunConfig, task: Task | None) -> list[str]:
    """Read the configuration of the model, and encode the prompts as training would.

    Raises:
        ConfigError, DataError, ModelError: the model, its tokenizer or its context does not fit the run.
    """
    from transformers import AutoConfig, AutoTokenizer

    from rlstab.models.loading import load_part, require_pad_token
    from rlstab.models.policy import Policy, require_prompts

    name = run.model.name
    tokenizer = load_part("tokenizer", name, AutoTokenizer.from_pretrained)
    described: Any = SimpleNamespace(config=load_part("configuration", name, AutoConfig.from_pretrained))
    _require_safetensors("model.name", name)
    require_pad_token(tokenizer, described.config, name)
    for signal, key in OTHER_MODELS.items():
        other = getattr(run.model, key)
        if signal in run.composition.needs and other is not None and not _is_on_the_hub(other):
            load_part("configuration", other, AutoConfig.from_pretrained)
            _require_safetensors(f"model.{key}", other)
    if task is None:
        return []
    policy = Policy(described, tokenizer, 0, frozenset(), "fp32")
    terminal = Terminal(stderr=True)
    watch = partial(track, console=terminal, transient=True, disable=not terminal.is_terminal)
    notes = [f"note: {text}" for text in require_prompts(policy, task, run.rollout, watch)[0]]
    example = task.example("train", 0)
    last = tokenizer.decode(policy.tokens(example, run.rollout)[-1:])
    if not run.rollout.chat and last in tokenizer.all_special_tokens and not example.prompt.endswith(last):
        notes.append(
            f"note: the tokenizer ends each prompt with {last!r}, so responses begin after an end. Switch that off "
            f"in its tokenizer_config.json, for example by add_eos_token: false."
        )
    return notes


def _require_safetensors(setting: str, name: str) -> None:
    if not any(SHIPPED_MODELS.get(name, from_home(name)).glob("*.safetensors")):
        raise ModelError(f"{setting}: '{name}' has no weights in safetensors. Convert them, or give another model.")
