"""A run in YAML: model, task, reward, rollout, stages, objective, optimisation, engine, evaluation, tracking."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from rlstab.config.document import Document, Place, dump
from rlstab.config.drift import OldLogprobs, Refresh, old_logprobs_for, refresh_for
from rlstab.config.objectives import build_objective, digest, dump_objective, presets_of
from rlstab.config.own_code import files, is_own, located, short
from rlstab.config.reward_settings import TASK, Rewards
from rlstab.config.schedule_settings import Schedule
from rlstab.config.stages import build_stages, dump_stages
from rlstab.core.compose import Composition, walk
from rlstab.core.objective import active_methods
from rlstab.stages.pipeline import Pipeline

#: Responses of one rollout, or of one evaluation. Their texts, ids and rewards are lists and tensors in memory.
MOST_RESPONSES = 10_000_000

#: What samplers of others cut or change the distribution by.
CUTS = ("top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty")

#: In peft, all linear layers but the vocabulary head.
ALL_LINEAR = "all-linear"

Positive = Annotated[int, Field(ge=1)]
#: What torch.manual_seed takes, with room for what a run adds to it.
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Settings(BaseModel):
    """A part of a run: unknown keys are errors, values do not change once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class AdapterSettings(Settings):
    """A LoRA adapter: low-rank matrices are trained beside frozen weights. New, or one that is continued."""

    path: str | None = Field(None, description="folder or hub name of an adapter to continue; null starts a new one")
    r: Positive | None = Field(None, description="rank of the update of each matrix; of a new one, 16")
    alpha: Positive | None = Field(None, description="the update is scaled by alpha / r; of a new one, 32")
    targets: tuple[str, ...] | None = Field(
        None, strict=False, description="names of modules, or `all-linear`: all linear layers but the head, the default"
    )

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if "dropout" in given:
            raise _unfit(
                ("model", "adapter", "dropout"),
                "a policy is trained without dropout, because the ratio compares two policies and not two dropout "
                "masks. Remove it.",
            )
        if given.get("path") is not None:
            for key in ("r", "alpha", "targets"):
                if given.get(key) is not None:
                    text = f"the adapter that is continued has its own {key}. Remove it, or remove the path."
                    raise _unfit(("model", "adapter", key), text)
            return given
        targets = given.get("targets", ALL_LINEAR)
        targets = [targets] if isinstance(targets, str) else targets
        if targets == []:
            raise _unfit(("model", "adapter", "targets"), f"no module is named. Write `{ALL_LINEAR}` for all of them.")
        return {"r": 16, "alpha": 32, **given, "targets": targets}


def _adapter(given: Any) -> Any:
    return {"path": given} if isinstance(given, str) else given


class ModelSettings(Settings):
    """The policy, and the reference policy of a KL penalty."""

    name: str = Field(
        "countdown-tiny",
        description="`countdown-tiny`, `chain-tiny` or `littered-tiny` (ship), a folder, or a hub name",
    )
    adapter: Annotated[
        AdapterSettings | None, BeforeValidator(_adapter, json_schema_input_type=str | AdapterSettings | None)
    ] = Field(
        None,
        description="train a LoRA adapter and leave the weights as they are: its settings, or the folder of one to "
        "continue; null trains all weights",
    )
    reference: str | None = Field(
        None,
        description="reference policy of `kl`; null takes the starting weights, and with an adapter those without it",
    )


class CountdownSettings(Settings):
    """Reach a target from a few numbers; own generator, exact checker."""

    name: Literal["countdown"] = "countdown"
    numbers: Annotated[int, Field(ge=2, le=6)] = Field(3, description="of which each is used once")
    low: Positive = Field(1, description="the least number")
    high: Positive = Field(9, description="the largest number")
    seed: Seed = Field(0, description="of the problems")


class ChainSettings(Settings):
    """Add and subtract a few digits, step by step; own generator, exact checker that skips junk characters."""

    name: Literal["chain"] = "chain"
    terms: Annotated[int, Field(ge=2, le=6)] = Field(4, description="digits to add and subtract")
    seed: Seed = Field(0, description="of the problems")
    largest: Annotated[int, Field(ge=1, le=9)] = Field(9, description="the largest digit after the first")
    modulus: Annotated[int, Field(ge=2, le=10)] | None = Field(
        None, description="results are written as remainders by it; null writes them out"
    )
    junk_symbols: Annotated[int, Field(ge=1, le=4096)] = Field(5, description="different characters that mean nothing")
    fragile: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the junk over which the reader stumbles: an answer with such junk scores 0"
    )
    flaky: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the scores that training loses; evaluation loses none"
    )
    needs_junk: bool = Field(False, description="an answer without any junk scores 0: the mirror of fragile")


class ScoredInWorkers(Settings):
    """A task whose scorer may hang on a completion."""

    time_limit: Annotated[float, Field(gt=0)] = Field(
        5.0, description="seconds that a completion may take to score; then its reward is 0"
    )
    workers: Positive = Field(2, description="processes that score, for each process that trains")


class ReasoningGymSettings(ScoredInWorkers):
    """Any data set of reasoning-gym by name."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(description="name of a data set of reasoning-gym")
    options: dict[str, JsonValue] = Field({}, description="passed to reasoning_gym.create_dataset")
    prompt_template: str = Field("{question}", description="must contain {question}")
    answer_pattern: str | None = Field(None, description="regular expression whose group 1 is the answer")
    threshold: float | None = Field(None, description="scores at least this are 1, others 0; null keeps partial credit")
    eval_size: Positive = Field(256, description="held-out problems")
    seed: Seed = Field(0, description="of the problems")
    execute_completions: bool = Field(
        False, description="allow a data set whose scorer executes completions as Python, in a sandbox"
    )


class JsonlSettings(ScoredInWorkers):
    """A file of prompts and answers, one JSON object per line."""

    name: Literal["jsonl"] = "jsonl"
    path: str = Field(description="file of one JSON object per line")
    eval_path: str | None = Field(None, description="held-out file; null holds out the last eval_size lines")
    eval_size: Positive = Field(64, description="lines held out where there is no eval_path")
    prompt_field: str = Field("prompt", description="holds text, or a list of messages with role and content")
    answer_field: str = Field("answer", description="holds the right answer")
    scorer: Literal["exact", "math_verify"] = Field(
        "exact", description="compares answers as text, or as mathematics (math_verify, of the extra `tasks`)"
    )
    answer_pattern: str | None = Field(None, description="regular expression whose group 1 is the answer")
    prompt_template: str = Field("{prompt}", description="must contain {prompt}; not for messages")
    system: str | None = Field(None, description="system message before every prompt; needs rollout.chat")


class DatasetSettings(ScoredInWorkers):
    """A data set of the package datasets, by its name on the hub or from a folder."""

    name: Literal["dataset"] = "dataset"
    path: str = Field(description="name on the hub, a folder of save_to_disk, or a folder of data files")
    subset: str | None = Field(None, description="configuration of a data set that has several")
    split: str = Field("train", description="rows to train on")
    eval_split: str | None = Field(None, description="held-out rows; null holds out the last eval_size of split")
    eval_size: Positive = Field(64, description="rows held out where there is no eval_split")
    revision: str | None = Field(None, description="branch, tag or commit on the hub; null is the newest")
    prompt_field: str = Field("prompt", description="column of text or lists of messages; a.b is field b of column a")
    answer_field: str = Field("answer", description="column of the right answer")
    right_answer_pattern: str | None = Field(
        None, description="regular expression whose group 1 is the right answer in the answer column"
    )
    scorer: Literal["exact", "math_verify"] = Field(
        "exact", description="compares answers as text, or as mathematics (math_verify, of the extra `tasks`)"
    )
    answer_pattern: str | None = Field(None, description="regular expression whose group 1 is the answer")
    prompt_template: str = Field("{prompt}", description="must contain {prompt}; not for messages")
    system: str | None = Field(None, description="system message before every prompt; needs rollout.chat")


class OwnTaskSettings(Settings):
    """A class of the user's own; `name: path/to/file.py:Name` is the short form, with the options beside it."""

    name: Literal["own"] = "own"
    code: str = Field(
        description="`path/to/file.py:Name` of the class, or an installed entry point of the group rlstab.tasks"
    )
    options: dict[str, JsonValue] = Field({}, description="passed to the class by name")


TaskSettings = Annotated[
    CountdownSettings | ChainSettings | ReasoningGymSettings | JsonlSettings | DatasetSettings | OwnTaskSettings,
    Field(discriminator="name"),
]

#: Entry points of other packages that are tasks.
TASK_GROUP = "rlstab.tasks"


class RolloutSettings(Settings):
    """How responses are sampled. No top-k and no top-p: log-probs are those of the whole distribution."""

    prompts: Positive = Field(16, description="prompts per rollout, over all ranks")
    group: Positive = Field(8, description="responses per prompt")
    max_new_tokens: Positive = Field(24, description="tokens after which a response is cut off")
    temperature: Annotated[float, Field(gt=0)] = Field(
        1.0, description="divides logits everywhere: sampling, loss, signals"
    )
    batch_size: Positive = Field(128, description="responses sampled at a time on one rank")
    staleness: int = Field(
        0, ge=0, description="updates by which the sampler's weights are behind; the first rollouts are less stale"
    )
    precision: Literal["bf16", "fp8", "int8", "int4"] | None = Field(
        None, description="to which the sampler's weights are rounded; null samples from the trainer's own"
    )
    stop: str | None = Field(None, description="text that ends a response, besides EOS, for example a newline")
    chat: bool = Field(False, description="wrap prompts by the tokenizer's chat template")

    @model_validator(mode="before")
    @classmethod
    def _whole_distribution(cls, given: Any) -> Any:
        for key in CUTS if isinstance(given, Mapping) else ():
            if key in given:
                raise _unfit(
                    ("rollout", key),
                    "responses are drawn from the whole distribution. Cut off, it would have other log-probs than the "
                    "policy that learns: the ratio and importance weights would divide by the wrong ones, and tokens "
                    "that are never drawn would lose probability unseen. Remove it; for less random responses lower "
                    "rollout.temperature, which acts on the loss as well.",
                )
        return given


class OptimisationSettings(Settings):
    """AdamW on float32 weights; statistics and denominators over the whole optimizer step."""

    rollouts: Positive = Field(200, description="of the run; each gives epochs times mini_batches optimizer steps")
    epochs: Positive = Field(1, description="passes over a rollout")
    mini_batches: Positive = Field(1, description="optimizer steps per pass; divides the prompts")
    micro_batch_size: Positive = Field(
        128, description="responses in one forward and backward; does not change the loss"
    )
    lr: Annotated[float, Field(ge=0)] = Field(1e-6, description="learning rate")
    warmup_optimizer_steps: int = Field(0, ge=0, description="of linear warm-up; then as `schedule` says")
    schedule: Schedule = Field(
        None, description="of transformers, by its name or {name: ..., options}; null is constant after the warm-up"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), strict=False, description="of AdamW"
    )
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="of AdamW")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="of AdamW")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="longer gradients are scaled down to it")
    old_logprobs: OldLogprobs | None = Field(
        None,
        description="denominator of the ratio: the live policy (ratio 1), the sampler's values, or one more forward; "
        "null is recompute with a method that compares it with the sampler, else rollout with a stale or rounded "
        "sampler, else live with one optimizer step per rollout, else recompute",
    )
    refresh: Refresh | None = Field(
        None,
        description="evidence of the policy of old_logprobs, or of one more forward per optimizer step; null is step "
        "where a method compares the two and a rollout makes several optimizer steps, else rollout",
    )
    scope: Literal["step", "microbatch"] = Field(
        "step", description="statistics over the optimizer step; microbatch only reproduces published code"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16 is autocast over float32 weights")
    gradient_checkpointing: bool = Field(False, description="less memory for more computation")

    @property
    def optimizer_steps_per_rollout(self) -> int:
        """Optimizer steps made from one rollout."""
        return self.epochs * self.mini_batches

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run; a schedule ends with them."""
        return self.rollouts * self.optimizer_steps_per_rollout


class EngineSettings(Settings):
    """Where the weights are, and how gradients of several processes become one. It does not change what is learnt."""

    name: Literal["auto", "ddp", "fsdp2"] = Field(
        "auto",
        description="ddp: all weights in each process; fsdp2: shards of weights, gradients and moments; auto is ddp "
        "with several processes, unless the launcher asks for FSDP",
    )
    gather: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="fsdp2: dtype of gathered weights in a step; bf16 needs optimisation.precision: bf16",
    )
    offload: bool = Field(False, description="fsdp2: shards and the optimizer stay in the host's memory")


#: A name, or a name with settings.
Engine: TypeAlias = Annotated[
    EngineSettings,
    BeforeValidator(
        lambda given: {"name": given} if isinstance(given, str) else given,
        json_schema_input_type=Literal["auto", "ddp", "fsdp2"] | EngineSettings,
    ),
]


class EvaluationSettings(Settings):
    """Held-out prompts: sampled mean, greedy, pass@k."""

    every: int = Field(50, ge=0, description="rollouts between evaluations, the start and the end included; 0 is never")
    prompts: Positive = Field(256, description="held-out prompts")
    samples: Positive = Field(4, description="responses per prompt for the mean and pass@k")
    pass_at: tuple[Positive, ...] = Field((4,), strict=False, description="the k of pass@k, each at most samples")
    greedy: bool = Field(True, description="also the greedy responses")


class TrackingSettings(Settings):
    """Where a run is stored, and where its metrics go."""

    out: str = Field("runs/run", description="folder of the run")
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = Field(
        (), strict=False, description="metrics.jsonl is always written"
    )
    project: str = Field("rlstab", description="name for the trackers")
    checkpoint_every: int = Field(
        50, ge=0, description="rollouts between checkpoints; the last is always kept; 0 is never"
    )
    keep_checkpoints: Positive = Field(2, description="so many of the newest stay")
    samples: int = Field(2, ge=0, description="responses of each rollout written to samples.jsonl")
    trace_every: int = Field(
        0,
        ge=0,
        description="rollouts between those whose tokens are traced to tokens.jsonl, the first and the last included; "
        "0 is never",
    )
    trace_responses: Positive = Field(16, description="responses of a traced rollout, in whole groups, at least one")


class RunConfig(Settings):
    """A whole run. Objective and stages are kept in canonical form; the objects are composition and pipeline."""

    model: ModelSettings = ModelSettings()
    task: TaskSettings = CountdownSettings()
    reward: Rewards | None = Field(
        None,
        description="functions of your own, or a weighted sum with the task's; null is the task's own scorer alone",
    )
    rollout: RolloutSettings = RolloutSettings()
    stages: list[dict[str, Any]]
    objective: list[dict[str, Any]]
    optimisation: OptimisationSettings = OptimisationSettings()
    engine: Engine = EngineSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    tracking: TrackingSettings = TrackingSettings()
    seed: Seed = Field(0, description="of the run: prompts, samples, methods that draw")

    _composition: Composition = PrivateAttr()
    _pipeline: Pipeline = PrivateAttr()

    @property
    def composition(self) -> Composition:
        """The objective as an object."""
        return self._composition

    @property
    def pipeline(self) -> Pipeline:
        """The stages as an object."""
        return self._pipeline

    @model_validator(mode="after")
    def _fit(self) -> RunConfig:
        optimisation, prompts, most = self.optimisation, self.rollout.prompts, self.evaluation.samples
        if prompts % optimisation.mini_batches:
            raise _unfit(
                ("optimisation", "mini_batches"),
                f"{optimisation.mini_batches} mini-batches do not divide the {prompts} prompts of a rollout. Choose "
                f"another number here, or another rollout.prompts.",
            )
        if optimisation.old_logprobs == "live" and self.rollout.staleness:
            raise _unfit(
                ("optimisation", "old_logprobs"),
                f"live takes the sampler for the live policy, and rollout.staleness is {self.rollout.staleness}: the "
                f"ratio would stay 1 on stale responses. Use rollout or recompute.",
            )
        if optimisation.old_logprobs == "live" and optimisation.optimizer_steps_per_rollout > 1:
            raise _unfit(
                ("optimisation", "old_logprobs"),
                f"live needs one optimizer step per rollout, and epochs x mini_batches is "
                f"{optimisation.optimizer_steps_per_rollout}: the ratio would stay 1 while the policy moves. Use "
                f"recompute or rollout.",
            )
        if self.engine.gather == "bf16" and optimisation.precision != "bf16":
            raise _unfit(
                ("engine", "gather"),
                f"bf16 rounds the weights of a forward, and optimisation.precision is {optimisation.precision}. Set "
                f"that to bf16, or this to fp32.",
            )
        for name in ("gather", "offload"):
            if self.engine.name != "fsdp2" and getattr(self.engine, name) != EngineSettings.model_fields[name].default:
                raise _unfit(
                    ("engine", name),
                    f"it is a setting of shards, and engine.name is {self.engine.name}. Set that to fsdp2, or leave "
                    f"this out.",
                )
        if self.rollout.stop == "":
            raise _unfit(
                ("rollout", "stop"),
                "an empty text is in every response, so each would end after its first token. Write null for no stop "
                "text.",
            )
        if self.tracking.out == "":
            raise _unfit(("tracking", "out"), "an empty text names no folder. Write `.` for the current one.")
        self._require_memory("rollout", prompts, "group", self.rollout.group)
        if self.evaluation.every:
            self._require_memory("evaluation", self.evaluation.prompts, "samples", most)
        for place, k in enumerate(self.evaluation.pass_at):
            if k > most:
                raise _unfit(
                    ("evaluation", "pass_at", place),
                    f"pass@{k} needs at least {k} samples per prompt, and evaluation.samples is {most}. Raise it, or "
                    f"lower this.",
                )
        if isinstance(self.task, CountdownSettings) and self.task.low > self.task.high:
            raise _unfit(("task", "low"), f"{self.task.low} is above task.high = {self.task.high}. Swap them.")
        if isinstance(self.task, ChainSettings) and self.task.flaky and self.reward is not None:
            if not any(one.function == TASK for one in self.reward):
                raise _unfit(
                    ("task", "flaky"),
                    f"the task's own scores are lost, and `reward` does not list `{TASK}`: nothing would be. Add it "
                    f"there, or set this to 0.",
                )
        if (
            isinstance(self.task, JsonlSettings | DatasetSettings)
            and self.task.system is not None
            and not self.rollout.chat
        ):
            raise _unfit(
                ("task", "system"),
                "a system message needs a chat template, and rollout.chat is false. Set that to true, or put the text "
                "into prompt_template.",
            )
        return self

    def _require_memory(self, part: str, prompts: int, name: str, each: int) -> None:
        """Refuse what would fill the memory until the system ends something."""
        if prompts * each > MOST_RESPONSES:
            raise _unfit(
                (part, "prompts"),
                f"{prompts} x {each} responses at once, with {part}.{name}; at most {MOST_RESPONSES} are "
                f"allowed. Lower one of them.",
            )


def _unfit(place: Place, text: str) -> PydanticCustomError:
    return PydanticCustomError("unfit", "{text}", {"place": place, "text": text})


def load_run(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A checked and resolved run: presets expanded, every default filled in.

    Args:
        source: path of a YAML file, or the mapping that it would hold.
        overrides: values by dotted path, such as ``{"optimisation.lr": 1e-4}``.

    Raises:
        ConfigError: with file and line.
        Conflict: the methods of the objective do not fit together.
    """
    document = Document.read(source) if isinstance(source, str | Path) else Document.of(source)
    if not isinstance(document.data, Mapping):
        raise document.error((), "a run is a mapping with the keys model, task, rollout, objective, optimisation, ...")
    for path, value in (overrides or {}).items():
        document = document.replaced(path, value)
    return build_run(document)


def build_run(document: Document) -> RunConfig:
    """The run of a document that is a mapping; see :func:`load_run`."""
    document = located(document)
    data = dict(document.data)
    if "task" in data:
        data["task"] = _task(data["task"])
    composition = build_objective(document)
    pipeline = build_stages(document, presets_of(data["objective"]), [one.name for one in walk(composition)])
    data.pop("advantage", None)
    data["stages"] = dump_stages(pipeline)
    data["objective"] = dump_objective(composition)
    run = document.validate(RunConfig, data)
    assert isinstance(run, RunConfig)
    optimisation = run.optimisation
    # of what acts: a method that is observed, or only reports, would change the run by moving its policies
    drift = frozenset[str]().union(*(one.reads_drift for one in active_methods(composition) if one.writes))
    off_policy = run.rollout.staleness > 0 or run.rollout.precision is not None
    steps = optimisation.optimizer_steps_per_rollout
    unset = {
        "old_logprobs": optimisation.old_logprobs or old_logprobs_for(drift, steps, off_policy=off_policy),
        "refresh": optimisation.refresh or refresh_for(drift, steps),
    }
    run = run.model_copy(update={"optimisation": optimisation.model_copy(update=unset)})
    run._composition, run._pipeline = composition, pipeline
    return run


def _task(given: Any) -> Any:
    """The settings of a task, where a class of the user's own has the place of the name."""
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(name, str) or not (is_own(name) or name in entry_points(group=TASK_GROUP).names):
        return given
    return {"name": "own", "code": name, "options": {key: given[key] for key in given if key != "name"}}


def dump_run(run: RunConfig) -> str:
    """The resolved run as YAML; loads to an equal run."""
    return dump(run.model_dump(mode="json"))


def run_hash(run: RunConfig) -> str:
    """Twelve hexadecimal digits over everything that can change a result beyond the rounding of float32.

    Of files of the user's own, what counts is their name and what is in them.
    """
    settings = run.model_dump(mode="json", exclude={"tracking", "engine"})
    gather = {} if run.engine.gather == "fp32" else {"gather": run.engine.gather}
    code = files(settings)
    return digest(short(settings) | gather | ({"code": code} if code else {}))
