"""Entropy bonus: pay for uncertainty on every token."""

from typing import Annotated, Literal

from rlstab import About, NoOpAt, Penalty, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.loss import token_mean


class EntropyBonus(TokenObjective):
    """Reward uncertainty: subtract ``coefficient`` times the mean entropy of all tokens from the loss.

    Problem:
        A policy gradient tends to make a policy more and more certain, until all samples of a prompt are alike and
        every group has zero variance. Rewarding entropy is the oldest remedy.

    Equation:
        With h_t the live entropy and a = ``coefficient``:

            L = policy term - a sum_t c0_t h_t

        c0_t are the coefficients of the loss's aggregation over all tokens, or 1 / N with ``aggregate``
        ``"token_mean"``. The gradient runs through the full next-token distribution, not through the sampled token.

    Reads:
        - live ``entropies`` (n,), nats, with gradient: on all tokens.

    Writes:
        - ``penalties``: Subtract ``coefficient`` times the entropy of the live policy, on every token (aggregate:
          ``aggregate``).

    Denominator:
        untouched: the term is divided by the counts of all tokens, whatever masks keep.

    Parameters:
        - ``coefficient`` (a): float in [0, inf), default 0.001. The default of early verl (as in Jiayi-Pan/TinyZero
          ``verl/trainer/config/ppo_trainer.yaml``). Current verl has 0, and so do the recipes of JustRL, STAPO, STARE
          and Lp-Reg.
        - ``aggregate``: 'loss' | 'token_mean', default 'loss'. What averages the bonus: with "loss" the loss's own
          average, as in verl; with "token_mean" a mean over tokens, as in TRL under every ``loss_type``.

    State:
        none

    Deviations:
        - From common code: the mean is over all tokens of the optimizer step, all parts and ranks; older verl and its
          forks average inside a micro-batch.
        - From TRL: its bonus follows its top-entropy mask; here it follows no mask. It is a mean over a micro-batch;
          here it is one over the optimizer step.

    Pitfalls:
        It raises noise as well as useful alternatives. In the table of arXiv 2510.03222 (``lp_reg``) on-policy GRPO
        falls from 48.56 to 23.32 at 32B when an entropy bonus is added.

    Interacts:
        - ``entropy_bonus`` and ``adaptive_entropy`` reward the same thing, and the controller does not take the fixed
          bonus into account.
        - ``entropy_bonus`` acts on every token, also on those that a mask drops: penalties ignore masks.

    Example:
        Four tokens with entropies 0.2, 0.4, 0.6, 0.8, mean 0.5, and a coefficient of 0.1: the loss is -0.05 and its
        gradient -0.1 / 4 on each entropy. Advantages are 0, so the policy term is 0.

        >>> import torch
        >>> from rlstab import EntropyBonus, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 4), 0.5).log()
        >>> batch = TokenBatch.from_padded(response_mask=torch.ones(1, 4), advantages=torch.zeros(1), old_logprobs=old)
        >>> entropies = torch.tensor([[0.2, 0.4, 0.6, 0.8]], requires_grad=True)
        >>> policy = PolicyOutputs.from_padded(batch, logprobs=old, entropies=entropies)
        >>> out = compose(EntropyBonus(coefficient=0.1))(batch, policy)
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), [round(g, 4) for g in entropies.grad[0].tolist()]
        (-0.05, [-0.025, -0.025, -0.025, -0.025])

    Source:
        R. J. Williams, J. Peng, "Function Optimization using Connectionist Reinforcement Learning Algorithms", 1991; V.
        Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", 2016, arXiv 1602.01783. Common code:
        verl-project/verl ``verl/workers/utils/losses.py``.
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(NoOpAt({"coefficient": 0.0}, "0 times the entropy, which is still computed."),),
    )

    name = "entropy_bonus"
    live_needs = {"entropies"}
    writes = {"penalties"}

    coefficient: Annotated[float, Range(ge=0)] = 0.001
    aggregate: Literal["loss", "token_mean"] = "loss"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        aggregate = None if self.aggregate == "loss" else token_mean
        return Terms(penalties={"": Penalty.of_signal("entropies", -self.coefficient, aggregate)})
