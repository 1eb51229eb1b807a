"""M2PO: drop the few tokens that are furthest from the policy that sampled, until the rest fits a budget."""

from typing import Annotated

from torch import Tensor

from rlstab import About, Mean, NoOpAt, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective


class M2PO(TokenObjective):
    """Set the weight of the tokens furthest from the sampler to 0, until the mean square of the rest is small.

    Problem:
        With data that is hundreds of updates old, a clip stops the tokens that carry the most information; without one,
        training does well for a while and then collapses. The mean log-ratio hides what happens, because signs cancel;
        the mean square does not, and it bounds the variance of the importance weights. M2PO keeps this second moment
        within a budget and drops no more tokens than necessary, largest first.

    Equation:
        With d_t = ``logprobs`` - ``rollout_logprobs``, A_t = ``advantages``:

            X     = { t : A_t > 0 and d_t > 0,  or  A_t < 0 and d_t < 0 }      moves with the advantage
            tau'  = the smallest d_t^2 over X that has to go, largest first, for the mean over what is left to be <= tau
            w_t   = 0 if t in X and d_t^2 >= tau', else 1
            L     = (1 / N) sum_t w_t surrogate_t                                  N counts all tokens

        tau is ``budget``. The set X is of the whole optimizer step. The smallest value in it always stays.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``rollout_logprobs`` (n,), nats: policy that sampled, as the sampler reported it.
        - ``advantages`` (n,), unitless: only the sign.

    Writes:
        - ``weight``: Of the tokens that moved from the rollout policy in the direction of their advantage, give those
          that moved furthest the weight 0, until the mean squared log-ratio of the others is at most ``budget``, over
          the optimizer step. They still count in the divisor.

    Denominator:
        untouched: the mean runs over all tokens, as in the paper.

    Parameters:
        - ``budget`` (tau): float in [0, inf), default 0.04. Square nats. The paper and the official scripts.

    State:
        none

    Deviations:
        - From the paper: the published objective has the ratio to the policy that sampled, which is the loss with
          ``old_logprobs: rollout``. Other old log-probs leave the mismatch between sampler and trainer out of the
          ratio, not out of this budget.
        - From the paper: d is that of the policy at the start of the optimizer step, once for all its micro-batches.
          Pull requests to ms-swift (9965) and Trinity-RFT (616) do the same.
        - From its code: another rule. The code looks for the bound to which all |d_t| of X would have to be cut for the
          mean to fit the budget, and passes it to an ordinary clip, [exp(-bound), exp(bound)]. It compares with
          ``old_log_probs``, and decides in each micro-batch of one device. Tokens beyond are stopped in both, but what
          is cut still counts there, so more go.
        - From AReaL: it drops tokens of both directions, compares the old policy with the proximal one, keeps at least
          one token, and dropped tokens leave the denominator, so that the others pull harder.
        - From all three: equal values go together.

    Pitfalls:
        It compares with the sampler, because there is nothing else to compare with: ``old_logprobs`` that were
        recomputed for this rollout are ``logprobs`` up to its first update, and against them no token would ever move.
        With ``old_logprobs: rollout``, as published, or with several optimizer steps per rollout, set ``refresh:
        step``; otherwise the former leaves nothing to compare, and every step decides by the policy before the first
        one. Movement within the optimizer step is not bounded. The budget is a mean over only X, so a few far tokens
        are dropped easily when X is small.

    Interacts:
        - ``m2po`` was published on ``token_mean``.
        - ``m2po`` and ``dppo`` both stop tokens that moved away from the sampler, each by its own bound.
        - ``m2po`` was published in place of ``clip_higher``, which also stops tokens that ``m2po`` keeps.

    Limits:
        - An optimizer step in which the mean is within the budget keeps everything.

    Example:
        A rewarded response. Three tokens rose, by 0.1, 0.2 and 0.6 nats: squares 0.01, 0.04 and 0.36, mean 0.137 >
        0.04. Without the last the mean is 0.025. The token that fell by 1 nat is not in X.

        >>> import torch
        >>> from rlstab import M2PO, PolicyOutputs, TokenBatch, compose
        >>> rollout = torch.full((1, 4), 0.3).log()
        >>> now = rollout + torch.tensor([[0.1, 0.2, 0.6, -1.0]])
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=now,
        ...     logprobs=now,
        ...     rollout_logprobs=rollout,
        ... )
        >>> live = now.clone().requires_grad_()
        >>> out = compose(M2PO())(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> [round(g, 4) + 0.0 for g in live.grad[0].tolist()]
        [-0.25, -0.25, 0.0, -0.25]
        >>> round(out.metrics()["m2po/threshold"], 4)
        0.36

    Source:
        H. Zheng, J. Zhao, B. Chen, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on
        LLMs?", 2025, arXiv 2510.01161 (algorithm 1). Reference code: Infini-AI-Lab/M2PO
        ``verl/trainer/ppo/core_algos.py`` (``compute_m2po_policy_loss``, commit af54a3e). Code of others:
        inclusionAI/AReaL ``areal/trainer/ppo/actor.py``.
    """

    about = About(
        addresses={"off-policy", "trust region"},
        no_op_at=(NoOpAt({"budget": 1e9}, "no log-prob is tens of thousands of nats away from another."),),
    )

    name = "m2po"
    needs = {"logprobs", "rollout_logprobs"}
    writes = {"weight"}

    budget: Annotated[float, Range(ge=0)] = 0.04

    def measure(self, batch: TokenBatch) -> Stat:
        square, harmful = self._moves(batch)
        return {"square": Pool.beyond_budget(square, self.budget, harmful)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat.threshold("square")
        square, harmful = self._moves(batch)
        dropped = harmful & threshold.reached(square)
        report = {"threshold": threshold.report(), "harmful": Mean.of(harmful), "dropped": Mean.of(dropped)}
        weight = None if threshold.value is None else (~dropped).to(batch.logprobs.dtype)
        return Terms(weight=weight, report=report)

    @staticmethod
    def _moves(batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """``(n,)`` float64 squared log-ratios, and the ``(n,)`` bool of tokens that moved with their advantage."""
        d = batch.logprobs.double() - batch.signal("rollout_logprobs").double()
        return d.square(), (batch.rewarded & (d > 0)) | (batch.punished & (d < 0))
