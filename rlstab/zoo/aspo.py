"""ASPO: rewarded tokens weigh by the inverse of the ratio, in a range that depends on the entropy."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Constants, Mean, Range, Settled, State, Surrogate, Terms, TokenBatch, TokenObjective


class ASPO(TokenObjective):
    """Weigh rewarded tokens by the inverse of their ratio, with a wider clip range at high-entropy tokens.

    Problem:
        The ratio multiplies the gradient of a token. A punished token that has fallen pulls less and less, which ends
        its fall. A rewarded one that has risen pulls more and more: likely tokens reinforce themselves, and those that
        fell behind stay behind. The authors blame this for early entropy collapse and repetition. ASPO inverts the
        ratio of rewarded tokens, so that those that lag pull harder.

    Equation:
        With r the ratio of the token, A the advantage and H_t = ``entropies``:

            e_t  = room_high_entropy   where H_t is above the (1 - rho)-quantile of its response, else room
            pull = min(1 / r, c)   where A > 0,   0 once r > 1 + e_t
                 = min(r, c)       where A < 0,   0 once r < 1 - e_t

        rho is ``share``, c ``cap``. The gradient of a token is pull A times that of its log-prob. The quantile
        interpolates linearly.

    Reads:
        - ``entropies`` (n,), nats: of the full next-token distribution, at the start of the optimizer step.
        - ``sequence`` (n,), integers: the response of each token.
        - ``sequence_ids`` (S,), integers: how many responses there are.

    Writes:
        - ``surrogate``: A token pulls with its ratio, or with the inverse where its advantage is positive, at most
          ``cap``. It stops once the ratio is above 1 + ``room``, or below 1 - ``room`` where its advantage is negative;
          on the share ``share`` of a response with the highest entropies ``room_high_entropy`` replaces ``room``. It
          still counts.

    Denominator:
        untouched: a token that is stopped still counts.

    Parameters:
        - ``room``: float in [0, inf), default 0.2. For the tokens of low entropy. The official code.
        - ``room_high_entropy``: float in [0, inf), default 0.4. For those of high entropy. The official code.
        - ``share`` (rho): float in [0, 1], default 0.2. How many tokens of a response are of high entropy. The official
          scripts.
        - ``cap`` (c): float in [1, inf), default 3.0. Beyond it the pull stays at the cap and does not end: the paper's
          soft dual clip.

    State:
        none

    Deviations:
        - From its code: the entropy there is of the live policy, in each backward pass; here it is that of the policy
          at the start of the optimizer step. The quantile is of each response in both.
        - From its code: a variable there named ``high_entropy_mask`` is True on tokens of low entropy. The rule is the
          same.
        - From its code: its scripts add a KL to the reference of weight 0.001, only on tokens of low entropy. It is
          left out.
        - From the paper: the value of the loss is -pull A. Only the gradient is the published one.

    Pitfalls:
        The inverse is not an importance weight: where the live policy is far from the old one, the estimate is
        deliberately biased. A rewarded token that fell to a third of its probability or less pulls with the full cap,
        and so does a punished one that rose to three times its probability or more. In a response in which all
        entropies are equal, no token is above the quantile.

    Interacts:
        - ``aspo`` was published on ``token_mean``.
        - ``aspo`` inverts the ratio of a rewarded token and stops single tokens; under ``gspo`` all have the mean of
          their response, which stays near 1: ``aspo`` inverts that, and stops none.
        - ``aspo`` takes its quantile over all tokens of a response, those that ``top_entropy`` drops too.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 1.3 and 0.5, first rewarded, then punished. In each response the second token has the higher entropy, and
        at share one half it has room 0.4. The rewarded 1.3 is above 1.2, the rewarded 0.5 pulls with 2. The punished
        1.3 pulls with 1.3, the punished 0.5 is below 0.6.

        >>> import torch
        >>> from rlstab import ASPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     entropies=torch.tensor([[0.1, 1.0], [0.1, 1.0]]),
        ... )
        >>> live = (old + torch.tensor([[1.3, 0.5], [1.3, 0.5]]).log()).requires_grad_()
        >>> compose(ASPO(share=0.5))(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(4 * g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        [0.0, -2.0, 1.3, 0.0]

    Source:
        J. Wang, R. Liu, L. Lin et al., "ASPO: Asymmetric Importance Sampling Policy Optimization", 2025,
        arXiv 2510.06062. Reference code: wizard-III/Archer2.0 ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_archer``), ``verl/workers/actor/dp_actor.py`` (commit b08d963).
    """

    about = About(addresses={"trust region", "exploration"})

    name = "aspo"
    needs = {"entropies"}
    writes = {"surrogate"}

    room: Annotated[float, Range(ge=0)] = 0.2
    room_high_entropy: Annotated[float, Range(ge=0)] = 0.4
    share: Annotated[float, Range(ge=0, le=1)] = 0.2
    cap: Annotated[float, Range(ge=1)] = 3.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies").double()
        edge = batch.spread(batch.sequence_quantile(entropies, 1 - self.share))
        fork = entropies > edge
        room = torch.full_like(edge, self.room).masked_fill(fork, self.room_high_entropy)

        def pull(ratio: Tensor, constants: Constants) -> Tensor:
            rewarded = constants.advantages > 0
            away = torch.where(rewarded, ratio > 1 + room, ratio < 1 - room)
            return torch.where(away, 0.0, torch.where(rewarded, 1 / ratio, ratio).clamp(max=self.cap))

        return Terms(surrogate=Surrogate(pull), report={"high_entropy": Mean.of(fork)})
