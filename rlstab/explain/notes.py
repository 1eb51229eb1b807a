"""Notes for the user: what does nothing, what is unsafe, and what methods expect or exclude."""

import re

from rlstab.config import RunConfig
from rlstab.config.runs import why_idle
from rlstab.config.settings import OTHER_MODELS, TASK
from rlstab.core.compose import Composition, walk
from rlstab.core.method_settings import settings_of
from rlstab.core.objective import TRUST_REGION, TokenObjective, active_methods, unmet
from rlstab.explain import stages
from rlstab.explain.costs import in_backticks
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.pipeline import unmet as stages_unmet


def notes(objective: Composition, run: RunConfig | None) -> list[str]:
    """For ``rlstab check``: methods that cannot act, and missing parts that they were published with."""
    of_run = [*unsafe(objective, run), *idle_in_run(objective, run), *crossed(run), *stages.lacking(run)] if run else []
    return of_run + _not_as_published(objective, run.pipeline if run else None)


def idle(objective: Composition, run: RunConfig | None) -> list[str]:
    """For ``rlstab explain``: methods that do nothing at their settings or in the run, and unsafe settings."""
    warnings = unsafe(objective, run) + stages.lacking(run) if run else []
    lines = [f"**Warning:** {text}" for text in warnings]
    lines += [*idle_in_run(objective, run), *crossed(run)] if run else _with_several_steps(objective)
    for leaf in walk(objective):
        reached = [limit for limit in leaf.method.about.no_op_at if limit.settings and limit.reached(leaf.method)]
        lines += [f"{leaf.method!r} does nothing: {limit.why}" for limit in reached[:1]]
    return [f"- {line}" for line in lines] or ["Nothing is known to be idle or unsafe."]


def pairs(objective: Composition, pipeline: Pipeline | None = None) -> list[str]:
    """What methods and stages expect or exclude, as lines of Markdown."""
    missing = (re.sub(r"'(\w+)'", r"`\1`", text) for text in _not_as_published(objective, pipeline))
    lines = [f"- **Not as published:** {text}" for text in missing]
    for stage in pipeline or ():
        for sentence in dict.fromkeys(stage.excludes.values()):
            excluded = in_backticks(sorted(name for name, reason in stage.excludes.items() if reason == sentence))
            lines.append(f"- **Excluded:** `{stage.name}` cannot be combined with {excluded}: {sentence}")
    return lines or ["No interactions are known."]


def _not_as_published(objective: Composition, pipeline: Pipeline | None) -> list[str]:
    methods = [method.name for method in active_methods(objective)]
    return unmet(objective) + (stages_unmet(pipeline, methods) if pipeline else [])


def _with_several_steps(objective: Composition) -> list[str]:
    """For an objective without a run: methods that only compare the live policy with the old one."""
    names = [_compares(f"`{key}`", method) for key, method in objective.keyed.items() if "live" in method.reads_drift]
    text = f"Only with several optimizer steps per rollout, because otherwise the ratio is 1: {', '.join(names)}."
    return [text] if names else []


def _compares(name: str, method: TokenObjective) -> str:
    """The name of a method that compares the live policy with the old one, or of its trust region if it does more."""
    return f"the trust region of {name}" if method.writes - TRUST_REGION and method.writes & TRUST_REGION else name


def idle_in_run(objective: Composition, run: RunConfig) -> list[str]:
    """Methods and settings that cannot act in a run, each with the reason."""
    optimisation = run.optimisation
    lines = [
        f"{_compares(key, method) if drift == 'live' else key} cannot act: {reason}"
        for key, method in objective.keyed.items()
        for drift in sorted(method.reads_drift)
        if (reason := why_idle(drift, optimisation)) is not None
    ]
    one_step = optimisation.optimizer_steps_per_rollout == 1
    if one_step and optimisation.refresh == "step" and optimisation.old_logprobs != "rollout":
        lines.append(
            "optimisation.refresh = step: with one optimizer step per rollout the policy has not moved, and one more "
            "forward makes the same evidence again."
        )
    lines += [
        f"{stage.name}.{setting.name}: {reason}"
        for stage in run.pipeline
        for setting in settings_of(type(stage))
        if (reason := stage.unread_settings().get(setting.name)) and getattr(stage, setting.name) != setting.default
    ]
    return lines


def crossed(run: RunConfig) -> list[str]:
    """Options that another one leaves without effect, or makes read something else, each with the cure."""
    shapers = " and ".join(stage.name for stage in run.pipeline.shapers)
    expanders = " ".join(stage.name for stage in run.pipeline.expanders)
    read = run.composition.needs | run.composition.live_needs
    readers = {key: [name for name, role in OTHER_MODELS.items() if role == key] for key in OTHER_MODELS.values()}
    lines = [
        f"model.{key}: no method reads {signals[0]}, so it has no effect. Add one that does, or leave it out."
        for key, signals in (*readers.items(), ("teacher_prompt", readers["teacher"]))
        if getattr(run.model, key) is not None and read.isdisjoint(signals)
    ]
    lines += [
        f"task.{key}: only the task's scorer reads it, and `reward` does not list `{TASK}`. Add that, or leave it out."
        for key in ("scorer", "answer_pattern", "threshold")
        if run.reward and all(part.function != TASK for part in run.reward)
        if getattr(run.task, key, None) not in (None, "exact")
    ]
    replays, rollout = "log_support_mass" in run.composition.live_needs, run.rollout
    if run.evaluation.sampler and rollout.precision is None and not rollout.weight_noise and not rollout.cut:
        lines.append("evaluation.sampler: the policy itself samples. Set rollout.precision or rollout.weight_noise.")
    if replays and not rollout.cut:
        lines.append("support_replay cannot act: the sampler draws from all tokens. Set rollout.top_p or top_k.")
    if shapers and any(getattr(stage, "rewards", "") == "shaped" for stage in run.pipeline.expanders):
        lines.append(
            f"dynamic_sampling.rewards: after {shapers}, rewards differ in groups that are all right or all wrong, so "
            f"that hardly any is dropped. Set `rewards: raw`."
        )
    if re.search("dynamic_sampling.*deep_grpo", expanders):
        lines.append("deep_grpo: it branches where every answer failed, which dynamic_sampling drops. List it first.")
    return lines


def unsafe(objective: Composition, run: RunConfig) -> list[str]:
    """What makes a run unsafe, each with the reason."""
    optimisation, lines = run.optimisation, []
    steps = optimisation.optimizer_steps_per_rollout
    bound = any(
        method.writes & TRUST_REGION - {"ratio"} or "trust region" in method.about.addresses
        for method in active_methods(objective)
    )
    if steps > 1 and not bound:
        lines.append(
            f"{steps} optimizer steps per rollout and no method with bounds, surrogate or gates: nothing stops a token "
            f"whose ratio has gone too far. Add clip_higher."
        )
    if run.rollout.cut and "log_support_mass" not in objective.live_needs:
        lines.append(
            "rollout.top_p and top_k: the sampler's log-probs are over the tokens that it kept, and those of the loss "
            "over the whole vocabulary. Add support_replay."
        )
    if optimisation.scope == "microbatch":
        lines.append("optimisation.scope = microbatch: the loss depends on how the step is cut into micro-batches.")
    return lines
