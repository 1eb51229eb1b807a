"""Sign weights: learn more from mistakes than from successes, or the reverse (W-REINFORCE, NSR, PSR)."""

from typing import Annotated

import torch

from rlstab import About, Mean, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective


class SignWeights(TokenObjective):
    """Weigh a token by the sign of its advantage: one weight for rewarded tokens, one for punished ones.

    Problem:
        Rewarding correct responses moves mass onto what was sampled, at the cost of every alternative, and diversity
        falls. Punishing wrong responses only takes mass away from what was sampled, and hands it to the alternatives in
        proportion to what the policy already thinks of them. The paper finds that the second alone keeps entropy and
        pass@k high, and that a little of the first on top is better still.

    Equation:
        With A_t = ``advantages``:

            w_t = lambda_+ where A_t > 0,   lambda_- where A_t < 0,   1 elsewhere
            L   = sum_t c_t w_t surrogate_t

        lambda_+ is ``positive``, lambda_- is ``negative``; c_t are the coefficients of the aggregation. With
        advantages of 1 for a correct response and -1 for a wrong one this is exactly

            W-REINFORCE   positive 0.1, negative 1
            NSR           positive 0,   negative 1
            PSR           positive 1,   negative 0

    Reads:
        - ``advantages`` (n,), unitless: only the sign, before any bonus.

    Writes:
        - ``weight``: Multiply the policy term of a token by ``positive`` where its advantage is positive, and by
          ``negative`` where it is negative. The divisor stays.

    Denominator:
        untouched: a token of weight 0 still counts, as every response does in the paper's expectation.

    Parameters:
        - ``positive`` (lambda_+): float in [0, inf), default 0.1. W-REINFORCE, the paper; its code's own default is 1,
          which is plain REINFORCE.
        - ``negative`` (lambda_-): float in [0, inf), default 1.0. The paper.

    State:
        none

    Deviations:
        - From the paper: its rewards are 0 and 1, without a baseline; it makes 1 and -1 of them. With a group baseline
          the weights are the same and the method is another. At a pass rate p, advantages in {1, -1} reward with a mass
          of lambda_+ p and punish with one of lambda_- (1 - p), so hard prompts mostly punish and easy ones mostly
          reward. Advantages minus a mean have the same mass on both sides, p (1 - p), whatever p is, and a group that
          is all wrong, from which NSR learns most, gives nothing.
        - From its code: for PSR and NSR it drops the responses of the other class from the batch, so that they leave
          the denominator too: a gradient 1 / p or 1 / (1 - p) times larger at the same learning rate. For W-REINFORCE
          it keeps them, as here.
        - From its code: a reward that is neither 0 nor 1 stays as it is there. Here the sign of the advantage decides.

    Pitfalls:
        The estimators of rlstab's own trainer all have a group baseline. For the published methods, pass advantages of
        1 and -1 in your own loop. Punishment alone is reported to harm the format if kept up for long and, later,
        accuracy.

    Interacts:
        - With ``positive`` 0, ``sign_weights`` removes the gradient of every rewarded token that ``s2t`` or ``stare``
          would act on.

    Limits:
        - An optimizer step in which every advantage is 0 has no weight but 1.

    Example:
        A correct and a wrong response of one token each, advantages 1 and -1. W-REINFORCE weighs them 0.1 and 1, NSR 0
        and 1; both tokens count in the divisor.

        >>> import torch
        >>> from rlstab import PolicyOutputs, SignWeights, TokenBatch, compose
        >>> old = torch.full((2, 1), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 1), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> for method in (SignWeights(), SignWeights(positive=0.0)):
        ...     live = old.clone().requires_grad_()
        ...     compose(method)(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        ...     print([round(g, 4) + 0.0 for g in live.grad.flatten().tolist()])
        [-0.05, 0.5]
        [0.0, 0.5]

    Source:
        X. Zhu et al., "The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning", 2025,
        arXiv 2506.01347. Reference code: TianHongZXY/RLVR-Decomposed ``verl/trainer/ppo/core_algos.py``
        (``compute_psr_nsr_outcome_advantage``), ``verl/trainer/ppo/ray_trainer.py`` (the subset of the batch).
    """

    about = About(
        addresses={"sample", "exploration"},
        no_op_at=(NoOpAt({"positive": 1.0, "negative": 1.0}, "every weight is 1."),),
    )

    name = "sign_weights"
    writes = {"weight"}

    positive: Annotated[float, Range(ge=0)] = 0.1
    negative: Annotated[float, Range(ge=0)] = 1.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        weight = torch.where(batch.rewarded, self.positive, torch.ones_like(batch.advantages))
        weight = torch.where(batch.punished, self.negative, weight)
        return Terms(weight=weight, report={"weight": Mean.of(weight)})
