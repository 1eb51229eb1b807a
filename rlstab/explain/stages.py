"""Stages in words, in the order of a rollout: what each does, needs and keeps."""

from collections.abc import Mapping

from rlstab.config import RunConfig
from rlstab.console import capital, counted
from rlstab.core.batch import SIGNALS
from rlstab.errors import did_you_mean
from rlstab.explain.costs import COSTS, in_backticks
from rlstab.signals import SIGNAL_NAMES
from rlstab.stages.grpo import GRPO
from rlstab.stages.in_order import InOrder
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.response_batch import EVIDENCE, ONLY_FOR
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, RewardShaper, RolloutExpander, Stage

#: The kinds in the order of a rollout, each with a heading and the question that it answers.
KINDS: Mapping[type[Stage], tuple[str, str]] = {
    PromptSelector: ("Prompts", "which prompts"),
    RewardShaper: ("Rewards", "what a response earns"),
    RolloutExpander: ("Rollout", "what else to sample, and what to drop"),
    AdvantageEstimator: ("Advantages", "what a response is worth"),
}
_LACKS = "the trainer does not have it"


def rollout(pipeline: Pipeline, run: RunConfig | None) -> list[str]:
    """One numbered line for each action in a rollout, in order."""
    lines = [_line(pipeline.selector)]
    if run:
        settings = run.rollout
        words = f"{settings.group} to each of {settings.prompts} prompts, of at most {settings.max_new_tokens} tokens"
        if settings.staleness:
            words += f", by weights that are {counted(settings.staleness, 'update')} old"
        if settings.precision is not None:
            words += f", by weights rounded to {settings.precision}"
        lines.append(f"**Responses.** {words}; the task `{run.task.name}` scores them.")
    lines += [_line(stage) for stage in (*pipeline.shapers, *pipeline.expanders, pipeline.estimator)]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _line(stage: Stage) -> str:
    default = ", the default" if stage in (InOrder(), GRPO()) else ""
    head = next(head for kind, (head, _) in KINDS.items() if isinstance(stage, kind))
    return f"**{head}.** `{stage.name}`{default}: {stage.in_words().rstrip('.')}."


def needs(pipeline: Pipeline) -> list[str]:
    """The evidence that stages read, its source and cost, and the states that they keep, as items of a list."""
    lines = []
    for name in sorted(pipeline.needs):
        readers = [stage for stage in pipeline if name in stage.needs]
        meaning = SIGNALS.get(name) or EVIDENCE.get(name, (2, "a user-defined signal"))[1]
        costs = "; ".join(dict.fromkeys(cost(stage, name) for stage in readers))
        names = in_backticks(stage.name for stage in readers)
        lines.append(f"- `{name}`, for the stage{'s' * (len(readers) > 1)} {names}: {meaning}. {capital(costs)}.")
    states = [f"`{stage.name}` ({', '.join(keys)})" for stage in pipeline if (keys := stage.init_state())]
    return lines + ([f"- State of stages, saved with the checkpoint: {'; '.join(states)}."] if states else [])


def cost(stage: Stage, name: str) -> str:
    """The cost of some evidence for a stage in rlstab's trainer, or that the trainer does not have it."""
    if (kind := ONLY_FOR.get(name, stage.kind)) != stage.kind:
        return f"{_LACKS} for a stage of the kind {stage.kind}, only for one of the kind {kind}"
    name = "rewards" if name.startswith("reward/") else name
    return COSTS["stages"].get(name) or (COSTS["signals"].get(name) if name in SIGNAL_NAMES else None) or _LACKS


def lacking(run: RunConfig) -> list[str]:
    """Evidence that stages need and the trainer does not have, for which it refuses the run."""
    names, messages = {*COSTS["stages"], *SIGNAL_NAMES, *run.reward_evidence}, list[str]()
    for stage in run.pipeline:
        offered = {name for name in names if not cost(stage, name).startswith(_LACKS)}
        for name in sorted(stage.needs - offered):
            reason = (
                f"{cost(stage, name)}. Remove the stage."
                if name in names
                else f"{_LACKS}. {did_you_mean(name, offered)}"
            )
            messages.append(f"the stage '{stage.name}' reads '{name}': {reason}")
    return messages
