"""What the trainer can tell a stage beyond the basic fields of a response, checked before anything runs."""

from __future__ import annotations

from rlstab.errors import MissingSignal, did_you_mean
from rlstab.signals import SIGNAL_NAMES
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, Stage

#: Evidence that a task gives, where it knows blocks.
BLOCKS = frozenset({"block_ids", "block_rewards", "block_outcomes"})

#: What is known once responses are sampled and scored.
SAMPLED = (SIGNAL_NAMES - {"logprobs"}) | BLOCKS | {"raw_rewards", "rollout_logprobs"}

#: What only the policy that learns can tell, just before it learns.
LEARNING = frozenset({"logprobs", "squared_gradient"})


def given_to(stage: Stage) -> frozenset[str]:
    """The evidence that the trainer has for a stage of this kind."""
    if isinstance(stage, AdvantageEstimator):
        return SAMPLED | LEARNING
    return SAMPLED | {"prompt_features"} if isinstance(stage, PromptSelector) else SAMPLED


def require_evidence(pipeline: Pipeline) -> None:
    """Refuse a stage that reads what the trainer does not have.

    Raises:
        MissingSignal: names the stage and the evidence.
    """
    for one in pipeline:
        given = given_to(one)
        for name in sorted(one.needs - given):
            why = (
                "is known only when a rollout is learnt, and only an advantage estimator can read it. Remove the stage."
                if name in LEARNING
                else f"the trainer does not have. {did_you_mean(name, given)}"
            )
            raise MissingSignal(f"the stage '{one.name}' reads '{name}', which {why}")
