"""LACONIC: a price on tokens beyond a budget, which rises while answers are too long on average."""

import math
from collections.abc import Mapping
from typing import Annotated

from torch import Tensor

from rlstab import Mean, Range, Settled, Stat, State
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import RewardShaper


class Laconic(RewardShaper):
    """Penalise tokens beyond a length budget, at a price that rises while the mean length is above it.

    Problem:
        Training makes answers longer, whether needed or not. A fixed length penalty has to be tuned: if it is too weak
        it does nothing, and if it is too strong, short wrong answers pay off. Here the mean length is a constraint, and
        the price of a token is its Lagrange multiplier: it rises while the constraint is violated, and falls back to
        zero once it holds.

    Equation:
        With L_i = ``lengths`` + ``given``, the tokens of the answer, B = ``budget`` and lambda = ``multiplier``:

            r_i    <- r_i - min(lambda * max((L_i - B) / B, 0), most) - cut * (not ended_i)
            lambda <- min(max(lambda + step * (mean(L) / B - 1), floor), ceiling)        after the rollout

        The price is only for the tokens beyond the budget; the step follows the signed mean over all responses of the
        rollout, so that short answers make up for long ones. ``step`` is the paper's eta, ``ceiling`` its Lambda,
        ``most`` and ``cut`` are `penalty_cap` and `hit_cap` of its code.

    Reads:
        - ``lengths`` (S,), tokens: those that were sampled, the end included.
        - ``given`` (S,), tokens: where a branch starts; these tokens are part of its answer.
        - ``ended`` (S,): False where the answer was cut off.

    Returns:
        - (S,) numbers in [-(most + cut), 0], to be added to the rewards.

    Parameters:
        - ``budget`` (B): float in (0, inf), required. Tokens: 1500 (R1-Distill-Qwen-1.5B), 2000 (DeepScaleR-1.5B) and
          2500 (Qwen3-32B) in the published recipes.
        - ``step`` (eta): float in [0, inf), default 0.002. How much the multiplier rises in a rollout whose mean length
          is twice the budget. Recipe for R1-Distill-Qwen-1.5B. From 0 to the ceiling takes 50 such rollouts; a short
          run needs a larger step.
        - ``floor``: float in [0, inf), default 0.0. Where the multiplier begins and what it never falls below; same
          recipe.
        - ``ceiling`` (Lambda): float in [0, inf), default 0.1. At least ``floor``; same recipe.
        - ``most``: float in [0, inf), default 0.4. What an answer can lose for its length; same recipe. Keep ``most`` +
          ``cut`` below what a right answer earns beyond a wrong one, so that a long right answer stays ahead of a short
          wrong one.
        - ``cut``: float in [0, inf), default 0.1. What an answer loses in addition if it was cut off; same recipe.

    State:
        - ``multiplier``: a number, ``floor`` at first. Changes after each rollout with responses, dropped ones
          included.

    Deviations:
        - From the paper: ``floor``, ``most`` and ``cut`` are those of the published recipes; its price has none of
          them.
        - From its code: an answer that ends by itself with the last allowed token is not charged ``cut``; there it is,
          because the code compares the length with the limit. The published snapshot of 2025 is an older form: without
          the hinge, ``cut`` scaled by the multiplier, and no ceiling.

    Interacts:
        An estimator that divides by the standard deviation of the group (`grpo` with ``std``) cancels the price in a
        group in which all are right: whatever the multiplier, length is then the whole advantage. `dr_grpo` and `rloo`
        keep its size. `overlong` charges for length too: the two add up.

    Limits:
        With ``step``, ``floor`` and ``cut`` 0, or with ``most`` and ``cut`` 0, it changes nothing; nor does it while
        the multiplier is 0 and no answer was cut off.

    Example:
        A budget of 10 tokens and a multiplier of 0.1. An answer of 20 is one budget too long and loses 0.1; one of 70
        would lose 0.6 and loses no more than 0.4, and another 0.1 because it was cut off. The mean length of 30 is
        three budgets, so the multiplier rises by 0.002 * (3 - 1).

        >>> from rlstab.core.comm import LocalComm
        >>> from rlstab.core.method import measure_all
        >>> from rlstab.stages.laconic import Laconic
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> lengths, ended = [10.0, 20.0, 20.0, 70.0], [True, True, True, False]
        >>> batch = ResponseBatch.of([1.0, 1.0, 1.0, 1.0], lengths=lengths, ended=ended)
        >>> stage = Laconic(budget=10.0, floor=0.1, ceiling=0.2)
        >>> state = stage.init_state()
        >>> stat, after = measure_all(stage, [batch], state, LocalComm())
        >>> [round(value, 6) for value in stage.shape(batch, stat, state).tolist()]
        [0.0, -0.1, -0.1, -0.5]
        >>> round(after["multiplier"], 6)
        0.104

    Source:
        C. Liu, Y. Zhao, L. Liu, Y. Ye, C. Szepesvari, L. F. Yang, "LACONIC: Length-Aware Constrained Reinforcement
        Learning for LLM", 2026, arXiv 2602.14468. Reference code: Debugger001/LACONIC-LLM, earlier Length-Aware-LLM.
    """

    name = "laconic"
    ascending = (("floor", "ceiling"),)

    budget: Annotated[float, Range(gt=0)]
    step: Annotated[float, Range(ge=0)] = 0.002
    floor: Annotated[float, Range(ge=0)] = 0.0
    ceiling: Annotated[float, Range(ge=0)] = 0.1
    most: Annotated[float, Range(ge=0)] = 0.4
    cut: Annotated[float, Range(ge=0)] = 0.1

    def init_state(self) -> State:
        return {"multiplier": float(self.floor)}

    def measure(self, responses: ResponseBatch) -> Stat:
        return {"length": Mean.of(_lengths(responses))}

    def advance(self, state: State, stat: Settled) -> State:
        excess = stat.mean("length").value / self.budget - 1
        if math.isnan(excess):  # no response on any rank
            return state
        moved = state["multiplier"] + self.step * excess
        return {"multiplier": min(max(moved, float(self.floor)), float(self.ceiling))}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        # not -x: that makes -0.0 of an answer that loses nothing
        excess = ((_lengths(responses) - self.budget) / self.budget).clamp(min=0)
        price: Tensor = (state["multiplier"] * excess).clamp(max=self.most)
        return 0.0 - price - self.cut * (~responses.ended).double()

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        return {"multiplier": Mean.scalar(state["multiplier"]), "penalty": Mean.of(-self.shape(responses, stat, state))}


def _lengths(responses: ResponseBatch) -> Tensor:
    """``(S,)``: tokens of each answer, also those that a branch was given."""
    return responses.lengths + responses.given
