"""Clip-Cov: take the gradient from a few of the tokens that drive entropy down."""

from typing import Annotated

from torch import Tensor

from rlstab import Bounds, Mean, PolicyOutputs, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.metadata import About, NoOpAt
from rlstab.core.surrogate import bounded_exp, token_log_ratio
from rlstab.zoo.covariant import Covariant

#: Added to the seed, so that no other method and no sampler draws the same numbers.
STREAM = 1 << 41


class ClipCov(Covariant, TokenObjective):
    """Remove the gradient of a few tokens, drawn from those whose log-prob and advantage covary strongly.

    Problem:
        Entropy falls where probable tokens are rewarded and improbable ones punished. To first order, its change is
        minus the covariance of log-prob and advantage, and the paper finds that very few tokens account for most of it.
        Removing the gradient of some of them, a few in ten thousand, is enough to keep entropy up.

    Equation:
        With lp_t = ``logprobs``, A_t = ``advantages``, r_t = exp(lp_t - ``old_logprobs``), means over all tokens of the
        optimizer step, N of them:

            cov_t  = (A_t - mean A) (lp_t - mean lp)
            C      = { t : b_low < cov_t < b_high, and r_t still pulls within [1 - e_low, 1 + e_high] }
            hit    = max(1, int(rho N)) tokens of C drawn uniformly, all of C where it has fewer
            w_t    = 0 on hit, 1 elsewhere
            L      = sum_t c_t w_t surrogate_t

        rho is ``share``, b_low and b_high are ``low`` and ``high``, e_low and e_high ``clip_low`` and ``clip_high``.
        A token does not pull beyond 1 + e_high where A > 0, nor below 1 - e_low where A < 0. Each token draws a number
        in [0, 1) by (``seed``, sequence id, position), and the largest are hit.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``advantages`` (n,), unitless: with their size, before any bonus.
        - ``old_logprobs`` (n,), nats: the policy that the ratio divides by.
        - ``sequence_ids`` (S,), integers: which response it is, for the numbers drawn.
        - ``sequence`` (n,), integers: the response of each token.
        - ``position`` (n,), integers: its position there.

    Writes:
        - ``weight``: Give the weight 0 to a share of ``share`` of the tokens of the optimizer step (rounded down, at
          least one), drawn by seed ``seed`` among those whose log-prob and advantage have a covariance between ``low``
          and ``high``. Tokens whose ratio is above 1 + ``clip_high`` where their advantage is positive, or below 1 -
          ``clip_low`` where it is negative, are not drawn. All still count.

    Denominator:
        all: a token that is hit still counts, as in the official code.

    Parameters:
        - ``share`` (rho): float in (0, 1], default 0.0002. Of all tokens, not of the candidates. Official scripts.
        - ``low`` (b_low): float in (-inf, inf), default 1.0. Official scripts.
        - ``high`` (b_high): float in (-inf, inf), default 5.0. Official scripts; it spares what is beyond.
        - ``clip_low`` (e_low): float in [0, 1], default 1.0. Official scripts, which widen the clip so far that nearly
          no token is stopped. They should be the bounds of the trust region that it is composed with.
        - ``clip_high`` (e_high): float in [0, inf), default 1.0. Official scripts.
        - ``seed``: int in [0, 4294967296), default 0. Chosen here. Another seed hits other tokens.

    State:
        none

    Deviations:
        - From its code, and from verl and SkyRL: means, count and draw are those of each micro-batch of one device
          there, at least one token in each, so that small micro-batches lose more tokens than ``share`` says. Here they
          are exact over all parts and ranks.
        - From its code: the draw there comes from the global generator, without a seed. Here it belongs to the token:
          it is the same however the step is cut, and in each epoch.
        - From its code: covariances and ratios are those of the live policy, which is the policy at the start of the
          optimizer step where evidence is recomputed for each. With the evidence of the rollout every ratio is 1.
        - From verl: its surrogate has no dual clip; here it can be composed with that of `clip_higher`.

    Pitfalls:
        ``low`` and ``high`` are in nats times advantages divided by their standard deviation. Other advantages need
        other bounds: with those of Dr. GRPO, at most 1, hardly any token is a candidate.

    Interacts:
        - ``clip_cov`` was published on ``clip_higher`` and ``token_mean``, the clip at 1.0 on both sides.
        - ``clip_cov`` may hit a token that ``clip_higher`` stops already, because its ``clip_low`` and ``clip_high``
          are not the bounds of ``clip_higher``.
        - Both restrain tokens whose log-prob and advantage covary: ``kl_cov`` holds those of the largest covariance,
          ``clip_cov`` silences some of those between its bounds, and one that both choose is only pulled back.
        - A token that a mask drops still counts in the means and the share of ``clip_cov``, and may be hit.

    Limits:
        - An optimizer step in which all advantages are equal, or all log-probs, has no candidate.

    Example:
        A correct response with tokens of probability 0.9 and 0.1, and a wrong one with 0.8 and 0.2. Their covariances
        are 0.95, -1.24, -0.84 and 0.55; two lie between 0.5 and 5, and a share of a quarter of four tokens hits one of
        them, which one depends on the seed.

        >>> import torch
        >>> from rlstab import ClipCov, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.9, 0.1], [0.8, 0.2]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> for seed in (0, 1):
        ...     live = old.clone().requires_grad_()
        ...     objective = compose(ClipCov(share=0.25, low=0.5, seed=seed))
        ...     objective(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        ...     print([round(g, 4) + 0.0 for g in live.grad.flatten().tolist()])
        [-0.25, -0.25, 0.25, 0.0]
        [0.0, -0.25, 0.25, 0.25]

    Source:
        G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025,
        arXiv 2505.22617. Reference code: PRIME-RL/Entropy-Mechanism-of-RL ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_clip_cov``), ``recipe/dapo/7b_clip_cov.sh``.
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(NoOpAt({"low": 0.0, "high": 0.0}, "no covariance lies strictly between."),),
        exceptions={"replication": "a copy of a sequence is another sequence, and its tokens are drawn again"},
    )

    name = "clip_cov"
    writes = {"weight"}
    ascending = (("low", "high"),)

    share: Annotated[float, Range(gt=0, le=1)] = 2e-4
    low: Annotated[float, Range()] = 1.0
    high: Annotated[float, Range()] = 5.0
    clip_low: Annotated[float, Range(ge=0, le=1)] = 1.0
    clip_high: Annotated[float, Range(ge=0)] = 1.0
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0

    def measure_again(self, batch: TokenBatch, stat: Settled) -> Stat:
        count = max(1, int(self.share * float(stat.mean("advantage").count)))
        return {"drawn": Pool.largest(batch.uniform(STREAM + self.seed), count, self._candidates(batch, stat))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        candidates = self._candidates(batch, stat)
        hit = candidates & stat.threshold("drawn").reached(batch.uniform(STREAM + self.seed))
        return Terms(
            weight=(~hit).to(batch.logprobs.dtype), report={"candidates": Mean.of(candidates), "hit": Mean.of(hit)}
        )

    def _candidates(self, batch: TokenBatch, stat: Settled) -> Tensor:
        covariance = self.covariances(batch, stat)
        within = (covariance > self.low) & (covariance < self.high)
        current = PolicyOutputs(batch.logprobs.double())
        ratio = bounded_exp(token_log_ratio(current, current, batch))
        stopped = Bounds(self.clip_low, self.clip_high).stops(ratio, batch.advantages)
        return within & ~(stopped["high"] | stopped["low"])
