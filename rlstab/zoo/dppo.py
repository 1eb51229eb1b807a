"""DPPO: a trust region of the probability that moved, not of the ratio."""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from rlstab import About, Constants, NoOpAt, Range, Settled, State, Surrogate, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import MAX_LOG_RATIO
from rlstab.kl_estimators import probability
from rlstab.zoo.anchored import Anchored


class DPPO(Anchored, TokenObjective):
    """Stop a token from moving further once the policy has moved too much probability at its position.

    Problem:
        The ratio of one sampled token says little about how far the policy has moved there. A token of probability
        0.001 that rises to 0.004 has ratio 4 and moves almost no mass; one that falls from 0.9 to 0.6 has ratio 0.67
        and moves 0.3 of the mass. Clipping the ratio stops rare tokens, which carry exploration, even if they differ
        only because the sampler rounds differently, and lets likely tokens run away. DPPO bounds the divergence
        instead, estimated from the sampled token against all others.

    Equation:
        With p = exp(live ``logprobs``), q the probability of the token under the anchor, r = p / q, A the advantage:

            D    = |p - q|                                                           divergence: tv
                 = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))                       divergence: kl
            M    = 0 if A > 0, p > q and D > d_high,  or A < 0, p < q and D > d_low;  else 1
            pull = M min(r, C)

        d_high is ``high``, d_low ``low``, C ``cap``. With ``stops="all"`` the conditions on p and q fall away: M = 0
        also where the step would bring the token back. The gradient of a token is pull A times that of its log-prob.

    Reads:
        - ``rollout_logprobs`` (n,), nats: the anchor, with ``anchor="rollout"``.
        - ``old_logprobs`` (n,), nats: the anchor, with ``anchor="old"``.

    Writes:
        - ``surrogate``: A token pulls with its ratio to the ``anchor`` policy, at most ``cap``; not at all once the two
          are a divergence (``divergence``) of more than ``high`` apart where its advantage is positive, or of ``low``
          where it is negative. Moves that are stopped: ``stops``. It still counts.

    Denominator:
        untouched: a token that is stopped still counts.

    Parameters:
        - ``divergence``: 'tv' | 'kl', default 'tv'. Total variation or KL of the token against all others. The
          official code's default; the paper finds both good.
        - ``high`` (d_high): float in [0, inf), default 0.15. For 'tv', the official scripts. For 'kl' they have 0.05,
          in nats. prime-rl has 0.2 for 'tv'.
        - ``low`` (d_low): float in [0, inf), default 0.15. As ``high``.
        - ``cap`` (C): float in [1, inf), default 20.0. The fallback of verl's functions; its configuration passes 3.
          The official scripts have 10000, which amounts to none.
        - ``anchor``: 'rollout' | 'old', default 'rollout'. The policy that r and D compare with. The paper: the region
          has to be around the policy that sampled, and recomputed log-probs are worse.
        - ``stops``: 'away' | 'all', default 'away'. Of the tokens beyond the bound, those that would move further away,
          or all of them. prime-rl's ``ipo`` loss is 'all', with 0.1 for both bounds.

    State:
        none

    Deviations:
        - From the paper: it has top-K forms of both divergences, which need the K likeliest tokens of the sampler; its
          own ablation finds no clear gain, and they are not offered.
        - From its code: for 'kl' the code adds 1e-8 to both (1 - q) and (1 - p), in float32, so that near probability 1
          it is off; here it is exact, in float64, and infinite where p rounds to 1 and q does not.
        - From its code: its ``recompute`` modes take the region from the old policy and the ratio still from the
          sampler. Here 'old' takes both from the old policy.
        - From its code: log-ratios are clamped to 20 nats on both sides, there only above. A log-prob above 0 counts as
          0.
        - From verl: its ``dppo_tv`` and ``dppo_kl`` compare with ``old_log_probs``, which are those of the rollout only
          in bypass mode, and read the bounds from ``clip_ratio``, whose default of 0.2 means something else there.
        - From verl: it prints -M min(r, C) A l, with l the live log-prob, and the value here is -M min(r, C) A. The
          gradients are equal. Its cap is ``clip_ratio_c``, which is 3 where it is not set.
        - From prime-rl: its default and its ``ipo`` loss have no cap, and add 0.001 (ln r)^2 on every token, which is
          ``kl`` with anchor 'rollout', estimator 'k2' and coefficient 0.002.

    Pitfalls:
        The region is wide: from 0.5 a token may go to 0.65, from 0.01 to 0.16. With the anchor 'rollout' the ratio is
        DPPO's own, so ``old_logprobs`` do not matter: ``old_logprobs: rollout`` saves their forward pass. The mismatch
        between sampler and trainer is already corrected, up to the cap.

    Interacts:
        - ``dppo`` was published on ``constant_length``.

    Limits:
        - With anchor 'old', where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        A rewarded and a punished response, both of tokens sampled with probability 0.5 and 0.01. From 0.5 they moved by
        0.2, beyond 0.15, and are stopped. The rare tokens have ratios 5 and 0.2, moved by 0.04 and 0.008, and pull.

        >>> import torch
        >>> from rlstab import DPPO, PolicyOutputs, TokenBatch, compose
        >>> rollout = torch.tensor([[0.5, 0.01], [0.5, 0.01]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=rollout,
        ...     rollout_logprobs=rollout,
        ... )
        >>> live = torch.tensor([[0.7, 0.05], [0.3, 0.002]]).log().requires_grad_()
        >>> compose(DPPO())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        [0.0, -1.25, 0.0, 0.05]

    Source:
        P. Qi, X. Zhou, Z. Liu et al., "Rethinking the Trust Region in LLM Reinforcement Learning", 2026,
        arXiv 2602.04879. Reference code: sail-sg/Stable-RL ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_with_mask``, commit c6af1d1). Code of others: verl-project/verl
        ``verl/trainer/ppo/core_algos.py`` (``dppo_tv``, ``dppo_kl``), PrimeIntellect-ai/prime-rl
        ``src/prime_rl/trainer/rl/loss.py`` (``default_loss_fn``, ``ipo_loss_fn``, commit 559b447).
    """

    about = About(
        addresses={"trust region", "off-policy"},
        no_op_at=(
            NoOpAt(
                {"divergence": "tv", "anchor": "old", "high": 1.0, "low": 1.0, "cap": 1e9},
                "no probability moves by more than 1, and no ratio reaches the cap.",
            ),
        ),
    )

    name = "dppo"
    writes = {"surrogate"}

    divergence: Literal["tv", "kl"] = "tv"
    high: Annotated[float, Range(ge=0)] = 0.15
    low: Annotated[float, Range(ge=0)] = 0.15
    cap: Annotated[float, Range(ge=1)] = 20.0
    anchor: Literal["rollout", "old"] = "rollout"
    stops: Literal["away", "all"] = "away"

    @property
    def excludes(self) -> Mapping[str, str]:
        reasons = {"ratio": "'dppo' makes its own ratio, that of the token to its anchor, and would ignore the other."}
        if self.anchor == "old":
            return reasons
        return {**reasons, "importance_correction": "the ratio to the rollout policy has the mismatch in it already."}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        compared = self.live_and_anchor(batch)

        def pull(ratio: Tensor, constants: Constants) -> Tensor:
            live, other = compared(constants)
            gap, moved = live - other, self._divergence(live, other)
            exceeds = torch.where(constants.advantages > 0, moved > self.high, moved > self.low)
            stopped = exceeds if self.stops == "all" else exceeds & (constants.advantages.sign() * gap > 0)
            return torch.where(stopped, 0.0, gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=self.cap))

        return Terms(surrogate=Surrogate(pull))

    def _divergence(self, live: Tensor, other: Tensor) -> Tensor:
        if self.divergence == "tv":
            return (probability(live) - probability(other)).abs()
        live, other = live.double().clamp(max=0.0), other.double().clamp(max=0.0)
        rest_p, rest_q = -live.expm1(), -other.expm1()
        return other.exp() * (other - live) + torch.xlogy(rest_q, rest_q) - torch.xlogy(rest_q, rest_p)
