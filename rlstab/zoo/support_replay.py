"""Support replay: compare policies over the tokens that the sampler kept."""

from rlstab import About, Settled, State, Terms, TokenBatch, TokenObjective


class SupportReplay(TokenObjective):
    """Take live log-probs over the tokens that top-p or top-k left the sampler, as its own log-probs are.

    Problem:
        With top-p or top-k the sampler draws from its distribution cut to a set of likely tokens and divided by their
        mass. A trainer whose log-probs are of the whole vocabulary compares two different things: even at equal weights
        the ratio is the mass that was kept, which a trust region takes for a move of the policy.

    Equation:
        With S_t the tokens that the sampler kept before token a_t, p the live policy, q that of ``old_logprobs``:

            M_t    = sum of p(j) over j in S_t
            r_t    = (p(a_t) / M_t) / q(a_t | S_t)
            d ln(p(a_t) / M_t) / dx_j = [j = a_t] - [j in S_t] p(j) / M_t

        ln M_t is ``log_support_mass``, x the logits. S_t is constant: it is what the sampler did. Where q is the
        sampler, the mean of r_t A_t over its draws, and its gradient, are those of A_t over p cut to S_t: exact,
        however far p has moved. Logits outside of S_t have no gradient. In all other terms too, such as the ratio of
        ``gspo`` and ``kl``, a live log-prob is less ln M_t.

    Reads:
        - live ``log_support_mass`` (n,), nats, with gradient: on the tokens whose log-prob the loss reads.
        - live ``logprobs`` (n,), nats, with gradient: of the whole vocabulary.
        - ``old_logprobs`` (n,), nats: over the same tokens, as samplers report them (vLLM: ``processed_logprobs``).

    Writes:
        - ``support``: Divide the live probability of each token by the policy's mass on the tokens that the sampler
          kept (top-p, top-k), wherever the loss reads it.

    Denominator:
        untouched: every token counts.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the report, which masks logits: log-probs less ln M_t are the same, and entropies stay those of the whole
          vocabulary.

    Pitfalls:
        All log-probs of the evidence must be over the tokens kept: rlstab's trainer makes them so, for the reference
        and the teacher too. A host's recomputed ``old_logprobs`` of the whole vocabulary would be divided by another
        mass; take the sampler's. Nothing trains what lies outside of S_t: the policy is good at the top-p at which it
        was sampled, and may keep or gain mass elsewhere.

    Interacts:
        - ``support_replay`` changes the live log-probs that ``gspo``, ``kl`` and every other method see.

    Limits:
        - Where the sampler kept the whole vocabulary, as in rlstab's trainer without ``rollout.top_p`` and ``top_k``.

    Example:
        A token of probability 0.4; the sampler kept 0.8, so that it drew the token with 0.5. The ratio is 1, not 0.8.

        >>> import torch
        >>> from rlstab import PolicyOutputs, SupportReplay, TokenBatch, compose
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 1), advantages=torch.ones(1), old_logprobs=torch.tensor([[0.5]]).log()
        ... )
        >>> live, mass = (torch.tensor([[p]]).log().requires_grad_() for p in (0.4, 0.8))
        >>> policy = PolicyOutputs.from_padded(batch, logprobs=live, log_support_mass=mass)
        >>> out = compose(SupportReplay())(batch, policy)
        >>> out.loss.backward()
        >>> round(out.metrics()["ratio/mean"], 4), round(live.grad.item(), 4), round(mass.grad.item(), 4)
        (1.0, -1.0, 1.0)

    Source:
        DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, arXiv 2512.02556
        (section 3.1, Keep Sampling Mask). Common code: PrimeIntellect-ai/prime-rl pull request 3431.
    """

    about = About(addresses={"off-policy"})

    name = "support_replay"
    live_needs = {"log_support_mass"}
    writes = {"support"}
    excludes = {
        "lp_reg": "it compares log-probs with that of the likeliest token of the whole vocabulary.",
    }

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(support=True)
