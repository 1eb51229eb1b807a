"""Importance correction: reweight or reject tokens whose probability differs in sampler and trainer (TIS, IcePop)."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import torch
from torch import Tensor

from rlstab import NOTHING, About, Mean, NoOpAt, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import MAX_LOG_RATIO

#: Distance of a token from the sampler, by the log-ratio and both probabilities, that of the old policy first.
_DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k2": lambda gap, p, q: gap.square() / 2,
    "k3": lambda gap, p, q: gap.expm1() - gap,
    "error": lambda gap, p, q: gap.abs().exp(),
    "tv": lambda gap, p, q: (p - q).abs(),
    "kl": lambda gap, p, q: q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log(),
}
#: Settings that reject tokens or responses if they are set.
_REJECTS = ("keep_low", "keep_high", "veto", "max_divergence")


class ImportanceCorrection(TokenObjective):
    """Reweight or reject tokens by the importance sampling ratio of the old policy to the sampler (TIS).

    Problem:
        The engine that samples is not the trainer: it has different kernels, lower precision, different routing of
        experts, older weights. The two differ in the log-prob of a token by 0.01 nats or by several, so the gradient is
        estimated on samples from a different policy. Recomputing the old log-probs in the trainer keeps the trust
        region sound. The remaining mismatch with the sampler is corrected by importance weights, truncated to limit
        their variance, or by dropping what is too far off to correct.

    Equation:
        With d_t = ``old_logprobs`` - ``rollout_logprobs``, all tokens of a response having one z but for level 'token':

            z_t    = d_t                                                 level: token
                   = sum of d over the response                          level: sequence
                   = mean of d over the response                         level: geometric
            keep_t = l <= e^z <= h   and no token of the response has e^d < v   and D(response) <= c
            w_t    = keep_t clip(e^z, a, b) / Z

        a is ``min_weight``, b ``max_weight``, l ``keep_low``, h ``keep_high``, v ``veto``, c ``max_divergence``; None
        lifts the bound. D, by ``divergence``, is the maximum or the mean over the tokens of the response of one of

            k2    = d^2 / 2
            k3    = e^d - 1 - d
            error = e^|d|
            kl    = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))          p = e^old, q = e^rollout
            tv    = |p - q|

        Each grows with the distance on both sides; ``kl`` and ``tv`` are the divergences of the two distributions over
        the token and all others. Z is 1, or with ``normalize`` the mean of w over the tokens of the
        optimizer step that the divisor counts (over its responses where their tokens share z). Published variants,
        other settings being at their default:

            TIS                     max_weight 2
            TIS, sequence           level sequence, max_weight 2 (VCPO: 8)
            truncated on both sides min_weight 0.5, max_weight 5                            OpenRLHF
            IcePop                  max_weight None, keep_low 0.5, keep_high 5              Ring-1T
            masked, sequence        level sequence, max_weight None, keep_high 3            TRL's default
            self-normalised         normalize true                                          verl
            veto                    veto 0.0001                                             earlier verl
            worst token             min_weight 1, max_weight 1, divergence max_k3 or max_k2, a max_divergence,
                                    denominator kept                                        verl's seq_max_k3, k2
            mean error              min_weight 1, max_weight 1, divergence mean_error, max_divergence 2,
                                    denominator kept                                        NeMo-RL
            trust region            max_weight None, divergence mean_kl, a max_divergence                    OpenRLHF
            geometric rejection     level geometric, min_weight 1, max_weight 1, keep_low 0.999, keep_high 1.001
                                    and a second one for the weights                        verl's guide, NeMo-RL

        The method may be listed several times: masks join and weights multiply.

    Reads:
        - ``old_logprobs`` (n,), nats: the policy that the ratio divides by, recomputed by the trainer.
        - ``rollout_logprobs`` (n,), nats: as the sampler reported them, of the distribution that it drew from.
        - ``sequence`` (n,), integers: the response of each token, except at level 'token' with neither ``veto`` nor
          ``max_divergence``.
        - ``sequence_ids`` (S,), integers: their number.

    Writes:
        - ``weight``: Weigh a token by the ratio of the old policy to the sampler (level: ``level``), at least
          ``min_weight`` and at most ``max_weight``, divided by its mean over the optimizer step: ``normalize``. The
          weight is 0 where the ratio is below ``keep_low`` or above ``keep_high``, where a token of the response has a
          ratio below ``veto``, and where the divergence (``divergence``) of the response is above ``max_divergence``.
          None is no bound.
        - ``keep``: Drop what is rejected, by any of these bounds. It leaves the divisor too.

    Denominator:
        all or kept: rejected tokens still count by default; with ``denominator="kept"`` they leave the divisor.

    Parameters:
        - ``level``: 'token' | 'sequence' | 'geometric', default 'token'. Whose ratio is used. A token's ratio is
          biased, more so in a longer response; that of the sequence is not, and its variance explodes with length.
          The geometric mean is for rejection: as a weight it is neither.
        - ``min_weight`` (a): float in (0, inf) or None, default None. TIS has none; OpenRLHF uses 0.5.
        - ``max_weight`` (b): float in (0, inf) or None, default 2.0. The value of TIS in verl, slime and open-instruct.
          Without a bound weights end at e^20.
        - ``keep_low`` (l): float in (0, inf) or None, default None. IcePop: 0.5.
        - ``keep_high`` (h): float in (0, inf) or None, default None. IcePop: 5; TRL, of a sequence: 3.
        - ``veto`` (v): float in (0, inf) or None, default None. One token with a lower ratio rejects its response.
          verl's guide had 0.0001.
        - ``divergence`` (D): 'max_k2' | 'max_k3' | 'mean_k2' | 'mean_k3' | 'mean_error' | 'mean_kl' | 'mean_tv',
          default 'max_k3'. What ``max_divergence`` bounds. The maximum is that of the worst token, and does not thin
          out over a long response. k2 is the same on both sides; k3 counts a token more if it is rarer under the
          sampler.
        - ``max_divergence`` (c): float in (0, inf) or None, default None. A response whose divergence is above it is
          rejected. Of 'mean_error' it is on the scale of a ratio, at least 1 to keep anything; NeMo-RL's recipe for
          Nemotron 3 Nano has 2. verl's presets by 'mean_k3' have 0.01; of its others no value was found. OpenRLHF
          gives no value for 'mean_kl' and 'mean_tv'.
        - ``normalize``: bool, default False. Divide by the mean weight, so that truncation does not shrink the step;
          verl's ``rollout_is_batch_normalize``, off there too.
        - ``denominator``: 'all' | 'kept', default 'all'. Whether rejected tokens leave the divisor. TRL, and IcePop's
          equation, count all; masks by rejection in verl leave the divisor.

    State:
        none

    Deviations:
        - From the paper: IcePop writes the ratio of the policies of training and inference at the start of the rollout;
          here it is that of ``old_logprobs``, which is this policy where it is recomputed.
        - From verl: its rejection by ``k1`` bounds the inverse ratio, so its bounds are 1 / h and 1 / l; its forms
          by k2 and k3 of tokens and of their sums are not offered. Its mean weight is that of the whole rollout, here
          of the optimizer step. It clamps log-ratios to 20 nats before it compares; here only weights and divergences
          are clamped.
        - From NeMo-RL: it filters before the advantages are computed; here the advantages are given.
        - From TRL: no clamp there, so a weight without a bound may be infinite. A token whose log-prob the sampler did
          not report gets the weight 1 there; here such evidence is refused.
        - From OpenRLHF: none in the rule. Its probabilities are kept 1e-6 away from 0 and 1, as here.
        - From open-instruct: its mask is of the live policy over the sampler, and a token on a bound is dropped.

    Pitfalls:
        Under ``old_logprobs: rollout`` the old policy is the sampler, every weight is 1, and the ratio of the trust
        region carries the mismatch; a surrogate that is anchored at the sampler carries it too, and correcting it again
        counts it twice. A sampler that reports log-probs before applying its temperature or top-p gives the ratios of a
        different distribution. Truncation makes the mean weight less than 1, so the gradient is smaller than without
        it. Penalties are not weighted: they are means over what the sampler drew.

    Interacts:
        - ``importance_correction`` corrects what lies between sampler and old policy, ``clip_higher`` what comes after.
        - Where the weight of ``importance_correction`` is not truncated, it turns the ratio into the one to the
          sampler, as in the published losses of ``cppo``, ``drpo`` and ``m2po``. These add no such ratio themselves, so
          the mismatch counts once.
        - ``importance_correction`` restrains a response by its mismatch with the sampler, and ``cppo`` restrains its
          tokens by the same mismatch.

    Limits:
        - Where the sampler is the policy that the ratio divides by, as with ``old_logprobs: rollout``.

    Example:
        Ratios 0.75, 1, 1.5 and 8 of the old policy over the sampler. TIS truncates the last one at 2; IcePop gives it
        the weight 0.

        >>> import torch
        >>> from rlstab import ImportanceCorrection, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.3, 0.2, 0.3, 0.8]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=old,
        ...     rollout_logprobs=torch.tensor([[0.4, 0.2, 0.2, 0.1]]).log(),
        ... )
        >>> tis = ImportanceCorrection()
        >>> icepop = ImportanceCorrection(max_weight=None, keep_low=0.5, keep_high=5.0)
        >>> for method in (tis, icepop):
        ...     live = old.clone().requires_grad_()
        ...     compose(method)(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        ...     print([round(g, 4) + 0.0 for g in live.grad[0].tolist()])
        [-0.1875, -0.25, -0.375, -0.5]
        [-0.1875, -0.25, -0.375, 0.0]

    Source:
        F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025, a blog post
        (TIS); Ling Team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", 2025,
        arXiv 2510.18855 (IcePop); Y. Li, J. Liu et al., "Trust Region Masking for Long-Horizon LLM Reinforcement
        Learning", 2025, arXiv 2512.23075 (the worst token). Common code: verl-project/verl
        ``verl/trainer/ppo/rollout_corr_helper.py``, huggingface/trl ``trl/trainer/grpo_trainer.py``,
        allenai/open-instruct ``open_instruct/grpo_utils.py``, OpenRLHF/OpenRLHF ``openrlhf/models/loss.py``,
        NVIDIA-NeMo/RL ``nemo_rl/algorithms/loss/loss_functions.py``, ``nemo_rl/algorithms/grpo.py``
        (``compute_and_apply_seq_logprob_error_masking``).
    """

    about = About(
        addresses={"off-policy"},
        no_op_at=(
            NoOpAt({"min_weight": 1.0, "max_weight": 1.0, **dict.fromkeys(_REJECTS)}, "every weight is 1, none is 0."),
        ),
    )

    name = "importance_correction"
    needs = {"old_logprobs", "rollout_logprobs"}
    ascending = (("min_weight", "max_weight"), ("keep_low", "keep_high"))

    level: Literal["token", "sequence", "geometric"] = "token"
    min_weight: Annotated[float | None, Range(gt=0)] = None
    max_weight: Annotated[float | None, Range(gt=0)] = 2.0
    keep_low: Annotated[float | None, Range(gt=0)] = None
    keep_high: Annotated[float | None, Range(gt=0)] = None
    veto: Annotated[float | None, Range(gt=0)] = None
    divergence: Literal["max_k2", "max_k3", "mean_k2", "mean_k3", "mean_error", "mean_kl", "mean_tv"] = "max_k3"
    max_divergence: Annotated[float | None, Range(gt=0)] = None
    normalize: bool = False
    denominator: Literal["all", "kept"] = "all"

    @property
    def writes(self) -> frozenset[str]:
        return frozenset({"weight", "keep"} if self.denominator == "kept" and self._rejects else {"weight"})

    @property
    def _rejects(self) -> bool:
        return any(getattr(self, name) is not None for name in _REJECTS)

    def measure(self, batch: TokenBatch) -> Stat:
        if not self.normalize:
            return NOTHING
        weight, keep = self._decided(batch)
        counted = keep if self.denominator == "kept" else torch.ones_like(keep)
        if self.level != "token":  # all tokens of a response have one weight, and it counts once
            weight, counted = batch.sequence_mean(weight), batch.sequence_mean(counted) > 0
        return {"weight": Mean.of(weight, counted)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        weight, keep = self._decided(batch)
        report = {"rejected": Mean.of(~keep)} if self._rejects else {}
        if self.normalize:
            mean = stat.mean("weight").value
            weight = weight / (mean if mean > 0 else 1.0)  # if everything is rejected, or nothing is there
        report["weight"] = Mean.of(weight)
        weight = weight.to(batch.old_logprobs.dtype)
        return Terms(weight=weight, keep=keep if "keep" in self.writes else None, report=report)

    def _decided(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """``(n,)`` float64 weights before division by their mean, and bools of the tokens that are not rejected."""
        gap = batch.old_logprobs.double() - batch.signal("rollout_logprobs").double()
        reduce = {"sequence": batch.sequence_total, "geometric": batch.sequence_mean}.get(self.level)
        shift = gap if reduce is None else batch.spread(reduce(gap))
        low = -math.inf if self.keep_low is None else math.log(self.keep_low)
        high = math.inf if self.keep_high is None else math.log(self.keep_high)
        keep = (low <= shift) & (shift <= high)
        if self.veto is not None:
            keep = keep & (batch.spread(batch.sequence_total(gap < math.log(self.veto))) == 0)
        if self.max_divergence is not None:
            keep = keep & batch.spread(self._within(batch, gap, self.max_divergence))
        ratio = shift.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return torch.where(keep, ratio.clamp(self.min_weight or 0.0, self.max_weight or math.inf), 0.0), keep

    def _within(self, batch: TokenBatch, gap: Tensor, bound: float) -> Tensor:
        """``(S,)`` bool: the responses whose divergence is at most ``bound``."""
        statistic, measure = self.divergence.split("_")
        logs = batch.old_logprobs.double(), batch.signal("rollout_logprobs").double()
        p, q = (log.exp().clamp(1e-6, 1 - 1e-6) for log in logs)
        divergence = _DIVERGENCES[measure](gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), p, q)
        if statistic == "mean":
            return batch.sequence_mean(divergence) <= bound
        return batch.sequence_total(divergence > bound) == 0
