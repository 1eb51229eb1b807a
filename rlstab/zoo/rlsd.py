"""RLSD: a teacher redistributes the advantage of a response over its tokens and never turns it around."""

from typing import Annotated

import torch

from rlstab import About, Mean, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import bounded_exp


class RLSD(TokenObjective):
    """Scale the advantage of a token by how much a teacher agrees with its sign (RLVR with self-distillation).

    Problem:
        A reward gives all tokens of a response the same credit. The policy itself, shown the reference answer, knows
        better which tokens led there. Distilling from it directly teaches the policy to act as if it had seen the
        answer, and long runs collapse. RLSD takes the direction only from the reward, and from the informed teacher
        only how large the step of each token is.

    Equation:
        With q the teacher's probability of the token, p_old that of the policy that the ratio divides by, A the
        advantage:

            w_t  = exp(sign(A) (ln q_t - ln p_old,t))
            s_t  = (1 - m) + m clip(w_t, 1 - e, 1 + e)
            A'_t = s_t A_t

        m is ``mix``, e is ``clip``. In a rewarded response, tokens that the teacher finds likelier count more; in a
        punished one, those that it finds less likely. With ``punished_only`` s is 1 where A is at least 0.

    Reads:
        - ``teacher_logprobs`` (n,), nats: of the sampled tokens, under the teacher. The paper's teacher is the policy
          itself with the reference answer in its prompt.
        - ``old_logprobs`` (n,), nats: of the same tokens.

    Writes:
        - ``weight``: Weigh a token by 1 - ``mix`` plus ``mix`` times the ratio of the teacher to the old policy,
          inverted where it is punished, within 1 - ``clip`` and 1 + ``clip``. Punished tokens only: ``punished_only``.

    Denominator:
        untouched: every token still counts.

    Parameters:
        - ``mix`` (m): float in [0, 1], default 0.5. The published first value; 0 is GRPO.
        - ``clip`` (e): float in [0, 1], default 0.2. The published value.
        - ``punished_only``: bool, default False. ms-swift's ``rlsd_negative_only``.

    State:
        none

    Deviations:
        - From the paper: it moves m in a line to 0 over the first steps, so that training ends as GRPO. Here m stays; a
          schedule over steps is not offered. ms-swift's is off by default.
        - From the paper: its last equation takes the smaller of w A and clip(w) A. Here, as in its equation of the
          advantage and in all code, w is clipped on both sides.

    Pitfalls:
        The mean of s is not 1: a teacher that finds all tokens likelier, as an informed one does, makes the step of
        rewarded responses larger and that of punished ones smaller. Look at ``rlsd/weight``. With the clip at 0.2 most
        weights are at a bound as soon as the gap exceeds 0.2 nats.

    Interacts:
        - ``rlsd`` scales the policy term before ``clip_higher`` bounds the ratio, which the scale does not change.

    Limits:
        - Where the teacher is the policy that the ratio divides by.

    Example:
        A rewarded and a punished response, each with a token that the teacher finds twice and one that it finds half as
        likely. s is 1.1 and 0.9, and the other way round.

        >>> import torch
        >>> from rlstab import RLSD, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     teacher_logprobs=torch.tensor([[0.8, 0.2]] * 2).log(),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(RLSD())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.275, -0.225, 0.225, 0.275]

    Source:
        C. Yang et al., "Self-Distilled RLVR", 2026, arXiv 2604.03128, equations 13 to 16. Its own code was not found.
        Common code: ZJU-REAL/SDAR ``verl/trainer/ppo/rlsd_utils.py`` (``compute_rlsd_token_advantage``; m from 0.5 to 0
        over 50 steps, 100 in its launch files), and modelscope/ms-swift ``swift/rl_core/advantage.py``
        (``apply_rlsd_reweight``).
    """

    about = About(
        addresses={"sample"},
        no_op_at=(NoOpAt({"mix": 0.0}, "every weight is 1."),),
    )

    name = "rlsd"
    needs = {"old_logprobs", "teacher_logprobs"}
    writes = {"weight"}

    mix: Annotated[float, Range(ge=0, le=1)] = 0.5
    clip: Annotated[float, Range(ge=0, le=1)] = 0.2
    punished_only: bool = False

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        gap = batch.signal("teacher_logprobs") - batch.old_logprobs
        agrees = bounded_exp(batch.advantages.sign() * gap).clamp(1 - self.clip, 1 + self.clip)
        weight = (1 - self.mix) + self.mix * agrees
        if self.punished_only:
            weight = torch.where(batch.advantages < 0, weight, 1.0)
        return Terms(weight=weight, report={"weight": Mean.of(weight)})
