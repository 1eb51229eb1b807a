"""What an objective needs and costs in addition to plain GRPO."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from rlstab.config import RunConfig
from rlstab.config.settings import OTHER_MODELS, SAMPLER
from rlstab.console import capital, counted
from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import Composition, walk
from rlstab.hosts import measures

#: What evidence costs, by kind and name.
COSTS: Mapping[str, Mapping[str, str]] = yaml.safe_load(
    Path(__file__).with_name("costs.yaml").read_text(encoding="utf-8")
)
#: For evidence that only the user can provide.
YOURS = "yours to provide"
_WHAT = {
    **SIGNALS,
    "rewards": "reward of the response on each of its tokens, as the stages shaped it",
    "raw_rewards": "reward of the response on each of its tokens, as it was scored",
}


def costs(objective: Composition, run: RunConfig | None) -> list[str]:
    """Signals, passes, state, statistics: what an objective needs in addition to plain GRPO."""
    lines = [
        f"- `{name}`, for {_readers(objective, 'needs', name)}: {_WHAT.get(name, 'a user-defined signal')}. "
        f"{capital(_cost(name, run))}."
        for name in sorted(objective.needs - BASICS)
    ]
    lines += [
        f"- `{name}` of the live policy, with gradient, for {_readers(objective, 'live_needs', name)}: "
        f"{COSTS['live'].get(name, YOURS)}."
        for name in sorted(objective.live_needs)
    ]
    if not lines:
        lines.append("- No signal beyond log-probs and advantages.")
    if run:
        optimisation, extra = run.optimisation, []
        if optimisation.old_logprobs == "recompute":
            extra.append("one per rollout for the old log-probs")
        models = (role for name, role in OTHER_MODELS.items() if name in objective.needs)
        extra += [f"one per rollout of the {role} model" for role in models]
        if optimisation.refresh == "step":
            extra.append("one per optimizer step for fresh evidence")
        steps = counted(optimisation.optimizer_steps_per_rollout, "optimizer step")
        taken = f"{steps} per rollout of {run.rollout.prompts} x {run.rollout.group} responses"
        lines.append(f"- {taken}. Forward passes beyond sampling and the loss: {'; '.join(extra) or 'none'}.")
    states = [f"`{leaf.name}` ({', '.join(keys)})" for leaf in walk(objective) if (keys := leaf.method.init_state())]
    lines.append(f"- State, saved with the checkpoint: {'; '.join(states) or 'none'}.")
    deciding = [leaf.name for leaf in walk(objective) if measures(leaf.method)]
    if deciding:
        lines.append(
            f"- Decide by statistics of the whole optimizer step before its first backward: {in_backticks(deciding)}. "
            f"{_evidence_of(run)}"
        )
    return lines


def _cost(name: str, run: RunConfig | None) -> str:
    if run and name in OTHER_MODELS:
        return reference(run, getattr(run.model, OTHER_MODELS[name]))
    return COSTS["signals"].get(name, YOURS)


def reference(run: RunConfig, named: str | None, each: str = "rollout") -> str:
    """The reference policy of `kl` or the teacher, and its cost: a forward pass for ``each``."""
    model, second = run.model, f"a second model in memory, and one more forward pass per {each}"
    if named == SAMPLER:
        return "the sampler, whose log-probs are kept with each token: no second model and no forward pass"
    if named is not None:
        return f"the model '{named}': {second}"
    if model.adapter is None:
        return f"the weights at the start: {second}"
    text = f"'{model.name}' without the adapter: no second model in memory, one more forward pass per {each}"
    if model.adapter.path is not None:
        text += (
            f". The adapter '{model.adapter.path}' already differs from it, so that the KL begins above 0; to measure "
            f"it from there, merge the two and name the result as model.reference"
        )
    return text


def in_backticks(names: Iterable[str]) -> str:
    """Names in backticks, each once."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _readers(objective: Composition, attribute: str, name: str) -> str:
    return in_backticks(leaf.name for leaf in walk(objective) if name in getattr(leaf.method, attribute))


def _evidence_of(run: RunConfig | None) -> str:
    """The policy of the evidence, and the tokens over which statistics are taken."""
    if run is None:
        return "The run decides which policy the evidence is of (`refresh`) and what statistics cover (`scope`)."
    remark = " With `scope: microbatch` they cover a micro-batch." if run.optimisation.scope == "microbatch" else ""
    if run.optimisation.refresh == "step":
        return f"With `refresh: step` they are those of the policy at the start of each optimizer step.{remark}"
    later = ", which is the policy that learns"
    if run.optimisation.optimizer_steps_per_rollout > 1:
        later = ", also in the later optimizer steps, when it is older"
    return f"With `refresh: rollout` they are those of the policy that sampled{later}.{remark}"
