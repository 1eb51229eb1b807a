"""KL to a reference policy, the sampler or the old policy, by five estimators."""

from collections.abc import Set
from typing import Annotated, Literal

from torch import Tensor

from rlstab import About, NoOpAt, Penalty, PolicyOutputs, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import bounded_exp, token_log_ratio
from rlstab.kl_estimators import k1, k2, k3
from rlstab.zoo.anchored import Anchored


class KLPenalty(Anchored, TokenObjective):
    """Penalise divergence from a reference policy, or from the sampler, on every token.

    Problem:
        Nothing in a policy gradient refers to the model that training started from: whatever the reward does not
        measure may drift. A penalty on the divergence from that model limits the drift. Newer recipes (DAPO, JustRL,
        STAPO, STARE, Lp-Reg) omit it. A penalty on the divergence from the policy that sampled limits how far one
        rollout moves the policy, and the gap between sampler and trainer; it needs no second model.

    Equation:
        With d_t the log-prob of the sampled token under the anchor minus its live ``logprobs``, beta =
        ``coefficient``:

            L  = policy term + beta sum_t c0_t K(d_t)

            k1 = -d                    gradient on the live log-prob: 1
            k2 = d^2 / 2                                              -d
            k3 = e^d - d - 1                                          1 - e^d
            k3_straight_through: the value of k3, the gradient of k2
            k3_unbiased: r k3, r the ratio of the token                -r d

        c0_t are the coefficients of the aggregation over all tokens: 1 / N for a token mean. On-policy the expected
        gradient of k2 is that of KL(policy || anchor), of k3 that of KL(anchor || policy), of k1 zero. That of
        k3_unbiased is KL(policy || anchor) also where the tokens come from an older policy: r = e^(live - old) is
        differentiated with the rest.

    Reads:
        - ``ref_logprobs`` (n,), nats: of the sampled token under the reference policy, with ``anchor="reference"``.
        - ``rollout_logprobs`` (n,), nats: the same under the sampler, with ``anchor="rollout"``.
        - ``old_logprobs`` (n,), nats: the anchor, with ``anchor="old"``; the policy that the ratio divides by, with
          ``estimator="k3_unbiased"``.
        - live ``logprobs`` (n,), nats, with gradient.

    Writes:
        - ``penalties``: Add ``coefficient`` times the KL divergence from the ``anchor`` policy, on every token,
          estimated by ``estimator`` from the sampled token (cap of k3: ``cap``).

    Denominator:
        untouched: the term is divided by the counts of all tokens, whatever masks keep.

    Parameters:
        - ``coefficient`` (beta): float in [0, inf), default 0.001. verl's default. GRPO's first paper has 0.04.
        - ``estimator``: 'k1' | 'k2' | 'k3' | 'k3_straight_through' | 'k3_unbiased', default 'k3'. GRPO's first paper,
          and verl's default (``low_var_kl``). TRL's default is 'k3_unbiased' (``use_bias_correction_kl``).
        - ``cap``: float in (0, inf) or None, default 10.0. Largest value of k3, with zero gradient above it: d > 2.61
          or d < -11. verl's default; GRPO's paper has none. k1 and k2 are not capped; of 'k3_straight_through' and
          'k3_unbiased' only the value is.
        - ``anchor``: 'reference' | 'rollout' | 'old', default 'reference'. The policy that the live one is pulled
          to. prime-rl adds tau (live - rollout)^2 on every token, with tau 0.001: 'k2' to 'rollout' with coefficient
          2 tau, 0.002.

    State:
        none

    Deviations:
        - From the paper: the cap, and a clamp of d to 20 nats before the exponential of k3; both are verl's.
        - From the paper: its mean follows the aggregation over the whole optimizer step; the paper writes it per group.
        - From TRL: no cap and no clamp there. With ``cap`` None the two differ only where d is beyond 20 nats.
        - From verl: 'abs' and the straight-through form of k1 are not offered.
        - From TRL's ``use_bias_correction_kl``: 'k3_unbiased' takes the ratio of the token also when composed with
          ``gspo``; TRL then takes that of the response.

    Pitfalls:
        With one optimizer step per rollout, the live policy is the anchor 'old', and all estimators but 'k1' do
        nothing; with 'rollout' they then act only on the gap between sampler and trainer. Advantages that are not
        divided by their standard deviation (Dr. GRPO, with ``constant_length``) need a different coefficient.

    Interacts:
        - ``kl`` to a reference was first published with ``clip_higher``, in GRPO.
        - prime-rl's default loss is ``dppo`` with ``kl`` to the sampler.
        - ``kl`` pulls the policy back to a reference of low entropy, ``entropy_bonus`` and ``adaptive_entropy`` away
          from it, so that a bonus moves the policy less.
        - ``kl`` acts on every token, also on those that a mask drops: penalties ignore masks.

    Limits:
        - With anchor 'old' and any estimator but 'k1', where every ratio is exactly 1.

    Example:
        Four tokens of probability 0.2 with reference 0.1, 0.2, 0.4, 0.8: e^d is 0.5, 1, 2, 4 and k3 is 0.1931, 0,
        0.3069, 1.6137, mean 0.5284. With beta = 0.5 the loss is 0.2642, and the gradient 0.5 (1 - e^d) / 4. Advantages
        are 0.

        >>> import torch
        >>> from rlstab import KLPenalty, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 4), 0.2).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=torch.zeros(1),
        ...     old_logprobs=old,
        ...     ref_logprobs=torch.tensor([[0.1, 0.2, 0.4, 0.8]]).log(),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> out = compose(KLPenalty(coefficient=0.5))(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), [round(g, 4) + 0.0 for g in live.grad[0].tolist()]
        (0.2642, [0.0625, 0.0, -0.125, -0.375])

    Source:
        J. Schulman, "Approximating KL Divergence", 2020 (the estimators); Z. Shao et al., "DeepSeekMath: Pushing the
        Limits of Mathematical Reasoning in Open Language Models", 2024, arXiv 2402.03300 (eq. 4). Common code:
        verl-project/verl ``verl/trainer/ppo/core_algos.py`` (``kl_penalty_forward``). 'k3_unbiased': DeepSeek-AI,
        "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, arXiv 2512.02556 (sec. 3.1);
        huggingface/trl ``trl/trainer/grpo_trainer.py`` (``_compute_loss``). To the sampler: PrimeIntellect-ai/prime-rl
        ``src/prime_rl/trainer/rl/loss.py`` (``default_loss_fn``, commit 559b447), after Kimi Team, "Kimi K2.5: Visual
        Agentic Intelligence", 2026, arXiv 2602.02276.
    """

    about = About(
        addresses={"reference", "off-policy"},
        no_op_at=(NoOpAt({"coefficient": 0.0}, "0 times the estimate; the anchor is still evaluated."),),
    )

    name = "kl"
    writes = {"penalties"}

    coefficient: Annotated[float, Range(ge=0)] = 0.001
    estimator: Literal["k1", "k2", "k3", "k3_straight_through", "k3_unbiased"] = "k3"
    cap: Annotated[float | None, Range(gt=0)] = 10.0
    anchor: Literal["reference", "rollout", "old"] = "reference"

    @property
    def reads_drift(self) -> Set[str]:
        # k1 has the slope 1 even where the policies are the same
        return frozenset({"live"} if self.anchor == "old" and self.estimator != "k1" else ())

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        compared = self.anchor_of(batch)

        def divergence(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            target = compared(anchor)
            d = target - policy.logprobs
            if self.estimator == "k1":
                return k1(d)
            if self.estimator == "k2":
                return k2(d)
            if self.estimator == "k3":
                return k3(d, self.cap)
            # value of k3, gradient of k2: the two k2 cancel in value
            constant = target - anchor.logprobs
            straight = k3(constant, self.cap) + (k2(d) - k2(constant))
            if self.estimator == "k3_straight_through":
                return straight
            # d/dlive of r k3 = r k3 + r (1 - e^d) = -r d: the ratio of the same k2, and no e^d that cancels
            return bounded_exp(token_log_ratio(anchor, anchor, batch)) * straight

        return Terms(penalties={"": Penalty(self.coefficient, divergence)})
