"""Off-policy mask: wrong responses that the policy has moved away from no longer pull (DeepSeek-V3.2)."""

from typing import Annotated, Literal

from torch import Tensor

from rlstab import About, Constants, Gate, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.zoo.anchored import Anchored


class OffPolicyMask(Anchored, TokenObjective):
    """Remove punished responses from the gradient once the live policy has moved away from them.

    Problem:
        A punished response that the live policy would hardly sample any more has nothing left to teach, and pushing it
        further down moves probability mass to arbitrary places. Rewarded responses do no such harm: what the policy
        gave up may be worth recovering. The paper attributes instability of this kind to both staleness and the
        mismatch between sampler and trainer, and drops such responses as a whole.

    Equation:
        With q the policy that sampled, p the live one, and n_i the tokens of response i:

            gap_i  = 1 / n_i sum_t (ln q_t - ln p_t)                     over the response
            gate_t = 0 where A_t < 0 and gap_i > delta, else 1

        delta is ``max_gap``. ln q is ``rollout_logprobs``, or with ``anchor="old"`` the policy that the ratio divides
        by. In expectation gap_i is the divergence KL(q || p) per token, so it is 0 on-policy.

    Reads:
        - ``rollout_logprobs`` (n,), nats: as the sampler reported them; with ``anchor="rollout"``.
        - ``old_logprobs`` (n,), nats: with ``anchor="old"``.

        Its gate reads the live log-probs of all tokens of a response.

    Writes:
        - ``gates``: Stop a token when its advantage is negative and its response is, on average over its tokens, more
          than ``max_gap`` nats less likely to the live policy than to the ``anchor`` policy. It still counts.

    Denominator:
        untouched: a response that is stopped still counts.

    Parameters:
        - ``max_gap`` (delta): float in [0, inf), default 0.5. Nats per token. The paper gives no value. 0.5 is the
          example of TRL's documentation, slime's default is 0.0001: see Pitfalls.
        - ``anchor``: 'rollout' | 'old', default 'rollout'. Whose log-probs the live ones are compared with. The paper:
          what the inference engine returned, so that mismatch counts too.

    State:
        none

    Deviations:
        - From the paper: none in the rule. It does not say whether a stopped response leaves the divisor; here it
          stays, as in TRL and slime. ms-swift takes it out.
        - From TRL: without vLLM it compares with the old policy, as ``anchor="old"`` does. A token whose log-prob the
          sampler did not report counts as 0 there; here such evidence is refused.
        - From slime: it compares with the log-probs that its ratio divides by.

    Pitfalls:
        The two published thresholds are four orders of magnitude apart. A mean gap of 0.5 nats is a response that the
        policy has all but forgotten; one of 0.0001 is below the noise of a single response, so that about half of the
        punished ones are stopped by chance. Look at ``off_policy_mask/stopped`` before you trust a value. The gap of
        one response may be negative. The live policy is that of the loss, so responses are stopped one by one as the
        optimizer steps proceed; with one optimizer step per rollout, the gap shows only the mismatch.

    Interacts:
        - ``off_policy_mask`` was published together with ``clip_higher``: it stops responses, ``clip_higher`` tokens.
        - ``off_policy_mask`` stops responses that have moved too far; ``importance_correction`` weighs the others.

    Limits:
        - An optimizer step without punished tokens stops none.

    Example:
        Two punished responses and a rewarded one. The first fell by ln 3 and ln 1: 0.5493 nats per token, above 0.5.
        The second fell by ln 2 and ln 1, 0.3466, and pulls; so does the rewarded one, whatever it did.

        >>> import torch
        >>> from rlstab import OffPolicyMask, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.6, 0.2], [0.6, 0.2], [0.6, 0.2]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(3, 2),
        ...     advantages=torch.tensor([-1.0, -1.0, 1.0]),
        ...     old_logprobs=old,
        ...     rollout_logprobs=old,
        ... )
        >>> live = torch.tensor([[0.2, 0.2], [0.3, 0.2], [0.06, 0.2]]).log().requires_grad_()
        >>> compose(OffPolicyMask())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [[round(g, 4) + 0.0 for g in row] for row in live.grad.tolist()]
        [[0.0, 0.0], [0.0833, 0.1667], [-0.0167, -0.1667]]

    Source:
        DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, arXiv 2512.02556 (eq.
        9). Common code: huggingface/trl ``trl/trainer/grpo_trainer.py`` (``get_off_policy_mask``), THUDM/slime
        ``slime/utils/ppo_utils.py`` (``compute_opsm_mask``).
    """

    about = About(
        addresses={"off-policy", "sample"},
        no_op_at=(NoOpAt({"max_gap": 1e9}, "no response is that unlikely."),),
    )

    name = "off_policy_mask"
    writes = {"gates"}

    max_gap: Annotated[float, Range(ge=0)] = 0.5
    anchor: Literal["rollout", "old"] = "rollout"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        compared = self.live_and_anchor(batch)

        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            live, other = compared(constants)
            gap = other.double() - live.double()
            far = batch.spread(batch.sequence_mean(gap) > self.max_gap)
            return (~(far & (constants.advantages < 0))).to(ratio.dtype)

        return Terms(gates={"": Gate(gate, whole_sequences=True)})
