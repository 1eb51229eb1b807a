"""Dynamic sampling: learn only from groups in which something differs (DAPO)."""

from typing import Annotated, Literal

from torch import Tensor

from rlstab import Mean, Range, Settled, Stat, State
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Expansion, RolloutExpander


class DynamicSampling(RolloutExpander):
    """Drop groups whose rewards are all equal, and sample as many new prompts instead.

    Problem:
        A group in which every answer is right, or every answer wrong, has no advantage and teaches nothing. The better
        the policy, the more such groups there are: each optimizer step rests on fewer and fewer prompts, and its
        gradient gets noisier. Dynamic sampling replaces these groups until the optimizer step has as many live groups
        as requested.

    Equation:
        Of a group g with rewards R_i = ``rewards``:

            even(g)  =  max R_i == min R_i
            drop     =  the responses of even groups
            fresh    =  the number of even groups that no branch made, over all parts and ranks

        Fresh prompts are answered, scored and filtered the same way, at most K = ``max_refills`` times.

    Reads:
        - ``rewards`` (S,): shaped, or as the scorer gave them: ``raw_rewards`` (S,).
        - ``group_ids`` (S,): which responses are compared.
        - ``given`` (S,): 0, or where a branch of ``deep_grpo`` starts.

    Returns:
        - ``drop``: all responses of even groups, those of branches included.
        - ``fresh``: as many prompts as had an even group. A branch has no separate prompt, so no prompt replaces it.

    Parameters:
        - ``max_refills`` (K): int in [0, inf), default 9. The recipe that ships with verl allows 10 batches, the first
          one included; the paper samples until the batch is full.
        - ``rewards``: 'shaped' | 'raw', default 'shaped'. Which rewards have to differ. 'shaped' are those that the
          advantages are made of. The recipe's metric is the accuracy, before the length penalty: 'raw'.

    State:
        none

    Deviations:
        - From the paper: its condition is that some answers are right and some wrong. Here it is that some rewards
          differ, which is the same for rewards with two values.
        - From its code: it samples three times the prompts of an optimizer step and throws the surplus away. Here
          nothing live is thrown away: every refill asks for exactly what is missing.
        - From its code: if the batch is not full after the last refill, it stops with an error. Here the run learns
          from the groups that it has, and the report says how many.
        - From its code: it keeps a group of one answer. Here such a group counts as even, because there is nothing to
          compare.

    Interacts:
        - with ``overlong``, ``laconic`` and other shapers: with ``rewards="shaped"`` a penalty makes a group uneven
          that is all right or all wrong. It is kept, and if the estimator divides by the standard deviation, the
          penalty becomes its whole signal. ``rewards="raw"`` drops it.
        - with ``deep_grpo``: list it before this stage. After this stage no prompt is left on which every answer
          failed, and those are what branches are for.
        - with ``goldilocks``, ``paced``: a selector learns from dropped responses too, and its choice leaves fewer of
          them to replace.
        - with estimators that compare across the rollout, such as ``reinforce_pp``: an even group still has a gradient
          there, and dropping it removes the easiest and the hardest prompts from the mean.

    Limits:
        - ``max_refills=0`` drops without refilling: fewer groups, the same gradient up to the divisor.
        - A rollout without even groups is not changed.
        - ``rollout.group`` of 1 leaves nothing to learn from.

    Example:
        Three groups of two. The first is all right and the third, a branch, all wrong: both are dropped, and one fresh
        prompt is asked for.

        >>> from rlstab.core.comm import LocalComm
        >>> from rlstab.core.method import measure_all
        >>> rewards, groups = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]
        >>> batch = ResponseBatch.of(rewards, groups, given=[0, 0, 0, 0, 4, 4], pivot=[0.0, 0.0, 0.0, 0.0, 0.5, 0.5])
        >>> stage = DynamicSampling()
        >>> stat, state = measure_all(stage, [batch], stage.init_state(), LocalComm())
        >>> asked = stage.expand(batch, stat, state, seed=0)
        >>> asked.drop.tolist(), asked.fresh
        ([True, True, False, False, True, True], 1)

    Source:
        Q. Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv 2503.14476 (section
        3.2, eq. 11). Reference code: verl-project/verl-recipe ``dapo/dapo_ray_trainer.py``.
    """

    name = "dynamic_sampling"

    max_refills: Annotated[int, Range(ge=0)] = 9
    rewards: Literal["shaped", "raw"] = "shaped"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"raw_rewards"} if self.rewards == "raw" else ())

    @property
    def rounds(self) -> int:
        """One more than the number of refills: the last refill is filtered too."""
        return self.max_refills + 1

    def measure(self, part: ResponseBatch) -> Stat:
        even, branch = self._even(part)[part.first], (part.given > 0)[part.first]
        return {"even": Mean.of(even, ~branch)}

    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        fresh = round(float(stat.mean("even").total)) if self.max_refills else 0
        return Expansion(drop=self._even(responses), fresh=fresh)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> dict[str, Mean]:
        """The dropped shares of the rollout, and the number of responses sampled for each one learnt from."""
        even, branch = self._even(responses), (responses.given > 0)[responses.first]
        return {
            "dropped": Mean.of(even[responses.first], ~branch),
            "dropped_branches": Mean.of(even[responses.first], branch),
            "dropped_groups": Mean.scalar(float(stat.mean("even").total)),
            "sampled_per_learnt": Mean(Mean.of(even).count, Mean.of(~even).total),
        }

    def _even(self, responses: ResponseBatch) -> Tensor:
        """``(S,)`` bool, True in a group without a difference."""
        if self.rewards == "shaped":
            return responses.even
        return responses.reshaped(responses.evidence("raw_rewards").double()).even
