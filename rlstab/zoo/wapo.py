"""WAPO: learn only from the winners of each group."""

from typing import Annotated

from torch import Tensor

from rlstab import About, Grouped, Mean, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective


class WAPO(TokenObjective):
    """Train only on responses that scored above their group's mean, and average over groups.

    Problem:
        Punishing a token pushes mass away from it, no matter where to, and the gradient grows as the token gets rarer.
        Rewarding a token moves mass to it, and the gradient vanishes as it becomes certain. The paper traces
        instability to the former, and trains only on winners.

    Equation:
        With G_g the responses of group g, W the groups of the optimizer step that have a winner, A_t = ``advantages``,
        which are rewards minus the mean of their group:

            w_t = 1 where A_t > 0, else 0
            L   = (1 / |W|) sum_g 1 / (G_g L_max) sum_{t in g} w_t surrogate_t

        L_max is ``length``. A winner is a response with a rewarded token. Groups without one add nothing, and are not
        counted.

    Reads:
        - ``advantages`` (n,), unitless: only the sign, before any bonus.
        - ``group_ids`` (S,), integers: the prompt of each response.
        - ``sequence`` (n,), integers: the response of each token.
        - ``sequence_ids`` (S,), integers: only how many there are.

    Writes:
        - ``weight``: Give the weight 0 to every token whose advantage is not positive.
        - ``aggregate``: Sum over the tokens of a group, divide by its responses and by ``length``, and average over the
          groups of the optimizer step that have a response with a positive advantage, or over one if none has.

    Denominator:
        all: the divisor is made of responses and groups, whatever is kept in them.

    Parameters:
        - ``length`` (L_max): int in [1, inf), required. The longest sequence that training takes. Only the scale
          depends on it.

    State:
        none

    Deviations:
        - From its code: group sizes and |W| are exact over all parts and ranks of the optimizer step. There they are of
          a rollout; where one is cut into several optimizer steps the scale is that of an average one.
        - From its code: ``length`` is your setting; there it is the length limit, prompt included.
        - From its code: its option ``normalize_by_kept_tokens`` is not offered.
        - From the paper: its clip is that of another method: ``clip_higher`` with ``low`` 1.0 and ``high`` 9.0 is
          min(r A, min(r, 10) A).

    Pitfalls:
        It expects the advantages of the estimator 'dr_grpo': divided by a standard deviation, a group with one winner
        in many would count for more. A group pulls in proportion to its winners. Entropy still falls if all winners are
        alike. It needs ``group_ids``: without them it is refused.

    Interacts:
        - ``wapo`` was published on ``clip_higher``, ``low`` at 1.0 and ``high`` at 9.0.
        - ``wapo`` gives punished tokens the weight 0, so of ``sign_weights`` only ``positive`` acts, which scales the
          policy term.
        - ``wapo`` divides by a fixed length, so the tokens that a mask drops still count in it.
        - ``wapo`` also divides the penalty of ``kl`` by the number of groups with a winner: the fewer there are, the
          stronger the penalty.

    Limits:
        - Where every token is rewarded, all groups are of one size, and the responses have ``length`` tokens on
          average: equal to ``token_mean``.

    Example:
        Two groups of two responses with two tokens each; only the first has a winner. With length 4 each of its tokens
        weighs 1 / (1 * 2 * 4), and nothing else pulls.

        >>> import torch
        >>> from rlstab import WAPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((4, 2), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(4, 2),
        ...     advantages=torch.tensor([0.5, -0.5, 0.0, 0.0]),
        ...     old_logprobs=old,
        ...     group_ids=torch.tensor([7, 7, 8, 8]),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> out = compose(WAPO(length=4))(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> [round(g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        [-0.0625, -0.0625, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        >>> out.metrics()["wapo/winners"]
        0.25

    Source:
        P. YSS et al., "A Gradient Perspective on RLVR Stability and Winner Advantage Policy Optimization", 2026,
        arXiv 2606.16154. Reference code: layer6ai-labs/wapo ``verifiers/rl/trainer/trainer.py``,
        ``verifiers/rl/trainer/orchestrator.py``.
    """

    about = About(addresses={"sample", "length"})

    name = "wapo"
    writes = {"weight", "aggregate"}

    length: Annotated[int, Range(ge=1)]

    def measure(self, batch: TokenBatch) -> Stat:
        return {"winners": Grouped.of(batch.group_ids, _won(batch), batch.lengths > 0)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        winners = stat.grouped("winners")
        groups = winners.totals.count_nonzero().clamp(min=1)
        sizes = winners.count(batch.spread(batch.group_ids))
        factors = 1 / (groups * self.length * sizes)
        report = {"winners": Mean.of(_won(batch), batch.lengths > 0), "groups": Mean.of(winners.totals > 0)}
        weight = batch.rewarded.to(batch.advantages.dtype)
        return Terms(weight=weight, aggregate=lambda *_: factors, report=report)


def _won(batch: TokenBatch) -> Tensor:
    """``(S,)`` bool, the response has a rewarded token."""
    return batch.sequence_total(batch.rewarded) > 0
