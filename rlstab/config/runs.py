"""A run in YAML: model, task, reward, rollout, stages, objective, optimisation, engine, evaluation, tracking."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from rlstab.config import settings as parts
from rlstab.config.document import Document, dump
from rlstab.config.objectives import build_objective, build_stages, dump_objective, dump_stages, presets_of
from rlstab.config.user_code import located
from rlstab.config.validation import require_kind, together, validate
from rlstab.core.compose import Composition, walk
from rlstab.core.objective import active_methods
from rlstab.stages.pipeline import Pipeline, check_exclusions

#: First parts of the names of the trainer's metrics; no method or stage of a run may have such a name.
LOGGED = frozenset(
    "blocks eval gradient head loss lr optimizer_steps response reward rollout sampler scorer seconds".split()
)


#: The largest vocabulary of which a rollout keeps the sampler's whole distribution at each token.
MOST_WHOLE = 4096


class RunConfig(parts.RunSettings):
    """A whole run. Objective and stages are kept in canonical form; the objects are composition and pipeline."""

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

    @property
    def signal_options(self) -> dict[str, float]:
        """Those of the composition; ``sampler_k`` is how many of the sampler's log-probs a rollout keeps of a token."""
        options = dict(self.composition.signal_options)
        if self.model.teacher == parts.SAMPLER and "teacher_divergence" in self.composition.live_needs:
            options["sampler_k"] = options["top_k"] or MOST_WHOLE
        return options

    @property
    def reward_evidence(self) -> frozenset[str]:
        """Names under which methods and stages read rewards: shaped, as scored, and each reward by its name."""
        return frozenset({"rewards", "raw_rewards", *(f"reward/{reward.name}" for reward in self.reward or ())})


def load_run(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A checked and resolved run: presets expanded, every default filled in.

    Args:
        source: path of a YAML file, or the mapping that it would hold.
        overrides: values by dotted path, such as ``{"optimisation.lr": 1e-4}``.

    Raises:
        ConfigError: with file and line.
        Conflict: the methods of the objective do not fit together.
    """
    document = Document.read(source) if isinstance(source, str | Path) else Document(source)
    require_kind(document, "run")
    for path, value in (overrides or {}).items():
        document = document.replaced(path, Document(value, "", {(): f"--set {path}"}))
    return build_run(document)


def build_run(document: Document) -> RunConfig:
    """The run of a document that is a mapping; see :func:`load_run`."""
    document = located(document)
    data = {**document.data, "stages": [], "objective": []}
    checks: list[Callable[[], Any]] = [
        lambda: build_objective(document),
        lambda: build_stages(document, presets_of(document.data.get("objective"))),
        lambda: validate(document, RunConfig, data),
    ]
    composition, pipeline, run = together(checks)
    with document.at(("stages",) if "stages" in document.data else ("objective",)):
        check_exclusions(list(pipeline), dict.fromkeys((leaf.name for leaf in walk(composition)), "method"))
    for path, names in (("objective", composition.keyed), ("stages", [stage.name for stage in pipeline])):
        for name in sorted(LOGGED.intersection(names)):
            raise document.error((path,), f"'{name}' is the name of metrics of the trainer. Give it another `name`.")
    if run.rollout.group == 1 and pipeline.estimator.compares and not pipeline.expanders:
        text = f"'{pipeline.estimator.name}' compares the responses to one prompt, so it needs at least two. Raise it."
        raise document.error(("rollout", "group"), text)
    if "reward_parts" in pipeline.needs and sum(reward.weight != 0 for reward in run.reward or ()) < 2:
        reader = next(stage.name for stage in pipeline if "reward_parts" in stage.needs)
        text = f"'{reader}' compares rewards one by one, and the run has one. List two with a weight, or use 'grpo'."
        raise document.error(("reward",), text)
    if run.model.teacher == parts.SAMPLER and "teacher_logprobs" in composition.needs:
        text = "its log-prob of each token is 'rollout_logprobs', which methods against mismatch read. Name a model."
        raise document.error(("model", "teacher"), text)
    lists = {"stages": dump_stages(pipeline), "objective": dump_objective(composition)}
    resolved: RunConfig = run.model_copy(update={**lists, "optimisation": _resolved(run, composition)})
    resolved._composition, resolved._pipeline = composition, pipeline
    return resolved


def dump_run(run: RunConfig) -> str:
    """The resolved run as YAML; loads to an equal run."""
    return dump(run.model_dump(mode="json"))


def _resolved(run: RunConfig, composition: Composition) -> parts.OptimisationSettings:
    """The optimisation, with the cheapest evidence that lets every method act where the run leaves it open.

    There are three policies: the one that sampled (``rollout_logprobs``), the one that the ratio divides by
    (``old_logprobs``), and the one at the start of the optimizer step (``logprobs``). A method says which it compares.
    """
    # only of methods that act: one that is observed, or only reports, must not change the run
    drift = frozenset[str]().union(*(method.reads_drift for method in active_methods(composition) if method.writes))
    several_steps = run.optimisation.optimizer_steps_per_rollout > 1
    old: parts.OldLogprobs = "recompute" if several_steps else "live"
    if run.rollout.staleness or run.rollout.precision is not None or run.rollout.weight_noise:
        old = "rollout"  # the sampler is another policy on purpose, and the ratio divides by it
    defaults: dict[str, str] = {"old_logprobs": old, "refresh": "rollout"}
    for name, value in (item for pair in drift for item in _SETTINGS[pair].items()):
        if several_steps or name != "refresh":  # with one step a refresh at each step changes nothing
            defaults[name] = value
    explicit = run.optimisation.model_dump(include={"old_logprobs", "refresh"}, exclude_none=True)
    return run.optimisation.model_copy(update={**defaults, **explicit})


# -- the two policies that a method compares, see :data:`rlstab.core.method_checks.DRIFT` ------------------------------

#: For each pair the settings with which the two policies can differ, where a run leaves these settings open.
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "live": {},
    "step": {"refresh": "step"},
    "sampler": {"old_logprobs": "recompute"},
    "start": {"old_logprobs": "recompute", "refresh": "step"},
}


def why_idle(drift: str, optimisation: parts.OptimisationSettings) -> str | None:
    """Why the two policies that a method compares are the same in a run, with the cure; None if they can differ.

    Args:
        drift: one of :data:`rlstab.core.method_checks.DRIFT`.
        optimisation: resolved settings.
    """
    recomputed, fresh = optimisation.old_logprobs == "recompute", optimisation.refresh == "step"
    moves = optimisation.optimizer_steps_per_rollout > 1 or optimisation.old_logprobs == "rollout"
    differ, reason = {
        "live": (moves, "the ratio is 1 with one optimizer step per rollout. Set epochs, or old_logprobs: rollout."),
        "step": (fresh and moves, "it compares old_logprobs with itself. Set refresh: step, and epochs above 1."),
        "sampler": (recomputed, "it compares the sampler with itself. Set old_logprobs: recompute."),
        "start": (recomputed or fresh, "it compares the sampler with itself. Set refresh: step."),
    }[drift]
    return None if differ else reason
