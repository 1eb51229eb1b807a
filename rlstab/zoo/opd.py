"""OPD: a teacher grades every token of the student's own responses (on-policy distillation)."""

from typing import Annotated

from rlstab import About, Mean, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective


class OPD(TokenObjective):
    """Add to a token's advantage its log-prob under a teacher minus that under the policy (on-policy distillation).

    Problem:
        A verifiable reward says of a whole response that it is right or wrong. Hundreds of tokens share that one bit,
        and a prompt on which all responses fail teaches nothing. Imitating the responses of a better model gives a
        signal on every token, but on states that the student itself never visits. On-policy distillation lets the
        student sample and the teacher grade each of its tokens.

    Equation:
        With q the teacher's probability of the token and p_old that of the policy that the ratio divides by:

            A'_t = A_t + c (ln q_t - ln p_old,t)
                 = c (ln q_t - ln p_old,t)                                  alone: true

        c is ``coefficient``. In expectation over the samples of p_old, the second is the gradient of the reverse
        divergence KL(p || q) of each token, without its effect on later tokens.

    Reads:
        - ``teacher_logprobs`` (n,), nats: of the sampled tokens, under the teacher, at the temperature of training.
        - ``old_logprobs`` (n,), nats: of the same tokens.

    Writes:
        - ``bonus``: Add to the advantage of a token ``coefficient`` times the log-ratio of the teacher to the old
          policy; in place of the advantage: ``alone``.

    Denominator:
        untouched: every token still counts.

    Parameters:
        - ``coefficient`` (c): float in [0, inf), default 1.0. tinker-cookbook's and slime's default.
        - ``alone``: bool, default False. Leave the reward out, as in pure distillation.

    State:
        none

    Deviations:
        - From tinker-cookbook: its student log-probs are those that the sampler reported, here those that the ratio
          divides by; they are the same under ``old_logprobs: rollout``. Its sum over later tokens, discounted by
          ``kl_discount_factor``, is off there by default and not offered.
        - From verl: it offers estimates of the divergence as a loss, and from the largest log-probs of each position.
          Those need K log-probs a token.

    Pitfalls:
        The gap is unbounded: a token that the teacher finds impossible has an advantage of -20 and more, and outvotes a
        reward of 1. Teacher and student must share the tokenizer. A teacher that is only confident in its own style
        teaches style. Where the student has one answer and the teacher another, the gap on the first differing token is
        large, and all later tokens are graded in a context that the teacher would not have reached.

    Interacts:
        - ``opd`` and ``clip_higher``: the ratio's trust region bounds how far one rollout is followed.
        - ``opd`` adds to the advantage that ``rlsd`` scales; both together count the teacher twice.

    Limits:
        - Where the teacher is the policy that the ratio divides by.

    Example:
        A response with advantage 1. The teacher finds its first token four times as likely as the student, and its
        second half as likely: 1 + ln 4 and 1 - ln 2.

        >>> import torch
        >>> from rlstab import OPD, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.2, 0.4]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 2),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=old,
        ...     teacher_logprobs=torch.tensor([[0.8, 0.2]]).log(),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(OPD())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad[0].tolist()]
        [-1.1931, -0.1534]

    Source:
        K. Lu and Thinking Machines Lab, "On-Policy Distillation", 2025, a blog post. Reference code:
        thinking-machines-lab/tinker-cookbook ``tinker_cookbook/distillation/train_on_policy.py``
        (``incorporate_kl_penalty``). Common code: THUDM/slime ``--use-opd``, NVIDIA-NeMo/RL
        ``nemo_rl/algorithms/opd.py``, modelscope/ms-swift ``swift/rl_core/advantage.py``.
    """

    about = About(
        addresses={"sample"},
        no_op_at=(NoOpAt({"coefficient": 0.0, "alone": False}, "every bonus is 0."),),
        exceptions={"zero advantage": "the teacher grades a token whatever its response earned."},
    )

    name = "opd"
    needs = {"old_logprobs", "teacher_logprobs"}
    writes = {"bonus"}

    coefficient: Annotated[float, Range(ge=0)] = 1.0
    alone: bool = False

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        gap = batch.signal("teacher_logprobs") - batch.old_logprobs
        bonus = self.coefficient * gap
        return Terms(bonus=bonus - batch.advantages if self.alone else bonus, report={"gap": Mean.of(gap)})
