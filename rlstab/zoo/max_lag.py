"""Max lag: drop tokens that were sampled by weights too many updates old."""

from typing import Annotated, Literal

from rlstab import About, Mean, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.zoo.divided_mask import DividedMask


class MaxLag(DividedMask, TokenObjective):
    """Drop tokens that were sampled by weights more than a number of updates old.

    Problem:
        An asynchronous trainer learns from responses that older weights have sampled, and one response may be sampled
        by several of them in turn. Importance weights correct a small difference, but not a large one: the
        ratio of a token says how far the policy has moved on it, not how far the policy has moved on the tokens before
        it, on which the token depends.

    Equation:
        With lag_t the number of updates of the policy since the weights that sampled token t:

            keep_t = lag_t <= k
            L      = sum_t keep_t surrogate_t / sum_t keep_t

        k is ``updates``.

    Reads:
        - ``lag`` (n,), updates: 0 on tokens that the weights in training have sampled.

    Writes:
        - ``keep``: Drop a token when weights more than ``updates`` updates old have sampled it. It leaves the divisor
          too.
        - ``weight``: Give a token the weight 0 when weights more than ``updates`` updates old have sampled it. It still
          counts in the divisor.

    Denominator:
        kept or all: the first by default, the second with ``denominator="all"``.

    Parameters:
        - ``updates`` (k): int in [0, inf), default 8. NeMo-RL and prime-rl drop by a maximum that a run sets; no common
          value exists.
        - ``denominator``: 'kept' | 'all', default 'kept'. Whether dropped tokens leave the divisor.

    State:
        none

    Deviations:
        - From NeMo-RL and prime-rl: they drop whole responses before they are trained on, by the oldest weights of
          each; here it is tokens, so that a response keeps what newer weights have added to it.

    Pitfalls:
        Nothing is learnt where every token is older than k: look at ``max_lag/dropped``. In rlstab's trainer a rollout
        has one lag, at most ``rollout.staleness``, so a smaller k drops whole rollouts. The tokens that are kept still
        follow the ones that are dropped.

    Interacts:
        - ``max_lag`` drops what ``importance_correction`` would weigh.

    Limits:
        - Where the sampler has the weights in training, as without ``rollout.staleness``.

    Example:
        A response of which two tokens were sampled ten updates ago, and two three updates ago.

        >>> import torch
        >>> from rlstab import MaxLag, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 4), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=old,
        ...     lag=torch.tensor([[10, 10, 3, 3]]),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(MaxLag(updates=8))(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> (live.grad[0] + 0.0).tolist()
        [0.0, 0.0, -0.5, -0.5]

    Source:
        No paper. Common code: NVIDIA-NeMo/RL ``nemo_rl/algorithms/async_utils`` (a maximum age of trajectories),
        PrimeIntellect-ai/prime-rl pull request 2957 (a maximum lag of rollouts).
    """

    about = About(
        addresses={"off-policy"},
        no_op_at=(NoOpAt({"updates": 10**9}, "no token is that old."),),
    )

    name = "max_lag"
    needs = {"lag"}

    updates: Annotated[int, Range(ge=0)] = 8
    denominator: Literal["kept", "all"] = "kept"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        old = batch.signal("lag") > self.updates
        report = {"dropped": Mean.of(old), "lag": Mean.of(batch.signal("lag"))}
        return self.keeping(batch, ~old, report)
