"""What acts outside the loss, in words and in the order of a rollout: what it does, needs, keeps and expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlstab.config import RunConfig
from rlstab.core.batch import SIGNALS
from rlstab.explain.costs import COSTS, listed
from rlstab.signals import SIGNAL_NAMES
from rlstab.stages.grpo import GRPO
from rlstab.stages.in_order import InOrder
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.response_batch import EVIDENCE
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, Stage

#: What happens in a rollout where a kind of stage acts.
HEADS: Mapping[str, str] = {
    "prompts": "Prompts",
    "rewards": "Rewards",
    "rollouts": "Rollout",
    "advantages": "Advantages",
}
#: What only one kind of stage can read, as it is known when that kind acts.
_ALONE: Mapping[str, tuple[type[Stage], str]] = {
    "logprobs": (AdvantageEstimator, "estimators"),
    "squared_gradient": (AdvantageEstimator, "estimators"),
    "prompt_features": (PromptSelector, "selectors"),
}
#: What evidence costs in the trainer that ships, beyond the signals that its sampler makes.
_EVIDENCE_COSTS: Mapping[str, str] = {
    "raw_rewards": "free: the scorer gave them",
    "logprobs": "one more forward of each rollout by the policy that learns",
    "squared_gradient": "one backward for each response, before the rollout is learnt",
    "prompt_features": "the input embeddings of the prompts that it looks at",
    "rollout_logprobs": COSTS["rollout_logprobs"],
    "block_rewards": "the task's, where it knows blocks",
    "block_outcomes": "the task's, where it knows blocks",
    "block_ids": "the task's, where it knows blocks",
}


def rollout(pipeline: Pipeline, run: RunConfig | None) -> list[str]:
    """One numbered line for each thing that happens in a rollout, in order."""
    lines = [_line(pipeline.selector)]
    lines += [f"**Responses.** {_sampling(run)}"] if run else []
    lines += [_line(one) for one in (*pipeline.shapers, *pipeline.expanders, pipeline.estimator)]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _line(stage: Stage) -> str:
    return f"**{HEADS[stage.kind]}.** `{stage.name}`{_default(stage)}: {_sentence(stage)}"


def _default(stage: Stage) -> str:
    return ", the default" if stage in (InOrder(), GRPO()) else ""


def _sentence(stage: Stage) -> str:
    words = stage.in_words()
    return words if words.endswith(".") else f"{words}."


def _sampling(run: RunConfig) -> str:
    settings = run.rollout
    words = f"{settings.group} to each of {settings.prompts} prompts, of at most {settings.max_new_tokens} tokens"
    if settings.staleness:
        words += f", by weights that are {settings.staleness} update{'s' * (settings.staleness > 1)} old"
    if settings.precision is not None:
        words += f", by weights rounded to {settings.precision}"
    return f"{words}; the task `{run.task.name}` scores them."


def needs(pipeline: Pipeline) -> list[str]:
    """Evidence that stages read, whose it is, and the states that they keep, as items of a list."""
    lines = []
    for name in sorted(pipeline.needs):
        readers = [one for one in pipeline if name in one.needs]
        what = SIGNALS.get(name) or EVIDENCE.get(name, (0, _OTHERS.get(name, "a signal of your own")))[1]
        costs = dict.fromkeys(has(one, name) for one in readers)
        told = "; ".join(costs)
        lines.append(
            f"- `{name}`, for the {_stages(one.name for one in readers)}: {what}. {told[0].upper()}{told[1:]}."
        )
    states = [f"`{one.name}` ({', '.join(keys)})" for one in pipeline if (keys := one.init_state())]
    return lines + ([f"- State of stages, saved with the checkpoint: {'; '.join(states)}."] if states else [])


_OTHERS = {
    "logprobs": "log-prob of the token under the policy that learns, nats",
    "prompt_features": "mean input embedding of the tokens of each prompt",
}


def _stages(names: Iterator[str]) -> str:
    known = list(names)
    return f"stage{'s' * (len(known) > 1)} {listed(known)}"


def has(stage: Stage, name: str) -> str:
    """At what cost the trainer that ships has some evidence for a stage, or that it does not have it."""
    kind, told = _ALONE.get(name, (Stage, ""))
    if not isinstance(stage, kind):
        return f"{_LACKS} for a stage of this kind, only for {told}"
    cost = _EVIDENCE_COSTS.get(name) or (COSTS.get(name) if name in SIGNAL_NAMES else None)
    return cost or _LACKS


_LACKS = "the trainer does not have it"


def lacking(pipeline: Pipeline) -> list[str]:
    """Evidence that stages need and the trainer does not have, so that it refuses the run."""
    found = [(one.name, name, has(one, name)) for one in pipeline for name in sorted(one.needs)]
    return [f"the stage {own} needs {name}: {told}." for own, name, told in found if told.startswith(_LACKS)]


def excluded(pipeline: Pipeline) -> list[str]:
    """What cannot act beside the stages of a run."""
    return [
        f"`{one.name}` cannot act beside {listed(sorted(names))}: {why}"
        for one in pipeline
        for why in dict.fromkeys(one.excludes.values())
        if (names := [name for name, own in one.excludes.items() if own == why])
    ]
