"""Stream weight: a mean over answers from the prompt, and one over branches (DEEP-GRPO)."""

from typing import Annotated

import torch

from rlstab import About, Mean, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective


class StreamWeight(TokenObjective):
    """Average the tokens of branches separately from those of responses that start at the prompt.

    Problem:
        Where failed responses are resampled from a pivot, the optimizer step contains two kinds of responses. There may
        be many times more branches than responses from the prompt, and their number depends on how many responses fail.
        In a single mean, the branches outvote the responses that are sampled as in actual use, by an accidental
        amount. Two separate means fix the proportion.

    Equation:
        Over the optimizer step N tokens, N_main of answers from the prompt and N_branch sampled in branches:

            w_t = N / N_main               on an answer from the prompt
            w_t = lambda N / N_branch      on a branch
            L   = sum_t w_t surrogate_t / N
                = mean over the answers from the prompt + lambda times the mean over branches

        lambda is ``coefficient``. The second line of L holds under ``token_mean`` where no token is dropped. What a
        branch was given belongs to its prompt, so no gradient reaches it.

    Reads:
        - ``branch`` (n,), 0 or 1: 1 on every token that was sampled in a branch.

    Writes:
        - ``weight``: Multiply the policy term so that answers from the prompt have a separate mean, and branches
          another that counts ``coefficient`` times.

    Denominator:
        untouched: all tokens count in N.

    Parameters:
        - ``coefficient`` (lambda): float in [0, inf), default 1.0. The paper and its code,
          ``branch_chain_loss_lambda``. 0 learns nothing from branches.

    State:
        none

    Deviations:
        - From its code: it counts the tokens of one rank and averages over ranks, and adds 1e-8 to each count. Here
          both counts are those of the whole optimizer step.
        - From its code: it drops responses without advantage before it counts. Here they count, unless
          ``dynamic_sampling`` dropped them from the rollout.
        - From its code: a KL term is averaged per stream too, branches times lambda. Here penalties are over all
          tokens.

    Pitfalls:
        The policy term grows: its weights add up to (1 + lambda) N when both streams are present. In an optimizer step
        without responses from the prompt, every token has the weight lambda, because the mean over nothing is 0.

    Interacts:
        - Under ``token_mean`` both streams of ``stream_weight`` are exact means.
        - ``stream_weight`` counts every token of a stream, also those that a mask drops, so a stream that loses more
          of them weighs less. Put ``stream_weight`` within the mask to count what is left.
        - ``stream_weight`` divides by counts of tokens. Under ``sequence_mean`` and ``block_mean``, where tokens of
          long responses weigh less, the two streams do not weigh 1 to lambda.
        - The penalties of ``kl`` and ``entropy_bonus`` do not follow the two streams of ``stream_weight``: each stays
          one mean over all tokens.

    Limits:
        - An optimizer step without branches has no weight but 1.

    Example:
        An answer of three tokens and a branch of one: 4 / 3 on each of the three, 4 on the one, divided by four.

        >>> import torch
        >>> from rlstab import PolicyOutputs, StreamWeight, TokenBatch, compose
        >>> old = torch.full((2, 3), 0.5).log()
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=mask,
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     branch=torch.tensor([False, True]),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(StreamWeight())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad[mask.bool()].tolist()]
        [-0.3333, -0.3333, -0.3333, 1.0]

    Source:
        Y. Guo et al., "Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven Resampling", 2026,
        arXiv 2602.14169. Reference code: AgentCombo/DEEP-GRPO ``verl/workers/actor/dp_actor.py``.
    """

    about = About(addresses={"sample"})

    name = "stream_weight"
    needs = {"branch"}
    writes = {"weight"}

    coefficient: Annotated[float, Range(ge=0)] = 1.0

    def measure(self, batch: TokenBatch) -> Stat:
        return {"branch": Mean.of(batch.signal("branch") > 0)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        tokens, branches = float(stat.mean("branch").count), float(stat.mean("branch").total)
        main = tokens / (tokens - branches) if tokens > branches else 1.0
        other = self.coefficient * tokens / branches if branches else 1.0
        branch = batch.signal("branch") > 0
        weight = torch.where(branch, other, torch.full(branch.shape, main, dtype=torch.float64, device=branch.device))
        return Terms(weight=weight, report={"branches": Mean.of(branch), "weight": Mean.of(weight)})
