"""Adaptive entropy coefficient: pay for entropy only below a target, at a price that a controller sets."""

import math
from typing import Annotated, Literal

from rlstab import About, Mean, NoOpAt, Penalty, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.loss import token_mean
from rlstab.core.metadata import IdleSign


class AdaptiveEntropy(TokenObjective):
    """Add an entropy bonus while entropy is below a target; its coefficient rises below it and falls otherwise.

    Problem:
        A fixed entropy bonus is hard to set: if it is too small, entropy still collapses; if it is a little larger,
        entropy explodes; and the right value changes with data and model. Here the user sets the target, and a
        controller finds the price, that is, the coefficient of the bonus.

    Equation:
        With H_k the token mean of ``entropies`` over optimizer step k, and h_t the live entropy:

            L      = policy term - a_k [H_k < H*] sum_t c0_t h_t
            a_{k+1} = clip(a_k + delta if H_k < H* else a_k - delta, a_min, a_max),   a_1 = a_0

        H* is ``target_entropy``, a_0 ``initial``, delta ``increment``, a_min ``low``, a_max ``high``. c0_t are the
        coefficients of the loss's aggregation over all tokens, or 1 / N with ``aggregate`` ``"token_mean"``.

    Reads:
        - ``entropies`` (n,), nats: of the full next-token distribution, for the controller.
        - live ``entropies`` (n,), nats, with gradient: on all tokens, while the price is not 0.

    Writes:
        - ``penalties``: In an optimizer step whose mean entropy is below ``target_entropy`` nats, subtract a price
          times the entropy of the live policy, on every token (aggregate: ``aggregate``). The price begins at
          ``initial``; it rises by ``increment`` after an optimizer step below the target and falls by as much after any
          other, within [``low``, ``high``].

    Denominator:
        untouched: the term is divided by the counts of all tokens, whatever masks keep.

    Parameters:
        - ``target_entropy`` (H*): float in [0, inf), default 0.2. Nats. Skywork-OR1 scripts, and TRL's default. TRL's
          documentation warns that such a low target seldom triggers.
        - ``initial`` (a_0): float in [0, inf), default 0.0. Skywork-OR1 scripts and TRL.
        - ``increment`` (delta): float in [0, inf), default 0.0001. Skywork-OR1 scripts; TRL 0.005.
        - ``low`` (a_min): float in [0, inf), default 0.0. Skywork-OR1 scripts and TRL.
        - ``high`` (a_max): float in [0, inf), default 0.005. Skywork-OR1 scripts; TRL 1.0.
        - ``aggregate``: 'loss' | 'token_mean', default 'loss'. What averages the bonus: with "loss" the loss's own
          average, as in the reference code; with "token_mean" a mean over tokens, as in TRL under every ``loss_type``.

    State:
        - ``active``: whether this optimizer step's mean entropy is below the target; False before the first.
        - ``coefficient``: the price of this optimizer step, paid where ``active``.
        - ``next_coefficient``: the price of the next one, moved by this one unless it has no tokens.

    Deviations:
        - From the paper's code: the controller there runs on the driver, with the entropy of the previous optimizer
          step. Here an optimizer step is judged by its own evidence, which is known before the backward pass, and the
          price it moves acts in the next one.
        - From TRL: below the target means strictly below; there it includes equality. TRL judges an optimizer step by
          the entropy of the one before, so that its first pays nothing, and its bonus is a mean over a micro-batch. As
          there, the controller's mean is taken over the whole optimizer step and all ranks, and the state is saved
          with the checkpoint.

    Pitfalls:
        none

    Interacts:
        - Under ``token_mean`` the bonus of ``adaptive_entropy`` is the mean that its controller measures.
        - Under ``sequence_mean`` the bonus of ``adaptive_entropy`` is a mean over responses unless ``aggregate`` is
          "token_mean"; its controller measures one over tokens.
        - ``adaptive_entropy`` acts on every token, also on those that a mask drops: penalties ignore masks.

    Example:
        Four tokens with a mean entropy of 0.15, below 0.2. The first optimizer step pays 0.001 * 0.15 and raises the
        price by 0.0001, so the second pays 0.0011 * 0.15. Advantages are 0, so the loss is only the payment.

        >>> import torch
        >>> from rlstab import AdaptiveEntropy, PolicyOutputs, TokenBatch, compose, make_plan
        >>> old, entropies = torch.full((1, 4), 0.5).log(), torch.tensor([[0.1, 0.1, 0.2, 0.2]])
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4), advantages=torch.zeros(1), old_logprobs=old, entropies=entropies
        ... )
        >>> live = PolicyOutputs.from_padded(batch, logprobs=old, entropies=entropies.clone().requires_grad_())
        >>> objective, state = compose(AdaptiveEntropy(initial=0.001)), None
        >>> for _ in range(2):
        ...     plan = make_plan(objective, [batch], state)
        ...     print(round(plan.loss(batch, live).loss.item(), 6))
        ...     state = plan.state
        -0.00015
        -0.000165

    Source:
        J. He et al., "Skywork Open Reasoner 1 Technical Report", 2025, arXiv 2505.22312. Reference code:
        SkyworkAI/Skywork-OR1 ``verl/trainer/ppo/core_algos.py`` (``EntController``); huggingface/trl
        ``trl/trainer/grpo_trainer.py``.
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(
            NoOpAt({"target_entropy": 0.0}, "no mean entropy is below 0, so nothing is ever paid."),
            NoOpAt({"initial": 0.0, "low": 0.0, "increment": 0.0}, "the price stays at `initial`, which is 0."),
            NoOpAt({"initial": 0.0, "low": 0.0, "high": 0.0}, "the price stays 0."),
        ),
        idle_signs=(
            IdleSign(
                "coefficient", "its price was 0 throughout: the mean entropy never fell below {target_entropy} nats"
            ),
        ),
    )

    name = "adaptive_entropy"
    needs = {"entropies"}
    live_needs = {"entropies"}
    writes = {"penalties"}
    ascending = (("low", "initial", "high"),)

    target_entropy: Annotated[float, Range(ge=0)] = 0.2
    initial: Annotated[float, Range(ge=0)] = 0.0
    increment: Annotated[float, Range(ge=0)] = 0.0001
    low: Annotated[float, Range(ge=0)] = 0.0
    high: Annotated[float, Range(ge=0)] = 0.005
    aggregate: Literal["loss", "token_mean"] = "loss"

    def init_state(self) -> State:
        return {"active": False, "coefficient": self.initial, "next_coefficient": self.initial}

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def advance(self, state: State, stat: Settled) -> State:
        """This optimizer step's entropy decides whether its price is paid; it moves the price of the next one."""
        mean = stat.mean("entropy")
        coefficient = state["next_coefficient"]
        if math.isnan(mean.value):
            return {**state, "coefficient": coefficient}
        active = mean.value < self.target_entropy
        moved = coefficient + (self.increment if active else -self.increment)
        return {"active": active, "coefficient": coefficient, "next_coefficient": min(max(moved, self.low), self.high)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        price = state["coefficient"] if state["active"] else 0.0
        aggregate = None if self.aggregate == "loss" else token_mean
        bonus = {"": Penalty.of_signal("entropies", -price, aggregate)} if price else {}
        return Terms(penalties=bonus, report={"coefficient": Mean.scalar(price)})
