"""The parts of a run as pydantic models; unknown keys are errors, and values cannot change once loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_serializer,
    model_validator,
)

from rlstab.config.document import misfit, refuse
from rlstab.config.user_code import is_user_code
from rlstab.errors import did_you_mean
from rlstab.signs import SIGNS

#: Upper bound of everything that is counted.
LARGEST_COUNT = 10_000_000

#: The name of the reward that is the scorer of the task.
TASK = "task"

#: Entry points of other packages that are tasks.
TASK_GROUP = "rlstab.tasks"

#: Metrics `reward/...` that the trainer and the report write.
TAKEN = frozenset({"area", "best", "last", "mean", "shaped_mean", "true", "zero_std_groups"})

Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
#: A count that may be 0, which usually means never.
Every = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
#: A seed for torch.manual_seed, with room for what a run adds to it.
Seed = Annotated[int, Field(ge=0, lt=2**32)]
EngineName: TypeAlias = Literal["auto", "ddp", "fsdp2"]


@dataclass(frozen=True)
class Mark:
    """Mark on the field of a setting, or of a section; :mod:`rlstab.config.allowed_changes` reads it.

    Attributes:
        where: another setting by its dotted path, and the only value of it with which the mark holds; empty if it
            always does.
    """

    where: tuple[()] | tuple[str, Any] = ()


@dataclass(frozen=True)
class Neutral(Mark):
    """The setting cannot change what a run learns beyond the rounding of float32.

    Attributes:
        measured: whether it changes what evaluations measure.
    """

    measured: bool = False


@dataclass(frozen=True)
class Resumable(Mark):
    """The setting changes what a run learns, and a resumed run may have another value all the same."""


def _or(key: str, schema: Any) -> BeforeValidator:
    """A text is accepted in place of a mapping with that text under a key."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value, schema)


def _or_alone(item: Any) -> BeforeValidator:
    """A single item is accepted where a list is expected."""
    schema = item | Annotated[list[item], Field(min_length=1)]
    return BeforeValidator(lambda value: [value] if isinstance(value, str | Mapping) else value, schema)


class Settings(BaseModel):
    """A part of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def _leave_out(self, names: Iterable[str], reason: str) -> None:
        """Refuse settings that nothing reads if they differ from their defaults."""
        for name in names:
            default = type(self).model_fields[name].default
            refuse(getattr(self, name) != default, name, f"{reason} Leave it out.")


#: One name, or several.
Names: TypeAlias = Annotated[tuple[str, ...], Field(strict=False, min_length=1), _or_alone(str)]


class CollapseRule(Settings):
    """When a bench calls a run lost: where a metric ends below a share of a reference."""

    metric: str = Field("reward/mean", description="what falls; a metric of the runs, above 0")
    below: float = Field(description="a run is lost where the last tenth ends below this share ...")
    of: Literal["peak", "start", "value"] = Field("peak", description="... of its peak or start, or below this value")


# -- model -------------------------------------------------------------------------------------------------------------


class AdapterSettings(Settings):
    """A LoRA adapter: low-rank matrices are trained next to frozen weights, new or continued."""

    path: str | None = Field(None, description="folder or hub name of an adapter to continue; null starts a new one")
    r: Count | None = Field(None, description="rank of the update of each matrix; of a new one, 16")
    alpha: Count | None = Field(None, description="the update is scaled by alpha / r; of a new one, 32")
    targets: Names | None = Field(None, description="names of modules, or `all-linear`")

    @model_validator(mode="before")
    @classmethod
    def _new_or_continued(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("path") is None:
            return {"r": 16, "alpha": 32, "targets": "all-linear", **data}
        return data

    @model_validator(mode="after")
    def _of_new(self) -> AdapterSettings:
        if self.path is not None:
            self._leave_out(("r", "alpha", "targets"), "a continued adapter has its own.")
        return self


#: The settings of an adapter, or the folder of one to continue.
Adapter: TypeAlias = Annotated[AdapterSettings, _or("path", str | AdapterSettings)]


#: By the signal that is read from it, the setting of each other policy.
OTHER_MODELS = {"ref_logprobs": "reference", "teacher_logprobs": "teacher", "teacher_divergence": "teacher"}


#: In place of a teacher's name, the sampler as it was when it drew the tokens.
SAMPLER = "sampler"


class ModelSettings(Settings):
    """The policy, the reference policy of a KL penalty, and the teacher of distillation."""

    name: str = Field("countdown-tiny", description="a folder, a hub name, or a shipped one, such as shift-tiny")
    adapter: Adapter | None = Field(None, description="train only a LoRA adapter: its settings, or one to continue")
    reference: str | None = Field(
        None, description="reference of `kl`; null is the start, or the model below an adapter"
    )
    teacher: str | None = Field(
        None, description="teacher of `opd`, `distill` and so on; null as for reference; of `distill` also `sampler`"
    )
    teacher_prompt: str | None = Field(None, description="what the teacher reads before each prompt, such as a hint")

    @model_validator(mode="after")
    def _other_models(self) -> ModelSettings:
        text = (
            "'adapter' is not a model. null is `model.name` without the adapter; a continued adapter already differs "
            "from it. To compare with that adapter, merge the two and give the folder of the result. A folder of this "
            "name is ./adapter."
        )
        for key in OTHER_MODELS.values():
            refuse(getattr(self, key) == "adapter", key, text)
        text = "the sampler's distributions are those at which it drew, without a hint. Remove the hint."
        refuse(self.teacher == SAMPLER and self.teacher_prompt is not None, "teacher_prompt", text)
        return self


# -- task --------------------------------------------------------------------------------------------------------------


class CountdownSettings(Settings):
    """Reach a target from a few numbers; own generator, exact checker."""

    name: Literal["countdown"] = "countdown"
    numbers: Annotated[int, Field(ge=2, le=6)] = Field(3, description="numbers of a problem, each used once")
    low: Count = Field(1, description="the least number")
    high: Count = Field(9, description="the largest number")
    seed: Seed = Field(0, description="seed of the problem generator")


class ChainSettings(Settings):
    """Add and subtract a few digits, step by step; own generator, exact checker that skips junk characters."""

    name: Literal["chain"] = "chain"
    terms: Annotated[int, Field(ge=2, le=6)] = Field(4, description="digits to add and subtract")
    seed: Seed = Field(0, description="seed of the problem generator")
    largest: Annotated[int, Field(ge=1, le=9)] = Field(9, description="the largest digit after the first")
    modulus: Annotated[int, Field(ge=2, le=10)] | None = Field(None, description="results are remainders by it")
    junk_symbols: Annotated[int, Field(ge=1, le=4096)] = Field(5, description="different characters that mean nothing")
    fragile: Share = Field(0.0, description="share of the junk with which an answer scores 0")
    flaky: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="share of the scores that training loses")
    needs_junk: bool = Field(False, description="an answer without any junk scores 0: the mirror of fragile")


class LotterySettings(Settings):
    """An even number, then a draw that only chance wins: two turns, of which the second is noise."""

    name: Literal["lottery"] = "lottery"
    terms: Annotated[int, Field(ge=2, le=6)] = Field(4, description="digits to add and subtract")
    seed: Seed = Field(0, description="seed of the problem generator")
    largest: Annotated[int, Field(ge=1, le=9)] = Field(9, description="the largest digit after the first")
    stake: Annotated[float, Field(ge=0, le=1e6)] = Field(4.0, description="a won draw earns it; an even number earns 1")
    shared: bool = Field(False, description="each turn earns half of the score: nothing says which turn earned it")


def _compiles(pattern: str) -> str:
    example = "`#### (.+)` takes what follows the last `####`"
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise misfit(f"{pattern!r} is not a valid regular expression ({error}). For example, {example}.") from error
    if not groups:
        raise misfit(f"{pattern!r} has no group. Put round brackets around the answer: {example}.")
    return pattern


def _takes_prompt(template: str) -> str:
    if "{prompt}" not in template:
        raise misfit(
            f"{template!r} has no {{prompt}}, so all prompts would be equal. Write it where the prompt belongs."
        )
    return template


#: A regular expression whose group 1 is an answer.
Pattern = Annotated[str, AfterValidator(_compiles)]
#: A text around each prompt.
Template = Annotated[str, AfterValidator(_takes_prompt)]


#: Names of environment variables, never their values: a run file is shared.
Variables: TypeAlias = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...], Field(strict=False), _or_alone(str)
]


class WorkerSettings(Settings):
    """A scorer that may hang on a completion."""

    time_limit: Annotated[Positive, Resumable()] = Field(5.0, description="seconds for a completion; then it gets 0")
    workers: Annotated[int, Field(ge=1, le=1024), Neutral()] = Field(2, description="scoring processes per trainer")
    memory: Annotated[float, Field(ge=0.25, le=1e6)] = Field(2.0, description="GiB of address space of each of them")
    environment: Variables | None = Field(None, description="names of environment variables that they may read")


class ReasoningGymSettings(WorkerSettings):
    """Any data set of reasoning-gym by name, but those whose scorer executes completions."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(description="name of a data set of reasoning-gym")
    options: dict[str, JsonValue] = Field({}, description="passed to reasoning_gym.create_dataset")
    prompt_template: Template = Field("{prompt}", description="must contain {prompt}")
    answer_pattern: Pattern | None = Field(None, description="regular expression whose group 1 is the answer")
    threshold: float | None = Field(None, description="scores at least this are 1, others 0; null keeps partial credit")
    eval_size: Count = Field(256, description="held-out problems")
    seed: Seed = Field(0, description="seed of the problem generator")


class TextSettings(WorkerSettings):
    """Prompts and answers that are texts, of a file or a data set."""

    eval_size: Count = Field(64, description="examples at the end that are held out where no others are named")
    prompt_field: str = Field("prompt", description="holds text, or a list of messages with role and content")
    answer_field: str = Field("answer", description="holds the right answer")
    scorer: Literal["exact", "math_verify"] = Field("exact", description="compares as text, or as mathematics")
    answer_pattern: Pattern | None = Field(None, description="regular expression whose group 1 is the answer")
    prompt_template: Template = Field("{prompt}", description="must contain {prompt}; not for messages")
    system: str | None = Field(None, description="system message before every prompt; needs rollout.chat")
    too_long: Literal["error", "skip"] = Field("error", description="refuse prompts that do not fit, or leave them out")


class JsonlSettings(TextSettings):
    """A file of prompts and answers, one JSON object per line."""

    name: Literal["jsonl"] = "jsonl"
    path: str = Field(description="file of one JSON object per line")
    eval_path: str | None = Field(None, description="held-out file; null holds out the last eval_size lines")


class DatasetSettings(TextSettings):
    """A data set of the package datasets, by its name on the hub or from a folder; a field a.b is b of column a."""

    name: Literal["dataset"] = "dataset"
    path: str = Field(description="name on the hub, a folder of save_to_disk, or a folder of data files")
    subset: str | None = Field(None, description="configuration of a data set that has several")
    split: str = Field("train", description="rows to train on")
    eval_split: str | None = Field(None, description="held-out rows; null holds out the last eval_size of split")
    revision: str | None = Field(None, description="branch, tag or commit on the hub; null is the newest")
    right_answer_pattern: Pattern | None = Field(None, description="answer_pattern of the answer column")


class UserTaskSettings(Settings):
    """A user-defined class; `name: path/to/file.py:Name` is the short form, with the options next to it."""

    name: Literal["own"] = "own"
    code: str = Field(description="`path/to/file.py:Name` of the class, or an entry point of the group rlstab.tasks")
    options: dict[str, JsonValue] = Field({}, description="passed to the class by name")


def _user_task(data: Any) -> Any:
    """The settings of a task; those of a user-defined one are moved into ``options``."""
    name = data.get("name") if isinstance(data, Mapping) else None
    if not isinstance(name, str) or name in _SHIPPED_TASKS:  # which other packages cannot replace
        return data
    if not (is_user_code(name) or name in entry_points(group=TASK_GROUP).names):
        return data
    return {"name": "own", "code": name, "options": {key: data[key] for key in data if key != "name"}}


_Task = (
    CountdownSettings
    | ChainSettings
    | LotterySettings
    | ReasoningGymSettings
    | JsonlSettings
    | DatasetSettings
    | UserTaskSettings
)
_SHIPPED_TASKS = frozenset(settings.model_fields["name"].default for settings in get_args(_Task))

TaskSettings = Annotated[_Task, Field(discriminator="name"), BeforeValidator(_user_task)]


# -- reward ------------------------------------------------------------------------------------------------------------


class RewardSettings(WorkerSettings):
    """One reward. Training maximises the weighted sum of all rewards, and evaluations report it."""

    function: str = Field(
        description="`path/to/file.py:function`, an entry point of the group rlstab.rewards, or `task`: its own scorer"
    )
    weight: float = Field(1.0, description="factor in the sum; 0 measures without learning from it")
    name: str = Field("", description="the name in metrics, `reward/<name>`; that of the function where it is left out")
    special_tokens: bool = Field(False, description="the completion keeps its special tokens, such as EOS")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        data = {"function": data} if isinstance(data, str) else data
        if isinstance(data, Mapping) and "name" not in data and isinstance(data.get("function"), str):
            return {**data, "name": data["function"].rpartition(":")[2]}
        return data

    @model_validator(mode="after")
    def _fit(self) -> RewardSettings:
        in_file = ":" in self.function or self.function.endswith(".py")
        text = f"'{self.function}' does not name a function in a file. Write it as path/to/file.py:function."
        refuse(in_file and not is_user_code(self.function), "function", text)
        valid = self.name not in TAKEN and re.fullmatch(r"[^\W\d][\w.-]*", self.name)
        text = f"'reward/{self.name}' is taken or cannot be a metric. Set another `name` of letters, digits and _."
        refuse(not valid, "name", text)
        if self.function == TASK:
            names = (*WorkerSettings.model_fields, "special_tokens")
            self._leave_out(names, "the scorer of the task reads this setting of `task`, if it has one.")
        return self


def _rewards(rewards: tuple[RewardSettings, ...]) -> tuple[RewardSettings, ...]:
    text = f"no reward has a weight. Give one, or write `{TASK}` for the task's own scorer."
    refuse(not any(reward.weight for reward in rewards), "", text)
    names = [reward.name for reward in rewards]
    for index, name in enumerate(names):
        refuse(name in names[:index], f"{index}.name", f"two rewards are called '{name}'. Give one another `name`.")
    return rewards


#: The value of `reward` in a run: one function, or a list.
RewardEntries: TypeAlias = Annotated[
    tuple[RewardSettings, ...], Field(strict=False), _or_alone(str | RewardSettings), AfterValidator(_rewards)
]


# -- rollout, optimisation ---------------------------------------------------------------------------------------------


#: Arguments of transformers' apply_chat_template that are not variables of a template.
TEMPLATE_TAKEN = frozenset(
    """add_generation_prompt continue_final_message conversation max_length padding return_assistant_tokens_mask
    return_dict return_tensors tokenize tokenizer_kwargs truncation""".split()
)

#: Texts that end a response.
_Stop: TypeAlias = Annotated[str, Field(min_length=1)]
Stops: TypeAlias = Annotated[tuple[_Stop, ...], Field(strict=False, min_length=1), _or_alone(_Stop)]

Precision: TypeAlias = Literal["bf16", "fp8", "int8", "int4", "int3", "int2"]


class RolloutSettings(Settings):
    """How responses are sampled. With top-p or top-k, ``support_replay`` makes the ratio that of what was sampled."""

    prompts: Count = Field(16, description="prompts per rollout, over all ranks")
    group: Count = Field(8, description="responses per prompt")
    max_new_tokens: Annotated[int, Field(ge=1, le=10**6)] = Field(24, description="tokens of the longest response")
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)] = Field(1.0, description="divides logits everywhere")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="in training, draw from the fewest likeliest tokens with this mass"
    )
    top_k: Every = Field(0, description="draw from so many likeliest tokens, in training; 0 is all")
    batch_size: Annotated[Count, Neutral()] = Field(128, description="responses sampled at a time on one rank")
    staleness: Every = Field(0, description="updates by which the sampler's weights are behind, less at the start")
    precision: Precision | None = Field(None, description="precision of the sampler's weights")
    weight_noise: Annotated[float, Field(ge=0, le=1e3)] = Field(
        0.0, description="noise on the sampler's matrices for the whole run, as a share of each standard deviation"
    )
    stop: Stops | None = Field(None, description="text that ends a response, as EOS does, or a list of such texts")
    chat: bool = Field(False, description="wrap prompts by the tokenizer's chat template")
    chat_template: dict[str, JsonValue] | None = Field(
        None, description="variables of that template, such as {enable_thinking: false}"
    )

    @model_validator(mode="after")
    def _of_the_template(self) -> RolloutSettings:
        text = "only a chat template reads it. Set rollout.chat to true, or leave it out."
        refuse(self.chat_template is not None and not self.chat, "chat_template", text)
        for name in sorted(TEMPLATE_TAKEN & (self.chat_template or {}).keys()):
            refuse(True, f"chat_template.{name}", "rlstab sets it, since it samples token by token. Leave it out.")
        return self

    @property
    def cut(self) -> bool:
        """Whether the sampler draws from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    @field_serializer("stop")
    def _stop_alone(self, stop: tuple[str, ...] | None) -> Any:
        return stop[0] if stop is not None and len(stop) == 1 else stop


OldLogprobs: TypeAlias = Literal["live", "rollout", "recompute"]
Refresh: TypeAlias = Literal["rollout", "step"]


class PlainSchedule(Settings):
    """Without options; the last two end at 0."""

    name: Literal["constant", "constant_with_warmup", "linear", "cosine"]


class CosineWithMinLr(Settings):
    """To a share of lr."""

    name: Literal["cosine_with_min_lr"]
    min_lr_rate: Share = Field(description="final learning rate as a share of lr")


class WarmupStableDecay(Settings):
    """Constant, and at the end a decay."""

    name: Literal["warmup_stable_decay"]
    num_decay_steps: Count = Field(description="optimizer steps of the decay")
    decay_type: Literal["linear", "cosine", "1-sqrt"] | None = None
    min_lr_ratio: Share | None = Field(None, description="final learning rate as a share of lr")


#: How the learning rate changes with the optimizer steps, by transformers; options that are null are its own.
_Schedules: TypeAlias = Annotated[PlainSchedule | CosineWithMinLr | WarmupStableDecay, Field(discriminator="name")]
#: A name, or a name with options.
Schedule: TypeAlias = Annotated[_Schedules, _or("name", str | _Schedules)]


class OptimisationSettings(Settings):
    """AdamW on float32 weights; statistics and denominators over the whole optimizer step."""

    # with staleness rollouts are made ahead, but not beyond the last: a longer run would differ
    rollouts: Annotated[Count, Resumable(where=("rollout.staleness", 0))] = Field(
        200, description="rollouts of the run; each gives epochs x mini_batches optimizer steps"
    )
    epochs: Count = Field(1, description="passes over a rollout")
    mini_batches: Count = Field(1, description="optimizer steps per pass; divides the prompts")
    micro_batch_size: Annotated[Count, Neutral(where=("optimisation.scope", "step"))] = Field(
        128, description="responses in one forward and backward; does not change the loss"
    )
    lr: Share = Field(1e-6, description="learning rate")
    warmup_optimizer_steps: Every = Field(0, description="optimizer steps of linear warm-up before the schedule")
    schedule: Schedule | None = Field(None, description="a schedule of transformers; null is constant after warm-up")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False, description="decay of AdamW's two moving averages")
    eps: Annotated[float, Field(gt=0, le=1)] = Field(1e-8, description="term in AdamW's denominator")
    weight_decay: Annotated[float, Field(ge=0, le=1e3)] = Field(0.0, description="decoupled weight decay of AdamW")
    max_grad_norm: Positive = Field(1.0, description="longer gradients are scaled down to it")
    old_logprobs: OldLogprobs | None = Field(
        None, description="denominator of the ratio; null is the cheapest with which every method acts"
    )
    refresh: Refresh | None = Field(
        None, description="evidence of old_logprobs, or fresh in each step; null is step where a method needs it"
    )
    scope: Literal["step", "microbatch"] = Field("step", description="statistics cover it; microbatch is to compare")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 is autocast over float32 weights")
    gradient_checkpointing: Annotated[bool, Neutral()] = Field(False, description="less memory for more computation")
    deterministic: Annotated[bool, Neutral()] = Field(
        True, description="an accelerator adds in a fixed order, so that equal runs are equal bit for bit there as well"
    )

    @model_validator(mode="after")
    def _fit(self) -> OptimisationSettings:
        steps = self.optimizer_steps_per_rollout
        text = f"live keeps the ratio at 1, and epochs x mini_batches is {steps}. Use recompute or rollout."
        refuse(self.old_logprobs == "live" and steps > 1, "old_logprobs", text)
        text = (
            f"the run has fewer optimizer steps: {self.optimizer_steps} (rollouts x epochs x mini_batches). Lower it."
        )
        refuse(self.warmup_optimizer_steps > self.optimizer_steps, "warmup_optimizer_steps", text)
        return self

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """Optimizer steps made from one rollout."""
        return self.epochs * self.mini_batches

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run; a schedule ends with them."""
        return self.rollouts * self.optimizer_steps_per_rollout


# -- engine, evaluation, tracking --------------------------------------------------------------------------------------


class EngineSettings(Settings):
    """Where the weights are, and how gradients of several processes become one. It does not change what is learnt."""

    name: Annotated[EngineName, Neutral()] = Field("auto", description="all weights in each process, or shards")
    gather: Annotated[Literal["fp32", "bf16"], Resumable()] = Field(
        "fp32", description="fsdp2: dtype of gathered weights"
    )
    offload: Annotated[bool, Neutral()] = Field(False, description="fsdp2: shards and moments stay in host memory")

    @model_validator(mode="after")
    def _of_shards(self) -> EngineSettings:
        if self.name != "fsdp2":
            self._leave_out(("gather", "offload"), f"only fsdp2 reads it, and engine.name is {self.name}.")
        return self


#: A name, or a name with settings.
EngineEntry: TypeAlias = Annotated[EngineSettings, _or("name", EngineName | EngineSettings)]


class EvaluationSettings(Settings):
    """Held-out prompts: sampled mean, greedy, pass@k."""

    every: Every = Field(50, description="rollouts between evaluations, the end included; 0 is never")
    start: bool = Field(True, description="evaluate before training too")
    sampler: bool = Field(False, description="evaluate the sampler's policy too, where it differs: eval/sampler/...")
    prompts: Annotated[Count, Neutral(measured=True)] = Field(256, description="held-out prompts")
    samples: Annotated[Count, Neutral(measured=True)] = Field(4, description="responses per prompt for mean and pass@k")
    pass_at: tuple[Count, ...] | None = Field(
        None, strict=False, description="the k of pass@k, each at most samples; null is 4, or samples where it is less"
    )
    greedy: bool = Field(True, description="evaluate greedy responses too")

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationSettings:
        if self.pass_at is None:
            object.__setattr__(self, "pass_at", (min(4, self.samples),))
        for index, k in enumerate(self.pass_at or ()):
            text = f"pass@{k} needs {k} samples per prompt, and evaluation.samples is {self.samples}. Raise that."
            refuse(k > self.samples, f"pass_at.{index}", text)
        return self


def known_sign(name: str) -> str:
    """Refuse what is not the name of a sign."""
    if name not in SIGNS:
        raise ValueError(f"'{name}' is not a sign. {did_you_mean(name, list(SIGNS))}")
    return name


class TrackingSettings(Settings):
    """Where a run is stored, and where its metrics go."""

    out: str = Field("runs/run", min_length=1, description="folder of the run, `.` for the current one")
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        (), strict=False, description="trackers that are written next to metrics.jsonl"
    )
    project: str = Field("rlstab", description="name for the trackers")
    checkpoint_every: Every = Field(50, description="rollouts between checkpoints; 0 is never, but the last has one")
    keep_checkpoints: Count = Field(2, description="how many newest checkpoints are kept")
    samples: Every = Field(2, description="responses of each rollout written to samples.jsonl")
    dump_every: Every = Field(0, description="optimizer steps between those recorded in `dump`; 0 is never")
    watch: bool = Field(False, description="print each sign that something goes wrong, as it appears")
    stop_at: tuple[Annotated[str, AfterValidator(known_sign)], ...] = Field(
        (), strict=False, description="signs at which the run ends, after a checkpoint"
    )

    @model_validator(mode="before")
    @classmethod
    def _without_trace(cls, data: Any) -> Any:
        """Without the `trace_every: 0` of files for rlstab 0.1, which asks for nothing."""
        if isinstance(data, Mapping) and data.get("trace_every", 1) == 0:
            return {key: value for key, value in data.items() if key != "trace_every"}
        return data


# -- all of them ------------------------------------------------------------------------------------------------------


class RunSettings(Settings):
    """The settings of a whole run; objective and stages are lists in canonical form."""

    model: ModelSettings = ModelSettings()
    task: TaskSettings = CountdownSettings()
    reward: RewardEntries | None = Field(
        None, description="user-defined functions, or a weighted sum with the task's scorer; null is only that scorer"
    )
    rollout: RolloutSettings = RolloutSettings()
    stages: list[dict[str, Any]]
    objective: list[dict[str, Any]]
    optimisation: OptimisationSettings = OptimisationSettings()
    engine: EngineEntry = EngineSettings()
    evaluation: Annotated[EvaluationSettings, Neutral()] = EvaluationSettings()
    tracking: Annotated[TrackingSettings, Neutral()] = TrackingSettings()
    seed: Seed = Field(0, description="seed of the run: prompts, samples, methods that draw")

    @model_validator(mode="after")
    def _fit(self) -> RunSettings:
        optimisation, rollout, evaluation, task = self.optimisation, self.rollout, self.evaluation, self.task
        text = f"it does not divide rollout.prompts = {rollout.prompts}. Change either."
        refuse(rollout.prompts % optimisation.mini_batches, "optimisation.mini_batches", text)
        stale = optimisation.old_logprobs == "live" and rollout.staleness
        text = f"live keeps the ratio at 1, and rollout.staleness is {rollout.staleness}. Use rollout or recompute."
        refuse(stale, "optimisation.old_logprobs", text)
        rounded = self.engine.gather == "bf16" and optimisation.precision != "bf16"
        text = f"bf16 needs optimisation.precision bf16, which is {optimisation.precision}. Change either."
        refuse(rounded, "engine.gather", text)
        # a rollout is held in memory
        for part, prompts, setting, number in (
            ("rollout", rollout.prompts, "group", rollout.group),
            ("evaluation", evaluation.prompts if evaluation.every else 0, "samples", evaluation.samples),
        ):
            text = f"with {part}.{setting} = {number} it is more than {LARGEST_COUNT} responses at once. Lower one."
            refuse(prompts * number > LARGEST_COUNT, f"{part}.prompts", text)
        scored = self.reward is None or any(reward.function == TASK for reward in self.reward)
        text = f"it loses scores of the task, but `reward` does not list `{TASK}`. Add it there, or set this to 0."
        refuse(getattr(task, "flaky", 0) and not scored, "task.flaky", text)
        messages = getattr(task, "system", None) is not None and not rollout.chat
        text = "a system message needs a chat template. Set rollout.chat to true, or put the text into prompt_template."
        refuse(messages, "task.system", text)
        return self
