"""S2T: drop the spurious tokens of correct responses (STAPO)."""

import math
from typing import Annotated, Literal

from torch import Tensor

from rlstab import About, Mean, NoOpAt, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.compare import below
from rlstab.core.metadata import IdleSign


class S2TMask(TokenObjective):
    """Drop rewarded tokens that were sampled with tiny probability where the policy was otherwise sure.

    Problem:
        A correct response gives all its tokens the same positive advantage, including the few that were sampled almost
        by accident where the policy was confident of another token. Such a token has nearly the largest gradient that a
        token can have, yet carries no reasoning. The paper calls it spurious, finds that about 0.01 % of tokens are
        spurious, and links late collapse to them; it reports that most are digits and symbols. S2T removes them from
        the policy term.

    Equation:
        With p_t = exp(``logprobs``), H_t = ``entropies``, A_t = ``advantages``:

            C      = { t : A_t > 0 and p_t < tau_p }                     the candidates
            tau_h  = q-quantile of H over C                              population: candidates
                   = q-quantile of H over all tokens                     population: all
            keep_t = not (t in C and H_t < tau_h)

        tau_p is ``max_prob``, q is ``quantile``. The quantile interpolates linearly and is taken over the whole
        optimizer step; an empty pool has none, and everything is kept.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``entropies`` (n,), nats: of the full next-token distribution, same policy.
        - ``advantages`` (n,), unitless: only the sign.

    Writes:
        - ``keep``: Drop a token when its advantage is positive, its probability is below ``max_prob`` and its entropy
          is below the ``quantile``-quantile over the optimizer step (of its tokens: ``population``). It leaves the
          divisor too.

    Denominator:
        kept: dropped tokens leave numerator and denominator, as in the paper's objective.

    Parameters:
        - ``max_prob`` (tau_p): float in (0, 1], default 0.002. The paper, all versions; v4-v5 find little sensitivity;
          in v1-v3 0.2 instead of 0.002 costs ten points of AIME24.
        - ``quantile`` (q): float in [0, 1], default 0.75. The share of the pool that lies below the threshold. Paper
          v4-v5; use 0.8 with ``population="all"``, the setting of v1-v3.
        - ``population``: 'candidates' | 'all', default 'candidates'. Whose entropies give the threshold. Paper v4-v5;
          'all' is the definition of v1-v3.

    State:
        none

    Deviations:
        - From the paper: none in the rule, which has two published definitions. Versions 1-3 compare with a quantile
          over the mini-batch; their text says both "80 %" and "20 %" for the same 0.80-quantile, and does
          not say whose entropies are pooled ('all' is the plain reading). Versions 4-5 pool only the candidates, so
          that about 75 % of them are always dropped, however high their entropies are.
        - From the paper: it evaluates the policy at the time a mini-batch is used, which is the policy at the start of
          the optimizer step. It is read here when the evidence is recomputed for each optimizer step. Evidence from the
          old policy (``logprobs`` left out) is the same in the first optimizer step after a rollout, and stale in later
          ones.
        - From the paper: how its quantile was taken across micro-batches and devices was not found. Here it is exact
          over all parts of the optimizer step.
        - From its code: no official code was found, for any version.

    Pitfalls:
        It is not a gradient clip: for a rare token, entropy moves the norm of the logit gradient by a factor of at most
        sqrt(2). Once more than a share q of the pool has exactly the threshold's entropy (0, after a collapse), no
        token is below it and none is dropped.

    Interacts:
        - ``s2t`` was published on ``clip_higher`` and ``token_mean``, without ``kl`` or a bonus.
        - ``s2t`` and ``stare`` act in opposite directions on the same tokens, rare ones that were rewarded: ``s2t``
          drops them, ``stare`` pulls harder at them. ``s2t`` wins, and ``stare``'s share still counts the tokens that
          ``s2t`` drops. `within(S2TMask(), STARE())` takes the share among the live ones.
        - With population 'all' and a quantile of at most 1 - share, ``top_entropy`` drops all that ``s2t`` would drop.
        - ``top_entropy`` drops every token below its own entropy threshold: ``s2t`` decides only about those above it.
        - Both choose rare tokens, but never the same one: ``s2t`` rewarded tokens, ``lp_reg`` punished ones.

    Limits:
        - Without candidates, and by default with a single one, an optimizer step keeps everything.

    Example:
        One correct response. Three tokens are candidates, with entropies 0.1, 0.2 and 2.0; the 0.75-quantile lies at
        index 0.75 * 2 = 1.5 among them: (0.2 + 2.0) / 2 = 1.1. The first two are dropped, and the mean runs over two
        tokens.

        >>> import torch
        >>> from rlstab import PolicyOutputs, S2TMask, TokenBatch, compose
        >>> old = torch.tensor([[0.001, 0.001, 0.001, 0.9]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=old,
        ...     entropies=torch.tensor([[0.1, 0.2, 2.0, 0.3]]),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> out = compose(S2TMask())(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> [round(g, 4) for g in live.grad[0].tolist()]
        [0.0, 0.0, -0.5, -0.5]
        >>> round(out.metrics()["s2t/threshold"], 4)
        1.1

    Source:
        S. Liu, Z. He, G. Zhan et al., "STAPO: Stabilizing Reinforcement Learning for LLMs by Silencing Rare Spurious
        Tokens", 2026, arXiv 2602.15620 (v1-v3 and v4-v5). Reference code: none found.
    """

    about = About(
        addresses={"token"},
        no_op_at=(NoOpAt({"quantile": 0.0}, "no candidate is below the smallest entropy of the pool."),),
        idle_signs=(
            IdleSign("candidates", "no token with positive advantage had a probability below {max_prob}"),
            IdleSign("dropped", "no candidate had an entropy below the threshold"),
        ),
    )

    name = "s2t"
    needs = {"entropies", "logprobs"}
    writes = {"keep"}

    max_prob: Annotated[float, Range(gt=0, le=1)] = 0.002
    quantile: Annotated[float, Range(ge=0, le=1)] = 0.75
    population: Literal["candidates", "all"] = "candidates"

    def measure(self, batch: TokenBatch) -> Stat:
        entropies = batch.signal("entropies")
        where = self._candidates(batch) if self.population == "candidates" else None
        return {"entropy": Pool.quantile(entropies, self.quantile, where)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat.threshold("entropy")
        candidates = self._candidates(batch)
        spurious = candidates & threshold.below(batch.signal("entropies"))
        report = {"threshold": threshold.report(), "candidates": Mean.of(candidates), "dropped": Mean.of(spurious)}
        return Terms(keep=~spurious, report=report)

    def _candidates(self, batch: TokenBatch) -> Tensor:
        return batch.rewarded & below(batch.logprobs, math.log(self.max_prob))
