"""SDAR: a gated pull towards the tokens that a teacher finds likelier, next to the reward's gradient."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, NoOpAt, Penalty, PolicyOutputs, Range, Settled, State, Terms, TokenBatch, TokenObjective


class SDAR(TokenObjective):
    """Add a distillation loss whose gate opens where the teacher finds the token likelier than the policy.

    Problem:
        A teacher with privileged context, such as a skill or a hint, helps on tokens that it endorses. Its rejections
        are less reliable: the hint may be irrelevant, and over many turns a wrong rejection compounds. SDAR keeps the
        reward's gradient as it is, and adds a distillation term that counts endorsed tokens fully and fades out
        rejected ones.

    Equation:
        With q the teacher's probability of the token and p the live one:

            gate_t = sigmoid(b (ln q_t - ln p_t))                           without gradient
            L      = L_policy + c / N sum_t gate_t (ln q_t - ln p_t)        over all N tokens

        b is ``sharpness``, c is ``coefficient``.

    Reads:
        - ``teacher_logprobs`` (n,), nats: of the sampled tokens, under the teacher.

        Its penalty reads the live log-probs.

    Writes:
        - ``penalties``: Add ``coefficient`` times the log-ratio of the teacher to the live policy, on every token,
          times the sigmoid of ``sharpness`` times that log-ratio, which has no gradient.

    Denominator:
        untouched: the penalty is divided by all tokens, with the aggregation of the policy term.

    Parameters:
        - ``coefficient`` (c): float in [0, inf), default 0.1. The reference code's default; its launch files for
          ALFWorld, WebShop and Search-QA write 0.01.
        - ``sharpness`` (b): float in (0, inf), default 5.0. The reference code's default, and that of its launch files.

    State:
        none

    Deviations:
        - From the paper: of its three gates (the gap, the entropy, and either) only that of the gap is offered, which
          is the one in the reference code.
        - From the reference code: it averages the term over each micro-batch, here over the optimizer step. The term
          follows the aggregation of the policy term there too; in ms-swift it stays a mean over tokens.

    Pitfalls:
        Every gradient of the term points up: it raises the log-prob of each sampled token, by gate, also of tokens in
        wrong responses. A gap of 0 has the gate 1/2, so that a teacher equal to the policy still sharpens what was
        sampled. In a group with only wrong answers this is the only gradient.

    Interacts:
        - ``sdar`` is not weighted or masked by other methods, as a penalty never is.

    Example:
        Two tokens, which the teacher finds twice and half as likely. The gates are 1 / (1 + 2^-5) and 1 / (1 + 2^5).

        >>> import torch
        >>> from rlstab import SDAR, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 2),
        ...     advantages=torch.zeros(1),
        ...     old_logprobs=old,
        ...     teacher_logprobs=torch.tensor([[0.8, 0.2]]).log(),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(SDAR())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad[0].tolist()]
        [-0.0485, -0.0015]

    Source:
        Z. Lu et al., "Self-Distilled Agentic Reinforcement Learning", 2026, arXiv 2605.15155. Reference code:
        ZJU-REAL/SDAR ``verl/trainer/ppo/sdar_utils.py`` (``compute_sdar_loss``). Common code: modelscope/ms-swift
        ``swift/rl_core/advantage.py`` (``compute_sdar_loss``).
    """

    about = About(addresses={"sample"}, no_op_at=(NoOpAt({"coefficient": 0.0}, "0 times the term."),))

    name = "sdar"
    needs = {"teacher_logprobs"}
    writes = {"penalties"}

    coefficient: Annotated[float, Range(ge=0)] = 0.1
    sharpness: Annotated[float, Range(gt=0)] = 5.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        teacher = batch.signal("teacher_logprobs")

        def gated(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            gate = torch.sigmoid(self.sharpness * (teacher - anchor.logprobs))
            return gate * (teacher - policy.logprobs)

        return Terms(penalties={"": Penalty(self.coefficient, gated)})
