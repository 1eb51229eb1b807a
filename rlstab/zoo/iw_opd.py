"""IW-OPD: on-policy distillation that counts early tokens more than those after a disagreement."""

from typing import Annotated

from rlstab import About, Mean, Range, Settled, State, Terms, TokenBatch, TokenObjective


class IWOPD(TokenObjective):
    """Let a teacher grade each token, and count a token less the more teacher and policy disagreed before it.

    Problem:
        On-policy distillation grades a token in the context that the student has written. The more the teacher
        disagreed with that context, the less it says what the teacher would do, and the more its grades depend on
        mistakes that were already graded. IW-OPD counts the early tokens most, and those after much disagreement least.

    Equation:
        With q the teacher's probability of the token, p_old that of the policy that the ratio divides by:

            a_t  = ln q_t - ln p_old,t
            w_t  = 1 + g (1 - sum_{s < t} |a_s| / sum_s |a_s|)                the sums over the response
            A'_t = w_t a_t

        g is ``gain``. w falls from 1 + g on the first token to nearly 1 on the last. The reward is left out.

    Reads:
        - ``teacher_logprobs`` (n,), nats: of the sampled tokens, under the teacher.
        - ``old_logprobs`` (n,), nats: of the same tokens.

    Writes:
        - ``bonus``: Replace the advantage of a token by the log-ratio of the teacher to the old policy, times 1 plus
          ``gain`` times the share of its response's disagreement that is still to come.

    Denominator:
        untouched: every token still counts.

    Parameters:
        - ``gain`` (g): float in [0, inf), default 0.5. TRL's default. 0 is ``opd`` with ``alone``.

    State:
        none

    Deviations:
        - From TRL: its gradient is that of the log-prob, here that of the ratio, which is the same at a ratio of 1;
          with several optimizer steps per rollout the latter corrects for the policy having moved.

    Pitfalls:
        All tokens of a response weigh at least 1 and at most 1 + g: it is a preference and not a filter. A single
        impossible token takes most of the sum, and the weights fall there at once.

    Interacts:
        - ``iw_opd`` replaces the advantage, so estimators of it and methods that only scale its sign do nothing to it.

    Limits:
        - Where every advantage is 0 and the teacher is the policy that the ratio divides by.

    Example:
        Two tokens, which the teacher finds twice and half as likely: |a| is the same, and w is 1.5 and 1.25.

        >>> import torch
        >>> from rlstab import IWOPD, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 2),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=old,
        ...     teacher_logprobs=torch.tensor([[0.8, 0.2]]).log(),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(IWOPD())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad[0].tolist()]
        [-0.5199, 0.4332]

    Source:
        No paper was found. Reference code: huggingface/trl ``trl/experimental/iw_opd/iw_opd_trainer.py``
        (``_compute_iw_opd_loss``, release 1.16).
    """

    about = About(
        addresses={"sample"},
        exceptions={"zero advantage": "the teacher grades a token whatever its response earned."},
    )

    name = "iw_opd"
    needs = {"old_logprobs", "teacher_logprobs"}
    writes = {"bonus"}

    gain: Annotated[float, Range(ge=0)] = 0.5

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        gap = batch.signal("teacher_logprobs") - batch.old_logprobs
        size = gap.double().abs()
        before, total = batch.running_total(size) - size, batch.spread(batch.sequence_total(size))
        # without any disagreement in the response every gap is 0, whatever its weight is
        weight = 1 + self.gain * (1 - before / total.clamp(min=1e-300))
        bonus = weight.to(gap.dtype) * gap - batch.advantages
        return Terms(bonus=bonus, report={"gap": Mean.of(gap), "weight": Mean.of(weight)})
