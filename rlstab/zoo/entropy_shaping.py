"""Entropy shaping: a larger advantage where the policy was unsure."""

from typing import Annotated

from rlstab import About, Mean, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective


class EntropyShaping(TokenObjective):
    """Add to each token's advantage a bonus that grows with the entropy at its position.

    Problem:
        The paper finds that high-entropy tokens are those that connect or redirect a chain of thought, check it, or do
        what the base model seldom does. An advantage that is equal on all tokens of a response does not single them
        out. The bonus does: they get more of the reward and less of the blame, so such reasoning grows longer.

    Equation:
        With H_t = ``entropies``, A_t = ``advantages``:

            A_t <- A_t + min(alpha H_t, |A_t| / kappa)

        The bonus is a constant: no gradient flows through the entropy. With kappa > 1 it turns no advantage around, and
        a token without advantage gets none.

    Reads:
        - ``entropies`` (n,), nats: of the full next-token distribution, at the start of the optimizer step.
        - ``advantages`` (n,), unitless: with their size, before any bonus.

    Writes:
        - ``bonus``: Add ``alpha`` times the entropy at its position to the advantage of a token, at most the size of
          the advantage divided by ``kappa``.

    Denominator:
        untouched: no token leaves the loss.

    Parameters:
        - ``alpha`` (alpha): float in [0, inf), default 0.4. The paper, with GRPO; 0.1 with PPO.
        - ``kappa`` (kappa): float in (1, inf), default 2.0. The paper: a bonus of at most half the advantage.

    State:
        none

    Deviations:
        - From the paper: the entropy is that of the policy at the start of the optimizer step, when evidence is
          recomputed for each, or of the old policy. The paper takes that of the current policy, detached.
        - From its code: no official code was found.

    Pitfalls:
        Unlike an entropy bonus, it does not push entropy up: where the policy was unsure of a rewarded token, a larger
        pull makes it surer. It makes chains of thought longer. The bonus is never negative, so the advantages of a
        group no longer cancel. Other methods that read the size of the advantage see it without the bonus.

    Interacts:
        - ``entropy_bonus`` and ``adaptive_entropy`` raise the entropy itself. ``entropy_shaping`` only decides which
          tokens learn more, and may lower entropy.
        - ``kl_cov``, ``clip_cov`` and ``steer`` judge a token by its advantage without the bonus of
          ``entropy_shaping``.
        - ``entropy_shaping`` gives each token of a response its own advantage, whereas ``fipo``, ``gmpo``, ``gspo``,
          ``holder_mean`` and ``vespo`` were published with one per response. No advantage changes its sign, so the
          factors of these methods stay the same.
        - The bound of ``maspo`` is wider under the bonus of ``entropy_shaping``, because ``maspo`` reads the size of
          the advantage.

    Limits:
        - An optimizer step in which every entropy is 0.

    Example:
        A correct and a wrong response, entropies 0.5 and 5: alpha H is 0.2 and 2, and |A| / kappa is 0.5. The
        advantages become 1.2 and 1.5, and -0.8 and -0.5.

        >>> import torch
        >>> from rlstab import EntropyShaping, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     entropies=torch.tensor([[0.5, 5.0]] * 2),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(EntropyShaping())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.3, -0.375, 0.2, 0.125]

    Source:
        D. Cheng et al., "Reasoning with Exploration: An Entropy Perspective on Reinforcement Learning for LLMs", 2025,
        arXiv 2506.14758. Reference code: none found.
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(NoOpAt({"alpha": 0.0}, "every bonus is 0."),),
    )

    name = "entropy_shaping"
    needs = {"entropies"}
    writes = {"bonus"}

    alpha: Annotated[float, Range(ge=0)] = 0.4
    kappa: Annotated[float, Range(gt=1)] = 2.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        bonus = (self.alpha * batch.signal("entropies")).clamp(max=batch.advantages.abs() / self.kappa)
        return Terms(bonus=bonus, report={"bonus": Mean.of(bonus)})
