"""CISPO: cap the ratio and let every token pull (MiniMax-M1)."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Constants, NoOpAt, Range, Settled, State, Surrogate, Terms, TokenBatch, TokenObjective


class CISPO(TokenObjective):
    """Weigh every token by its ratio, capped at ``cap``, instead of clipping tokens whose ratio has left a range.

    Problem:
        A clip stops a token for the rest of the rollout once its ratio has left the range. Rare tokens leave it first,
        among them those that change a line of reasoning ("However", "Wait"), and from the second optimizer step on they
        contribute nothing. CISPO limits how much a token counts instead of deciding whether it counts.

    Equation:
        With r the ratio of the token as a constant, A its advantage, l its live log-prob:

            loss = -clip(r, floor, cap) A l,    so the gradient on l is -clip(r, floor, cap) A

        Without ``floor`` only the cap acts. Where A < 0, ``negative_cap`` and ``negative_floor`` take the place of
        ``cap`` and ``floor``, if they are given (DISPO).

    Reads:
        nothing itself. The loss gives it the ratio and the advantages, by whose sign it tells rewarded tokens from
        punished ones, and multiplies the result by the advantage.

    Writes:
        - ``surrogate``: Every token pulls with its ratio, held within [``floor``, ``cap``]; a punished token within
          [``negative_floor``, ``negative_cap``], where none stands for the bound of the others. No token is stopped,
          all count.

    Denominator:
        untouched: every token counts.

    Parameters:
        - ``cap``: float in [1, inf), default 5.0. A ratio, not a distance from 1. ScaleRL (arXiv 2510.13786) takes 5
          and finds 4, 5 and 8 alike; MiniMax-M1 tuned its bound and does not state it.
        - ``floor``: float in [0, 1] or None, default None. A ratio too. MiniMax-M1 and ScaleRL have none,
          DISPO has 0.8.
        - ``negative_cap``: float in [1, inf) or None, default None. The cap of punished tokens; None is ``cap``. DISPO
          has 101, with a ``cap`` of 11: under a low one outputs became repetitive.
        - ``negative_floor``: float in [0, 1] or None, default None. The floor of punished tokens; None is ``floor``.
          DISPO has 0, which is none: under a high one responses shrank to nothing.

    State:
        none

    Deviations:
        - From the paper: the value of the loss is -clip(r) A; the paper prints -clip(r) A l. The gradients are equal,
          and neither value says how training goes.
        - From the paper: log-ratios are clamped to 20 nats, and a token beyond pulls no more.
        - From the paper: it also describes a mask that stops tokens as PPO does; the authors say that it
          was off (MiniMax-AI/MiniMax-M1, issue 17). ROLL offers it; here it is not offered.
        - From other code: TRL's and ms-swift's ``epsilon_high`` is this cap: 5.0 there is 5.0 here, and so is tinker's
          ``clip_high_threshold`` (4.0). verl, slime, SkyRL, NeMo-RL and AReaL clip to [1 - low, 1 + high]: high 0.2
          there is cap 1.2 here, high 4.0 is cap 5.0, and a low below 1 is floor 1 - low, which is 0.8 at 0.2.
        - From DISPO: no code of its authors was found; its caps are by the sign of the advantage and the side of the
          ratio, as here, and its values (clip ranges of 0.2, 10, 1 and 100) are those that readers of the paper report.
        - From other code: SkyRL's ``rollout_is`` gives tokens outside a band the weight 0. That is not offered.

    Pitfalls:
        There is no trust region: nothing stops a token that has moved far, so the policy may drift away from the data
        over many optimizer steps. A floor makes tokens count that the policy has already abandoned, and most ports have
        one unless it is turned off.

    Interacts:
        - ``cispo`` was published on ``token_mean``.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 1.5 and 0.5, first rewarded, then punished, and a cap of 1.2. Every token pulls: 1.5 counts as 1.2, 0.5
        as it is. The gradient is -A clip(r) / 4.

        >>> import torch
        >>> from rlstab import CISPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.6, 0.2], [0.6, 0.2]]).log().requires_grad_()
        >>> compose(CISPO(cap=1.2))(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.3, -0.125, 0.3, 0.125]

    Source:
        MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025, arXiv 2506.13585
        (eq. 4, 5); D. Khatri, L. Madaan et al., "The Art of Scaling Reinforcement Learning Compute for LLMs", 2025,
        arXiv 2510.13786 (the cap); B. K. Karaman et al., "DISPO: Enhancing Training Efficiency and Stability in
        Reinforcement Learning for Large Language Model Mathematical Reasoning", 2026, arXiv 2602.00983 (caps by sign).
        Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_cispo``), huggingface/trl ``trl/trainer/grpo_trainer.py``.
    """

    about = About(
        addresses={"trust region", "exploration"},
        no_op_at=(
            NoOpAt(
                {"cap": 1e9, "floor": None} | dict.fromkeys(("negative_cap", "negative_floor")),
                "a ratio is at most e^20, so none reaches the cap.",
            ),
        ),
    )

    name = "cispo"
    writes = {"surrogate"}

    cap: Annotated[float, Range(ge=1)] = 5.0
    floor: Annotated[float | None, Range(ge=0, le=1)] = None
    negative_cap: Annotated[float | None, Range(ge=1)] = None
    negative_floor: Annotated[float | None, Range(ge=0, le=1)] = None

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        floor = self.floor if self.negative_floor is None else self.negative_floor
        cap = self.cap if self.negative_cap is None else self.negative_cap
        rewarded, punished = (self.floor, self.cap), (floor, cap)

        def capped(ratio: Tensor, constants: Constants) -> Tensor:
            if rewarded == punished:
                return ratio.clamp(*rewarded)
            return torch.where(constants.advantages < 0, ratio.clamp(*punished), ratio.clamp(*rewarded))

        return Terms(surrogate=Surrogate(capped))
