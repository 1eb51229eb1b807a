"""Lp-Reg: protect plausible rare tokens when they are about to be punished."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from rlstab import Bounds, Mean, Penalty, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.metadata import About, NoOpAt
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.kl_estimators import k3


class LpReg(TokenObjective):
    """Pull plausible low-probability tokens of punished responses towards a min-p filtered copy of the policy.

    Problem:
        A wrong response punishes all its tokens, including rare ones that open a useful line of reasoning. Pushed down
        again and again, they vanish, and exploration with them. The policy itself shows which rare tokens are worth
        keeping: a token that survives a min-p filter is plausible; what the filter removes is noise. Lp-Reg regularises
        the plausible ones.

    Equation:
        With p_v the policy at the start of the optimizer step, a_t the sampled token, A_t = ``advantages``:

            kept     = { v : p_v >= kappa max_u p_u },   Z = sum of p over kept,   proxy_v = p_v / Z on kept, else 0
            sel_t    = (p(a_t) among the lowest share rho) and (a_t in kept) and A_t < 0
            L        = policy term + beta sum_t c0_t sel_t D_t

            D_t      = -ln Z_live                                                                       form: paper
            D_t      = min(e^d - d - 1, 10), d = ln proxy(a_t) - ln live(a_t), where d > 0, else 0        form: code

        kappa is ``min_p``, rho ``share``, beta ``coefficient``; U, the cap of the ratio, is ``ratio_cap``. ln p(a_t) is
        ``logprobs``, ln max p is ``max_logprobs``, ln Z is ``log_kept_mass``, and Z_live the mass of the live policy on
        its own kept set. c0_t are the coefficients of the aggregation over all tokens: 1 / N for a token mean. The
        lowest share is taken over all tokens (paper) or over those with A_t < 0 (code). -ln Z is KL(proxy || policy) in
        closed form when the proxy is the policy filtered, and its logit gradient, policy - proxy, is that of the KL.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``advantages`` (n,), unitless: only the sign.
        - ``max_logprobs`` (n,), nats: log-prob of the likeliest token, same policy.
        - ``log_kept_mass`` (n,), nats: ln Z of the same policy at ``min_p``; form 'code' only.
        - live ``log_kept_mass`` (n,), nats, with gradient: form 'paper' only, read on the selected tokens.
        - live ``logprobs`` (n,), nats, with gradient: form 'code' only.

    Writes:
        - ``penalties``: Add ``coefficient`` times a divergence from the policy filtered by min-p at ``min_p``; on a
          token when its advantage is negative, its probability is in the lowest share (``share``) of the optimizer step
          and at least ``min_p`` times that of the likeliest token. The form is ``form``: the paper takes -ln of the
          mass that the filter keeps, and the share of all tokens; the code takes the k3 estimate, at most 10, where the
          live policy is below the filtered one, and the share of the punished tokens, rounded down.
        - ``unclipped``: Lift the trust region from the tokens under its penalty (form 'code' only).
        - ``bounds``: A token stops pulling once its ratio is above ``ratio_cap``; in the form 'code' only where its
          advantage is positive, and where it is negative never. It still counts.

    Denominator:
        untouched: no token leaves the policy term, and the penalty is divided by the counts of all tokens.

    Parameters:
        - ``share`` (rho): float in (0, 1], default 0.01. Paper and official scripts: 0.01 for 14B, 0.005 for 32B.
        - ``min_p`` (kappa): float in (0, 1], default 0.02. Paper and official scripts (the code's own default, 0.1, is
          overridden by every script).
        - ``coefficient`` (beta): float in [0, inf), default 1.0. Paper and official scripts.
        - ``form``: 'paper' | 'code', default 'paper'. Which of the two divergences and pools. The paper does not say
          which one produced its tables; presumably the code.
        - ``ratio_cap`` (U): float in (1, inf) or None, default None. The published value is 10, set by the preset
          ``lp_reg``. None leaves the trust region to another method.

    State:
        none

    Deviations:
        - From the paper (form 'paper'): it takes the full forward KL from the proxy of the policy that made the data.
          Here the proxy is the live policy filtered, its kept set held constant. Value and gradient are exactly those
          of the full KL while the live policy is the data policy; off-policy the proxy follows the live policy, which
          spares the storage of whole distributions. So the paper's pull also brings the policy back to the one that
          made the data, and this one does not. On 4000 random tokens of a vocabulary of 200 (logits of standard
          deviation 2, ``share`` 0.5, ``ratio_cap`` 10) with normal noise of 0.05, 0.3 and 1.0 on the live logits (mean
          absolute log-ratio 0.04, 0.23 and 0.84) the logit gradient of the whole loss differs by 0.6, 3.4 and 8.6 % of
          its norm, and that of the penalty alone, the smaller part of it, by 29, 97 and 114 %:
          ``tests/zoo/test_lp_reg.py``.
        - From the paper and its code: selection reads the policy at the start of the optimizer step, over all parts and
          ranks; ties with the last of the share are selected too, and a token exactly at the min-p bound is kept, as in
          the code. The code takes the share in each micro-batch of one device.
        - From its code (form 'code'): single-sample k3, capped at 10 with zero gradient above, the lowest
          floor(``share`` * n) of the punished tokens, none when that is 1 or less: as there. d is clamped to 20 nats
          before the exponential; there a gap of about 100 nats gives NaN. The floor forgives rounding: 0.29 * 100 is
          29 here, 28 there.
        - From its code (form 'code'): it ranks by the live policy and takes the proxy of the old one. Here both are
          those of the evidence: of the old policy, or, when it is recomputed for each optimizer step, of the live one.
          With one optimizer step per rollout all agree.
        - From its code (form 'code'): all selected tokens are exempt; there those with live log-prob above the proxy
          keep their clip. A punished token above the proxy of the policy that made the data has a ratio above 1,
          so only a dual clip would make a difference, and the published bounds have none.
        - From its code: a branch for rewarded tokens, off in every script, is left out. There min-p is applied before
          the temperature; here all signals are at one temperature.

    Pitfalls:
        On-policy the paper's pull is weak: it moves only the mass 1 - Z that the filter removes, and 0.02 leaves Z near
        1. Off-policy it is not the best method in the paper's own table at 32B (50.60; ``top_entropy`` has 51.49).

    Interacts:
        - ``lp_reg`` was published on ``token_mean``.
        - The tokens that ``lp_reg`` selects in form 'code' pull with their ratio: ``clip_higher``, ``cispo``, ``sapo``,
          ``maspo`` and ``vespo`` do not affect them.
        - ``gmpo`` clips also the tokens that ``lp_reg`` selects in form 'code'.
        - A token that ``top_entropy`` drops keeps the penalty of ``lp_reg``: penalties ignore masks.

    Limits:
        - An optimizer step without punished tokens selects none.
        - In form 'code' an optimizer step with fewer than 2 / ``share`` punished tokens selects none.

    Example:
        One wrong response, share one half: the tokens of probability 0.05 and 0.01 are the lowest two. With kappa =
        0.02 the first survives (0.05 >= 0.02 * 0.6), the second does not (0.01 < 0.02 * 0.8). The policy term is 1, the
        penalty -ln 0.95 / 4 = 0.0128, and its gradient on ln Z is -1 / 4 on the one selected token.

        >>> import torch
        >>> from rlstab import LpReg, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.9, 0.05, 0.01, 0.3]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=-torch.ones(1),
        ...     old_logprobs=old,
        ...     max_logprobs=torch.tensor([[0.9, 0.6, 0.8, 0.5]]).log(),
        ... )
        >>> mass = torch.tensor([[1.0, 0.95, 0.97, 0.9]]).log().requires_grad_()
        >>> policy = PolicyOutputs.from_padded(batch, logprobs=old.clone().requires_grad_(), log_kept_mass=mass)
        >>> out = compose(LpReg(share=0.5))(batch, policy)
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4)
        1.0128
        >>> [round(g, 4) for g in mass.grad[0].tolist()]
        [0.0, -0.25, 0.0, 0.0]

    Source:
        G. Huang et al., "Low-probability Tokens Sustain Exploration in Reinforcement Learning with Verifiable Reward",
        2025, arXiv 2510.03222 (eq. 6). Reference code: CarlanLark/Lp-Reg-dev ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_lp_reg``), ``verl/workers/actor/dp_actor.py`` (``apply_min_p``).
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(
            NoOpAt(
                {"coefficient": 0.0, "form": "paper", "ratio_cap": None},
                "only the penalty acts, and its coefficient is 0.",
            ),
        ),
    )

    name = "lp_reg"

    share: Annotated[float, Range(gt=0, le=1)] = 0.01
    min_p: Annotated[float, Range(gt=0, le=1)] = 0.02
    coefficient: Annotated[float, Range(ge=0)] = 1.0
    form: Literal["paper", "code"] = "paper"
    ratio_cap: Annotated[float | None, Range(gt=1)] = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logprobs", "max_logprobs"} | (set() if self.form == "paper" else {"log_kept_mass"}))

    @property
    def live_needs(self) -> frozenset[str]:
        return frozenset({"log_kept_mass"} if self.form == "paper" else ())

    @property
    def writes(self) -> frozenset[str]:
        written = {"penalties"} if self.form == "paper" else {"penalties", "unclipped"}
        return frozenset(written | ({"bounds"} if self.ratio_cap is not None else set()))

    @property
    def signal_options(self) -> dict[str, float]:
        return {"min_p": self.min_p}

    def measure(self, batch: TokenBatch) -> Stat:
        surprisal = -batch.logprobs
        if self.form == "paper":
            return {"surprisal": Pool.top(surprisal, self.share)}
        return {"surprisal": Pool.top(surprisal, self.share, batch.punished, rounding="floor")}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat.threshold("surprisal")
        probable = batch.logprobs.double() >= batch.signal("max_logprobs").double() + math.log(self.min_p)
        selected = threshold.reached(-batch.logprobs) & batch.punished & probable
        if self.form == "code" and threshold.nominal <= 1:
            selected = torch.zeros_like(selected)
        report = {"threshold": threshold.report(), "selected": Mean.of(selected)}
        bounds = None
        if self.ratio_cap is not None:
            bounds = Bounds(1.0, self.ratio_cap - 1, self.ratio_cap if self.form == "paper" else None)
        if self.form == "paper":
            # KL(proxy || policy) = -ln Z when the proxy is the policy filtered, and so is its gradient, policy - proxy
            penalty = Penalty(
                self.coefficient, lambda policy, _: -policy.signal("log_kept_mass"), selected, reads=self.live_needs
            )
            return Terms(penalties={"": penalty}, bounds=bounds, report=report)

        proxy = batch.logprobs - batch.signal("log_kept_mass")

        def pull(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            value = k3(proxy - policy.logprobs, cap=10.0)
            return torch.where(anchor.logprobs < proxy, value, torch.zeros_like(value))

        penalty = Penalty(self.coefficient, pull, selected)
        return Terms(penalties={"": penalty}, unclipped=selected, bounds=bounds, report=report)
