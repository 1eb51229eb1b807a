"""SAPO: a token pulls less the further its ratio is from 1, without an edge (Qwen)."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Constants, Gate, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective


class SAPO(TokenObjective):
    """Weaken a token's gradient smoothly as its ratio moves away from 1, and sooner where it is punished.

    Problem:
        A clip is a hard edge: just inside it a token pulls in full, just outside not at all. A tight range discards
        signal; a wide one lets noise in. Moreover, an update that punishes a token raises many others that were never
        sampled, so far from the data it does more harm than one that rewards. SAPO turns the edge into a slope, which
        is steeper for punished tokens.

    Equation:
        With r the ratio of the token, A its advantage, tau = tau_pos where A > 0, else tau_neg:

            loss     = -(4 / tau) sigmoid(tau (r - 1)) A                          as printed
            gradient = -g r A on the log-prob
            g        = 4 z (1 - z) = 1 / cosh(tau (r - 1) / 2)^2                  z = sigmoid(tau (r - 1))

        g is 1 at r = 1 and one half near |r - 1| = 1.76 / tau.

    Reads:
        nothing itself. The loss gives it the ratio and the advantage, of which it reads the sign.

    Writes:
        - ``gates``: A token pulls 1 / cosh(tau (ratio - 1) / 2)^2 times as hard, tau = ``positive`` where its advantage
          is positive and ``negative`` where it is negative. It still counts in full.

    Denominator:
        untouched: a token that pulls less still counts.

    Parameters:
        - ``positive`` (tau_pos): float in [0, inf), default 1.0. The paper, and every port. 0 leaves the ratio alone.
        - ``negative`` (tau_neg): float in [0, inf), default 1.05. The paper, and every port; it asks for more than
          ``positive``.

    State:
        none

    Deviations:
        - From the paper: the value of the loss is -g r A. The printed one has the same gradient, and is -2 A / tau at r
          = 1: do not compare losses with those of other code.
        - From the paper: log-ratios are clamped to 20 nats, where g is 0 anyway unless tau is tiny; verl does the same.
        - From other code: Trinity-RFT refuses ``negative`` below ``positive``, and averages over tokens as AReaL does.
          AReaL refuses SAPO together with its decoupled loss; here a weight for the sampler's mismatch multiplies it.
        - From other code: ports offer SAPO on the ratio of a sequence. Here that is SAPO composed with `gspo`, which
          the paper does not do.

    Pitfalls:
        The slope is gentle: at the defaults a ratio of 1.28 keeps 98 % of its pull and one of 2 keeps 79 %, so next to
        a clip at 0.2 it hardly bounds anything. It damps both directions: a token that moves back towards the data
        pulls less too.

    Interacts:
        - ``sapo`` was published on ``sequence_mean``.
        - ``sapo`` and ``maspo`` both damp a token by how far its ratio is from 1, and their factors multiply.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 2 and 0.5, first rewarded, then punished. Rewarded, g is 1 / cosh(0.5)^2 = 0.7864 at 2; punished it is 1
        / cosh(0.525)^2 = 0.7683. The gradient is -g r A / 4.

        >>> import torch
        >>> from rlstab import SAPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.8, 0.2], [0.8, 0.2]]).log().requires_grad_()
        >>> compose(SAPO())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.3932, -0.1175, 0.3841, 0.1168]

    Source:
        C. Gao et al., "Soft Adaptive Policy Optimization", 2025, arXiv 2511.20347. Common code: verl-project/verl
        ``verl/trainer/ppo/core_algos.py`` (``compute_policy_loss_sapo``), huggingface/trl
        ``trl/trainer/grpo_trainer.py``.
    """

    about = About(
        addresses={"trust region"},
        no_op_at=(NoOpAt({"positive": 0.0, "negative": 0.0}, "the slope is 1 everywhere."),),
    )

    name = "sapo"
    writes = {"gates"}

    positive: Annotated[float, Range(ge=0)] = 1.0
    negative: Annotated[float, Range(ge=0)] = 1.05

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            tau = torch.where(constants.advantages > 0, self.positive, torch.full_like(ratio, self.negative))
            return (tau * (ratio - 1) / 2).cosh().pow(-2)

        return Terms(gates={"": Gate(gate)})
