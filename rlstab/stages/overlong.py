"""The soft overlong punishment: answers that come near the limit lose reward (DAPO)."""

from collections.abc import Mapping
from typing import Annotated

from torch import Tensor

from rlstab import Mean, Range, Settled, State
from rlstab.errors import OutOfRange
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import RewardShaper


class Overlong(RewardShaper):
    """Reduce the reward of responses that come near the length limit, more so the closer they come.

    Problem:
        An answer that is cut off at the limit is scored as wrong, however good it was so far. That reward does not tell
        the policy how much too long it was, and an answer one token shorter may have scored 1, which is noise. A
        penalty that grows over the last tokens before the limit shows where the limit is.

    Equation:
        With L_i = ``lengths`` + ``given``, the tokens of the answer, and L_max = ``limit``:

            r_i <- r_i - penalty * min(max((L_i - (L_max - buffer)) / buffer, 0), 1)

        ``buffer`` is the paper's L_cache, ``penalty`` is 1 there.

    Reads:
        - ``lengths`` (S,), tokens: those that were sampled, the end included.
        - ``given`` (S,), tokens: where a branch starts; these tokens are part of its answer.
        - ``limit``, tokens: ``rollout.max_new_tokens``.

    Returns:
        - (S,) numbers in [-penalty, 0], to be added to the rewards.

    Parameters:
        - ``buffer`` (L_cache): int in [1, inf), required. Tokens before the limit over which the penalty grows, at most
          ``limit``. The paper has 4,096 of 20,480, a fifth.
        - ``penalty``: float in [0, inf), default 1.0. What an answer of the full length loses. Paper; its code calls it
          the penalty factor.

    State:
        none

    Deviations:
        - From the paper: none. It treats an answer beyond the limit as a separate case, which cannot occur with a
          sampler that stops there.
        - From its code (verl): none; the lower bound is left out for the same reason.

    Interacts:
        `truncated_mask` takes answers that were cut off out of the loss, and with them most of what this stage takes
        reward from; the group they are in still sees their rewards. `laconic` also charges for length: the two add up.
        An estimator that divides by the standard deviation of the group (`grpo` with ``std``) turns a group in which
        all are right and one is a little too long into one with a full-sized advantage. With rewards of 0 and 1, a
        penalty of 1 makes a right answer of full length worth as much as a short wrong one.

    Limits:
        With ``penalty`` 0 it changes nothing, nor where no answer is longer than ``limit`` - ``buffer``.

    Example:
        A limit of 20 tokens and a buffer of 8: the penalty begins beyond 12 tokens. An answer of 14 loses 2/8, one of
        20 loses 1.

        >>> from rlstab.stages.overlong import Overlong
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> from rlstab.core.stats import Settled
        >>> lengths, ended = [5.0, 12.0, 14.0, 20.0], [True, True, True, False]
        >>> batch = ResponseBatch.of([1.0, 1.0, 1.0, 1.0], lengths=lengths, ended=ended)
        >>> Overlong(buffer=8).shape(batch, Settled(), {}).tolist()
        [0.0, 0.0, -0.25, -1.0]

    Source:
        Q. Yu, Z. Zhang, R. Zhu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv
        2503.14476, section 3.4, eq. 13. Reference code: verl, DAPO reward manager.
    """

    name = "overlong"

    buffer: Annotated[int, Range(ge=1)]
    penalty: Annotated[float, Range(ge=0)] = 1.0

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        if len(responses) and self.buffer > responses.limit:
            raise OutOfRange(
                f"'{self.name}': buffer = {self.buffer} is more than the {responses.limit} tokens that an answer may "
                f"have, so that even an empty answer would be punished. Set it to at most rollout.max_new_tokens; a "
                f"fifth of that is {max(1, responses.limit // 5)}."
            )
        excess = responses.lengths + responses.given - (responses.limit - self.buffer)
        # not -x: that makes -0.0 of an answer that loses nothing
        return 0.0 - self.penalty * (excess / self.buffer).clamp(0, 1)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        shaped = self.shape(responses, stat, state)
        return {"penalty": Mean.of(-shaped), "share": Mean.of(shaped < 0)}
