"""GSPO: one ratio for a response, the geometric mean of those of its tokens (Qwen)."""

from torch import Tensor

from rlstab import About, Constants, PolicyOutputs, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import token_log_ratio
from rlstab.zoo.response_ratio import EXPECTS, gradient_of, kept_mean


class GSPO(TokenObjective):
    """Replace the token ratios of a response by their geometric mean, so that responses are clipped as a whole.

    Problem:
        The reward is for a whole response, while the ratio of one token is a single sample at its position: it corrects
        nothing and adds noise that grows with the length. In mixture-of-experts models, much of the ratio is noise,
        because the experts chosen for a token change between sampling and training. The mean over a response is stable,
        and it matches the unit that is rewarded.

    Equation:
        With d_t = ln of the ratio of token t, n the kept tokens of its response:

            s    = exp((1 / n) sum_t d_t)
            loss = max(-s A, -clip(s, 1 - e_low, 1 + e_high) A),   averaged over responses

        The clip belongs to `clip_higher`, at ``low`` 3e-4 and ``high`` 4e-4; the mean to `sequence_mean`. The gradient
        on the log-prob of each token is -s A / n where the response is not clipped.

    Reads:
        nothing itself. The loss gives it the live log-probs, and says which tokens are kept.

    Writes:
        - ``ratio``: All tokens of a response have one ratio, the geometric mean of the ratios of those that are kept.

    Denominator:
        untouched: a response that is clipped still counts.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the paper: this is its token form (GSPO-token): each token has the value s and the gradient of its own
          log-prob. The sequence form has the same gradient where the advantage is one for the response and nothing is
          dropped; where a mask drops tokens it would pull them all the same, so it is not offered.
        - From the paper: n and the sum are over the tokens that no mask drops; the paper has no masks.
        - From other code: verl clamps ln s at 10 from above; here it is clamped to 20 nats, with zero gradient beyond.
          verl averages as ``loss_agg_mode`` says, by default over tokens. In TRL it is ``importance_sampling_level``
          "sequence" with ``loss_type`` "grpo".
        - From other code: LUSPO (arXiv 2602.05261) multiplies the loss of a response by its length. That is
          `constant_length` with ``length`` 1 in place of `sequence_mean`.

    Pitfalls:
        ln s is a mean, far smaller than what it averages: with a token-level clip range of 0.2, no response is ever
        stopped. At 3e-4 many are: the paper reports two orders of magnitude more clipped tokens than GRPO, and faster
        learning. Log-probs in bfloat16 have errors larger than the range. A single outlier in a long response goes
        unnoticed.

    Interacts:
        - ``gspo`` was published on ``clip_higher`` and ``sequence_mean``, the clip at 3e-4 and 4e-4.
        - The ratio of ``gspo`` is a mean and stays near 1, where ``clip_higher``, ``dcpo_clip``, ``cispo``, ``sapo``
          and ``maspo`` never act with settings that are meant for tokens.
        - ``cppo``, ``drpo`` and ``fipo`` judge a token by its own log-prob and not by the ratio of ``gspo``: tokens of
          one response pull unequally, which ``gspo`` is meant to prevent, and are restrained twice.
        - The mean of ``gspo`` is over the kept tokens, so dropping some tokens changes the ratio of the others.

    Limits:
        - Where every response keeps one token, or all its ratios are equal.
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 1.5 and 0.75 in a rewarded and in a punished response: s = sqrt(1.125) = 1.0607. The rewarded response is
        beyond 1.0004 and stopped; the punished one is not below 0.9997, and its tokens pull with 1.0607 / (2 * 2).

        >>> import torch
        >>> from rlstab import GSPO, ClipHigher, PolicyOutputs, SequenceMean, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.6, 0.3], [0.6, 0.3]]).log().requires_grad_()
        >>> objective = compose(GSPO(), ClipHigher(low=3e-4, high=4e-4), SequenceMean())
        >>> objective(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        [0.0, 0.0, 0.2652, 0.2652]

    Source:
        C. Zheng, S. Liu, M. Li et al., "Group Sequence Policy Optimization", 2025, arXiv 2507.18071 (section 4.3; the
        range in section 5.1). Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_gspo``), huggingface/trl ``trl/trainer/grpo_trainer.py``.
    """

    about = About(
        addresses={"trust region", "off-policy"},
        expects=EXPECTS,
    )

    name = "gspo"
    writes = {"ratio"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, constants: Constants) -> Tensor:
            gaps = token_log_ratio(constants.anchor, constants.anchor, batch)
            return kept_mean(gaps, constants, batch) + gradient_of(policy, constants)

        return Terms(ratio=ratio)
