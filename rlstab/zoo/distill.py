"""Distillation over whole distributions: pull each token's distribution towards a teacher's (GKD)."""

from typing import Annotated

from rlstab import About, NoOpAt, Penalty, Range, Settled, State, Terms, TokenBatch, TokenObjective


class Distill(TokenObjective):
    """Add the divergence between the next-token distributions of policy and teacher, on the policy's own responses.

    Problem:
        ``opd`` grades the token that was sampled, one number from a whole distribution: an estimate of the reverse
        divergence with the noise of one sample. A teacher that runs next to the policy knows its probability of every
        token, and with them the divergence and its gradient are exact.

    Equation:
        With p the live policy, q the teacher, m = (1 - beta) p + beta q, over the vocabulary at each token:

            L   = L_policy + c sum_t c0_t D_t

            D_t = KL(q || p)                                                beta = 0: forward, covers the teacher
                = KL(p || q)                                                beta = 1: reverse, seeks its mode
                = beta KL(q || m) + (1 - beta) KL(p || m)                   between; 1/2 is Jensen-Shannon

        c is ``coefficient``; c0_t are the coefficients of the loss's aggregation over all tokens, 1 / N for a token
        mean. With ``top_k`` both distributions are first reduced to the teacher's k likeliest tokens and one outcome
        for all others.

    Reads:
        - live ``teacher_divergence`` (n,), nats, with gradient: D of every token, both at the temperature of training.

    Writes:
        - ``penalties``: D at ``beta``, over the vocabulary or with ``top_k``, times ``coefficient``.
        - ``bonus``: with ``alone`` minus the advantage.

    Denominator:
        untouched: the term is divided by the counts of all tokens, whatever masks keep.

    Parameters:
        - ``coefficient`` (c): float in [0, inf), default 1.0. TRL's ``DistillationTrainer`` has no other.
        - ``beta``: float in [0, 1], default 1.0. The default of TRL's ``DistillationTrainer``; its ``GKDTrainer`` has
          0.5.
        - ``top_k`` (k): int in [1, inf) or None, default None. Fewer outcomes and less memory: the teacher's head is
          read once for each optimizer step and not in the backward pass.
        - ``alone``: bool, default False. Leave the reward out, as in pure distillation.

    State:
        none

    Deviations:
        - From the paper: its learning from given answers (``lmbda`` below 1) is not offered; all tokens are the
          policy's own.
        - From TRL's ``DistillationTrainer``: with ``alone`` and a token mean the loss and its gradient are the same.
          It refuses a teacher with more logits than the policy; here these are cut off and the rest renormalised,
          because models with one tokenizer pad their vocabularies to different sizes.
        - From TRL's ``GKDTrainer``: it compares at temperature 1 whatever it samples at.
        - From other code with ``top_k``: TRL's server trainer has the same outcome for all other tokens
          (``loss_add_tail``); verl's sums only over the k tokens, which is not a divergence.

    Pitfalls:
        The divergence does not look ahead: no token is pulled for what it makes likely later. Under the forward
        divergence a teacher that spreads its mass spreads the policy's. Where the teacher finds a token impossible, the
        reverse one is large. Teacher and policy must share the tokenizer.

    Interacts:
        - ``distill`` and ``opd`` pull towards the same teacher; with both it counts twice.
        - ``distill`` with ``model.teacher: sampler`` is an exact penalty on the distance from the policy that sampled.
        - ``distill`` with ``model.teacher: null`` is the whole divergence from the policy's start, of which ``kl``
          estimates the reverse one from the sampled token.

    Example:
        Divergences 0.1 and 0.3, mean 0.2, and a coefficient of 0.5: the loss is 0.1 and its gradient 0.5 / 2.

        >>> import torch
        >>> from rlstab import Distill, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 2), 0.5).log()
        >>> batch = TokenBatch.from_padded(response_mask=torch.ones(1, 2), advantages=torch.zeros(1), old_logprobs=old)
        >>> live = torch.tensor([[0.1, 0.3]], requires_grad=True)
        >>> policy = PolicyOutputs.from_padded(batch, logprobs=old, teacher_divergence=live)
        >>> out = compose(Distill(coefficient=0.5))(batch, policy)
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), live.grad[0].tolist()
        (0.1, [0.25, 0.25])

    Source:
        R. Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes", 2023,
        arXiv 2306.13649 (eq. 1). Common code: huggingface/trl ``trl/trainer/distillation_trainer.py``
        (``_chunked_divergence_loss``) and ``trl/experimental/server_distillation``, verl-project/verl
        ``verl/trainer/distillation``.
    """

    about = About(
        addresses={"sample"},
        no_op_at=(NoOpAt({"coefficient": 0.0, "alone": False}, "0 times the divergence, which is still computed."),),
    )

    name = "distill"
    live_needs = {"teacher_divergence"}

    coefficient: Annotated[float, Range(ge=0)] = 1.0
    beta: Annotated[float, Range(ge=0, le=1)] = 1.0
    top_k: Annotated[int | None, Range(ge=1)] = None
    alone: bool = False

    @property
    def writes(self) -> frozenset[str]:
        return frozenset({"penalties", "bonus"} if self.alone else {"penalties"})

    @property
    def signal_options(self) -> dict[str, float]:
        return {"beta": self.beta, "top_k": self.top_k or 0}

    def in_words(self) -> dict[str, str]:
        kinds = {0.0: "forward KL", 0.5: "Jensen-Shannon", 1.0: "reverse KL"}
        kind = f"the {kinds.get(self.beta, f'generalised Jensen-Shannon (beta = {self.beta})')} divergence"
        outcomes = (
            "" if self.top_k is None else f" over the teacher's {self.top_k} likeliest tokens and all others as one"
        )
        words = {
            "penalties": f"Add {self.coefficient} times {kind} between policy and teacher{outcomes}, on every token."
        }
        return {**words, "bonus": "Take the advantage away."} if self.alone else words

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        penalty = Penalty.of_signal("teacher_divergence", self.coefficient)
        return Terms(penalties={"": penalty}, bonus=-batch.advantages if self.alone else None)
