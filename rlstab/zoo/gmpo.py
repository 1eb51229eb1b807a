"""GMPO: the geometric mean of the ratios of a response, each clipped before it is averaged."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Constants, PolicyOutputs, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import token_log_ratio
from rlstab.zoo.response_ratio import EXPECTS, gradient_of, kept_mean


class GMPO(TokenObjective):
    """Replace the token ratios of a response by their geometric mean, after clipping each log-ratio.

    Problem:
        GRPO maximises the arithmetic mean of token ratios, which a few tokens with a huge ratio dominate. Single tokens
        cannot move the geometric mean far. The ratios then stay so close to 1 that each token can have a wider clip
        range than PPO's, and exploration continues.

    Equation:
        With d_t = ln of the ratio of token t, A its advantage, n the kept tokens of its response:

            d'_t = min(d_t, e_high) where A >= 0,   max(d_t, -e_low) where A < 0
            rho  = exp((1 / n) sum_t d'_t)
            loss = -A rho,                          averaged over responses by `sequence_mean`

        e_low is ``low``, e_high ``high``. The gradient on the log-prob of a token is -rho A / n, and 0 where d'_t is
        clipped.

    Reads:
        nothing itself. The loss gives it the live log-probs and the advantages, of which it reads the sign, and says
        which tokens are kept.

    Writes:
        - ``ratio``: All tokens of a response have one ratio, the geometric mean of those that are kept. Before it is
          taken, a log-ratio is clipped at ``high`` where the advantage is positive and at -``low`` where it is
          negative; a token that is clipped stops pulling.

    Denominator:
        untouched: a token that is clipped still counts in n and in the mean.

    Parameters:
        - ``low`` (e_low): float in [0, inf), default 0.4. Nats. Paper and official script.
        - ``high`` (e_high): float in [0, inf), default 0.4. Nats. Paper and official script: ratios from 0.67 to 1.49.

    State:
        none

    Deviations:
        - From the paper: an advantage belongs to a token here, and its sign says on which side the token is clipped. In
          the paper all tokens of a response have one advantage, and then nothing differs.
        - From the paper: n and the sum are over the tokens that no mask drops; the paper has no masks. The mean ln rho
          is clamped to 20 nats.
        - From other code: verl's ``geo_mean`` averages the responses of each micro-batch, whatever their number in the
          optimizer step, and takes the mean advantage of a response. The official code sees one response at a time. A
          log-ratio exactly on a bound keeps its gradient here, and half of it in torch's maximum.

    Pitfalls:
        The range is in nats: 0.4 is [0.67, 1.49], and PPO's 0.2 would be [0.82, 1.22]. A clipped token has no gradient,
        but its clipped log-ratio still scales the pull of all others in its response.

    Interacts:
        - ``gmpo`` was published on ``sequence_mean``.
        - ``gmpo`` clips each token itself; ``clip_higher`` and ``dcpo_clip`` would clip the mean over the response,
          which stays near 1.
        - The mean of ``gmpo`` is over the kept tokens, so dropping some tokens changes the ratio of the others.

    Limits:
        - Where every response keeps one token whose log-ratio is within the range.
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 1.5 and 0.5, log-ratios 0.405 and -0.693. Rewarded, the first is clipped to 0.4: rho = exp(-0.147) =
        0.8637. Punished, the second is clipped to -0.4: rho = exp(0.003) = 1.0027. The other two tokens pull with rho /
        (2 * 2).

        >>> import torch
        >>> from rlstab import GMPO, PolicyOutputs, SequenceMean, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.6, 0.2], [0.6, 0.2]]).log().requires_grad_()
        >>> objective = compose(GMPO(), SequenceMean())
        >>> objective(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        [0.0, -0.2159, 0.2507, 0.0]

    Source:
        Y. Zhao, Y. Liu et al., "Geometric-Mean Policy Optimization", 2025, arXiv 2507.20673. Reference code:
        callsys/GMPO ``train_zero_math_gmpo.py``, ``scripts/qwen2.5-math-7b-gmpo.sh`` (commit 205b2bf). Code of others:
        verl-project/verl ``verl/trainer/ppo/core_algos.py`` (``geo_mean``).
    """

    about = About(
        addresses={"trust region", "token"},
        expects=EXPECTS,
    )

    name = "gmpo"
    writes = {"ratio"}

    low: Annotated[float, Range(ge=0)] = 0.4
    high: Annotated[float, Range(ge=0)] = 0.4

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, constants: Constants) -> Tensor:
            gaps = token_log_ratio(constants.anchor, constants.anchor, batch)
            clipped = torch.where(constants.advantages < 0, gaps.clamp(min=-self.low), gaps.clamp(max=self.high))
            pulling = torch.where(clipped == gaps, gradient_of(policy, constants), 0.0)
            return kept_mean(clipped, constants, batch) + pulling

        return Terms(ratio=ratio)
