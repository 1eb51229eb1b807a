"""20-Entropy: learn from the forking tokens only (Beyond the 80/20 rule)."""

from typing import Annotated, Literal

from rlstab import About, Mean, NoOpAt, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.metadata import IdleSign
from rlstab.zoo.divided_mask import DividedMask


class TopEntropyMask(DividedMask, TokenObjective):
    """Keep the tokens where the policy was least certain, and drop the rest.

    Problem:
        Most tokens of a chain of thought are nearly determined by what came before; a few are forks where the reasoning
        takes a direction. Among 10^6 tokens, the authors find half below 0.01 nats and the 80th percentile at 0.672.
        They report that learning from only the forks is as good or better, more so for larger models, and that
        learning from only the other 80 % is far worse.

    Equation:
        With H_t = ``entropies``, rho = ``share``:

            tau    = (1 - rho)-quantile of H over all tokens of the optimizer step
            keep_t = H_t >= tau
            L      = sum_t keep_t surrogate_t / sum_t keep_t             denominator: kept      later versions
                   = sum_t keep_t surrogate_t / N                        denominator: all       version 1, TRL

        The quantile interpolates linearly. Both signs of the advantage are treated alike.

    Reads:
        - ``entropies`` (n,), nats: of the full next-token distribution, at the start of the optimizer step.

    Writes:
        - ``keep``: Drop a token when its entropy is below the (1 - ``share``)-quantile over all tokens of the optimizer
          step. It leaves the divisor too.
        - ``weight``: Give a token the weight 0 when its entropy is below the (1 - ``share``)-quantile over all tokens
          of the optimizer step. It still counts in the divisor.

    Denominator:
        kept or all: as ``denominator`` says; both are published.

    Parameters:
        - ``share`` (rho): float in (0, 1], default 0.2. The paper, eq. 6; 0.1 to 0.5 are reported similar.
        - ``denominator``: 'kept' | 'all', default 'kept'. Whether dropped tokens leave the denominator. 'kept' is the
          later versions of the paper; 'all', its first version and TRL, divides by every token: a policy gradient about
          1 / ``share`` times smaller, here five, at the same learning rate.

    State:
        none

    Deviations:
        - From the paper: none in the rule, which has two published denominators. Version 1 divides by all tokens, later
          versions by the selected ones (eq. 6); a learning rate that was tuned with one is off by 1 / ``share`` with
          the other.
        - From the paper: it writes the quantile of a batch or micro-batch; here it is exact over all parts and ranks of
          the optimizer step. It does not say whether the old or the current policy is meant; here it is the policy at
          the start of the optimizer step.
        - From other code: TRL's ``top_entropy_quantile`` is ``denominator="all"`` with a quantile per micro-step (over
          ranks, not over accumulation steps). ms-swift has 'all' too, per micro-batch of one device.
          CarlanLark/Lp-Reg-dev has 'kept', the top floor(0.2 n) of a micro-batch of one device, at least one: one token
          less than here unless n is below 5 or divisible by 5, and of equal entropies only as many as fit.
        - From TRL: an empty pool drops everything there, and nothing here. TRL's threshold is rounded to float32, so it
          may fall on the entropy just below the quantile and keep one token more.

    Pitfalls:
        Where more than 1 - ``share`` of the entropies are equal (0, after a collapse), the threshold is that value and
        everything is kept: look at the reported share. In TRL, this kind of mask also applies to the entropy bonus but
        not to the KL; here both act on all tokens.

    Interacts:
        - ``top_entropy`` was published on ``clip_higher`` and ``token_mean`` (DAPO's loss, without ``kl``).

    Limits:
        - An optimizer step in which all entropies are equal keeps everything.

    Example:
        Entropies 0.1, 0.2, 1.0, 2.0 and share one half: the median is (0.2 + 1.0) / 2 = 0.6, and the last two are kept.
        Their weight is 1 / 2 each when the kept tokens are counted, 1 / 4 when all are.

        >>> import torch
        >>> from rlstab import PolicyOutputs, TokenBatch, TopEntropyMask, compose
        >>> old = torch.full((1, 4), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=old,
        ...     entropies=torch.tensor([[0.1, 0.2, 1.0, 2.0]]),
        ... )
        >>> for denominator in ("kept", "all"):
        ...     live = old.clone().requires_grad_()
        ...     objective = compose(TopEntropyMask(share=0.5, denominator=denominator))
        ...     objective(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        ...     print(denominator, [round(g, 4) + 0.0 for g in live.grad[0].tolist()])
        kept [0.0, 0.0, -0.5, -0.5]
        all [0.0, 0.0, -0.25, -0.25]

    Source:
        S. Wang et al., "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for
        LLM Reasoning", 2025, arXiv 2506.01939 (v1; later versions, eq. 6). Code of others: huggingface/trl
        ``trl/trainer/grpo_trainer.py`` (``get_high_entropy_mask``), CarlanLark/Lp-Reg-dev
        ``verl/trainer/ppo/core_algos.py`` (``compute_policy_loss_8020_split``).
    """

    about = About(
        addresses={"token"},
        no_op_at=(NoOpAt({"share": 1.0}, "the threshold is the smallest entropy, which all tokens reach."),),
        idle_signs=(IdleSign("share", "every token counted", at=1),),
    )

    name = "top_entropy"
    needs = {"entropies"}

    share: Annotated[float, Range(gt=0, le=1)] = 0.2
    denominator: Literal["kept", "all"] = "kept"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Pool.quantile(batch.signal("entropies"), 1 - self.share)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat.threshold("entropy")
        forking = threshold.reached(batch.signal("entropies"))
        report = {"threshold": threshold.report(), "share": Mean.of(forking)}
        return self.keeping(batch, forking, report)
