"""STEER: damp the tokens whose update changes entropy the most."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from rlstab import Mean, PolicyOutputs, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.metadata import About, NoOpAt
from rlstab.core.surrogate import bounded_exp, token_log_ratio

#: In the exponential form the largest change counts as at least this, so that a calm step is left alone.
FLOOR = 0.02


class STEER(TokenObjective):
    """Weigh a token less the more its update is estimated to change the entropy at its position.

    Problem:
        The effect of a token on entropy depends jointly on its clip, its advantage, its probability and the entropy at
        its position. Methods that look at one or two of these damp tokens that change nothing, and miss others. STEER
        estimates the change itself, to first order, and damps a token more the larger it is.

    Equation:
        With p_t = exp(``logprobs``), q_t = exp(``old_logprobs``), H_t = ``entropies``, A_t = ``advantages``:

            Omega_t = | A_t / q_t  p_t (1 - p_t) (ln p_t + H_t) |

            w_t     = exp(-k Omega_t),   k = -ln(w_min) / max(max Omega, 0.02)                  form: exponential
                    = w_max - (w_max - w_min) (Omega_t - min Omega) / (max Omega - min Omega)        form: linear
            L       = sum_t c_t w_t surrogate_t

        w_min is ``low``, w_max ``high``; the exponential form lies between w_min and 1. Minimum and maximum are taken
        over all tokens of the optimizer step. Where they are equal, a linear weight is half-way, (w_min + w_max) / 2.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``old_logprobs`` (n,), nats: the policy that the ratio divides by.
        - ``entropies`` (n,), nats: of the full next-token distribution, at the start of the optimizer step.
        - ``advantages`` (n,), unitless: with their size, before any bonus.

    Writes:
        - ``weight``: Multiply the policy term of a token by less the more its update is estimated to change the entropy
          (form: ``form``): by ``low`` where the estimate is largest in the optimizer step, and by 1 where it is 0 or,
          in the linear form, by ``high`` where it is smallest. The divisor stays.

    Denominator:
        untouched: it counts tokens, not weights.

    Parameters:
        - ``high`` (w_max): float in [1, inf), default 1.2. Only of form 'linear'. Official script.
        - ``low`` (w_min): float in (0, 1], default 0.8. Official scripts, both forms.
        - ``form``: 'exponential' | 'linear', default 'exponential'. The paper. The official code has scripts for both,
          and 'linear' where nothing is set.

    State:
        none

    Deviations:
        - From its code: minimum and maximum are exact over all parts and ranks of the optimizer step; there they are
          those of a micro-batch of one device.
        - From its code: it reads the live policy, which is the policy at the start of the optimizer step where evidence
          is recomputed for each step. With the evidence of the rollout p / q is 1.
        - From its code: none in Omega. It computes p (1 - p), where the name of the variable says p (1 - p)^2.
        - From its code: p and q are floored at 1e-8 there. Here p / q comes from the log-ratio, at most e^20 and at
          least e^-20, and a token rarer than 1e-8 keeps its ln p.

    Pitfalls:
        It damps what would raise entropy as well as what would lower it. The minimum and the maximum each depend on a
        single token: with one extreme token in the step, such as one far off-policy, all others weigh nearly 1
        (exponential) or ``high`` (linear). Look at the reported ``largest``. The linear form scales the whole gradient
        up, by almost ``high`` where most changes are small. Through only the logit of the token, the first-order
        change of entropy has one more factor p than Omega: as published, rare tokens count for more.

    Interacts:
        - ``steer`` was published on ``clip_higher`` and ``token_mean``, the base of its official scripts (0.2, 0.28,
          dual clip 10).
        - ``steer`` damps the tokens that change entropy the most, either way, and ``stare`` boosts some of them.
        - All restrain rare tokens that were punished: ``steer`` damps all a little, ``kl_cov`` and ``clip_cov`` act on
          a few.

    Limits:
        - In form 'exponential', an optimizer step in which every advantage is 0.

    Example:
        A correct response, on-policy: (1 - p) |ln p + H| is 0.0195, 0.0034 and 0.9923. The last token weighs 0.8, the
        first 0.8^(0.0195 / 0.9923) = 0.9956, and 1.1935 in the linear form, where the second has 1.2. The gradient of
        each is -w / 3.

        >>> import torch
        >>> from rlstab import STEER, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.9, 0.5, 0.1]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 3),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=old,
        ...     entropies=torch.tensor([[0.3, 0.7, 1.2]]),
        ... )
        >>> for form in ("exponential", "linear"):
        ...     live = old.clone().requires_grad_()
        ...     compose(STEER(form=form))(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        ...     print([round(g, 4) for g in live.grad[0].tolist()])
        [-0.3319, -0.3331, -0.2667]
        [-0.3978, -0.4, -0.2667]

    Source:
        Z. Hao et al., "Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective", 2025,
        arXiv 2510.10150. Reference code: zz-haooo/STEER ``verl/trainer/ppo/core_algos.py``
        (``compute_token_weights``), ``run/run_linear.sh``, ``run/run_exp.sh``.
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(NoOpAt({"low": 1.0, "high": 1.0}, "every weight is 1."),),
    )

    name = "steer"
    needs = {"entropies", "logprobs"}
    writes = {"weight"}

    high: Annotated[float, Range(ge=1)] = 1.2
    low: Annotated[float, Range(gt=0, le=1)] = 0.8
    form: Literal["exponential", "linear"] = "exponential"

    def measure(self, batch: TokenBatch) -> Stat:
        change = _entropy_change(batch)
        count = min(1, len(batch))  # the extreme of each part is enough, and cheap
        smallest, largest = (change.topk(count, largest=largest).values for largest in (False, True))
        return {"smallest": Pool.quantile(smallest, 0.0), "largest": Pool.quantile(largest, 1.0)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        change = _entropy_change(batch)
        smallest, largest = (stat.threshold(name).value or 0.0 for name in ("smallest", "largest"))
        if self.form == "exponential":
            weight = self.low ** (change / max(largest, FLOOR))
        else:
            share = (change - smallest) / (largest - smallest) if largest > smallest else torch.full_like(change, 0.5)
            weight = self.high - (self.high - self.low) * share
        report = {name: stat.threshold(name).report() for name in ("smallest", "largest")}
        return Terms(weight=weight.to(batch.logprobs.dtype), report={**report, "weight": Mean.of(weight)})


def _entropy_change(batch: TokenBatch) -> Tensor:
    """``(n,)`` float64 estimates |A (p / q) (1 - p) (ln p + H)|."""
    current = PolicyOutputs(batch.logprobs.double())
    ratio = bounded_exp(token_log_ratio(current, current, batch))
    rest = current.logprobs.expm1() * (current.logprobs + batch.signal("entropies"))
    return (batch.advantages * ratio * rest).abs()
