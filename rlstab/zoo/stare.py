"""STARE: boost the few rare tokens that move entropy most, while entropy is below a target."""

import math
from typing import Annotated, Literal

import torch

from rlstab import About, Mean, NoOpAt, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.metadata import IdleSign


class STARE(TokenObjective):
    """Give rewarded rare tokens more weight (and, in C2, punished ones less) while mean entropy is below a target.

    Problem:
        Under GRPO the entropy of the policy tends to fall until exploration stops. To first order a token with
        advantage A changes the entropy at its position by -A times a function of its probability that is never positive
        for a token rarer than the entropy (surprisal >= H): rewarding rare tokens raises entropy, rewarding common ones
        lowers it. The balance is nearly critical, so a small extra weight on rewarded rare tokens tips it; a gate keeps
        that weight from turning collapse into explosion.

    Equation:
        With s_t = -``logprobs``, A_t = ``advantages``, N = all kept tokens of the optimizer step:

            L+  = the tokens with A_t > 0 whose s_t is in the top share P of those with A_t > 0
            L-  = likewise among A_t < 0
            g   = 1 if mean of ``entropies`` over the optimizer step < H_tgt, else 0
            w_t = 1 + g (W - 1) on L+,   1 - g (1 - M) on L- (C2 only),   1 elsewhere
            L   = (1 / N) sum_t w_t surrogate_t

            W_{k+1} = clip(W_k + alpha sgn(H_tgt - H_k), 1, W_max)       gains move only where alpha > 0
            M_{k+1} = clip(M_k - alpha sgn(H_tgt - H_k), M_min, 1)

        P is ``share``, H_tgt ``target_entropy``, W ``boost``, M ``damp``, alpha ``increment``, W_max ``max_boost``,
        M_min ``min_damp``, H_k the mean entropy of optimizer step k.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``entropies`` (n,), nats: of the full next-token distribution, for the gate.
        - ``advantages`` (n,), unitless: only the sign.

    Writes:
        - ``weight``: In an optimizer step whose mean entropy is below ``target_entropy`` nats, multiply the policy term
          on the rarest share (``share``) of the tokens with positive advantage by ``boost`` and, in the variant C2
          alone, of those with negative advantage by ``damp`` (variant: ``variant``). The divisor stays. For the next
          optimizer step the first factor rises by ``increment`` after one below the target and falls by as much after
          one above it, within [1, ``max_boost``], and the second moves the other way within [``min_damp``, 1].

    Denominator:
        untouched: N counts tokens, not weights, as in the paper. With O1 and 10 % of the rewarded tokens at 1.1 the
        mean weight is at most 1.01.

    Parameters:
        - ``target_entropy`` (H_tgt): float in [0, inf), default 0.3. Nats. Paper and official code; 0.2 to 0.4 are
          within half a point of AIME24.
        - ``variant``: 'O1' | 'C2', default 'O1'. O1 boosts L+; C2 damps L- as well. Paper and official code. The
          paper's other variants are not in its code, and secondary texts define them differently.
        - ``share`` (P): float in (0, 1], default 0.1. Paper and official code; 0.05 to 0.2 are reported fine.
        - ``boost`` (W): float in [1, inf), default 1.1. Official script for 7B; 1.05 for 14B and 32B.
        - ``damp`` (M): float in [0, 1], default 0.9. C2 only. Official script for 7B; 0.95 for 14B and 32B.
        - ``increment`` (alpha): float in [0, inf), default 0.0. 0 keeps the gains fixed, as the official code does by
          default; its adaptive setting is 0.01.
        - ``max_boost`` (W_max): float in [1, inf), default 1.5. Used where ``increment`` is above 0. Official code.
        - ``min_damp`` (M_min): float in [0, 1], default 0.5. Used where ``increment`` is above 0. Official code.

    State:
        - ``gate``: whether the weights act in this optimizer step; True before the first, decided in each that has
          tokens.
        - ``boost``: W of this optimizer step.
        - ``damp``: M of this optimizer step.
        - ``next_boost``: W of the next optimizer step, moved by this one where ``increment`` is above 0.
        - ``next_damp``: M of the next, likewise.

    Deviations:
        - From the paper: the gate is decided once per optimizer step, on the token mean of its own evidence. The
          paper has one value per batch, and the official code decides once per rollout, from the old policy, aggregated
          like the loss; with one optimizer step per rollout and a token mean these agree.
        - From its code: the top share is taken over all parts and ranks of the optimizer step, as the paper describes.
          The code takes it inside each micro-batch of one device, at least one token in each.
        - From its code: the code ranks by the live policy, which is ``refresh: step`` here. Evidence from the rollout
          ranks by the old policy; the two agree with one optimizer step per rollout.
        - From its code: gains moved by optimizer step k act in k + 1, as in the paper; the code uses them in k already.
        - From its code: every token that ties with the last of the share is selected; ``topk`` in the code breaks ties
          arbitrarily, and half precision makes ties frequent.
        - From its code: the state is part of the checkpoint; there it is not saved, so gains restart when a run
          resumes.

    Pitfalls:
        In the paper the gate matters more than the gain.

    Interacts:
        - ``stare`` was published on ``clip_higher`` and ``token_mean``, the base of its official script (0.2, 0.28,
          dual clip 10).
        - ``entropy_bonus`` and ``adaptive_entropy`` raise the mean entropy and so keep the gate of ``stare`` closed: of
          two methods with a target, the one with the lower target seldom acts.
        - ``top_entropy`` drops rare tokens at positions where the policy was sure, and ``stare``'s share still counts
          them.
        - The weight of ``stare`` multiplies the clipped policy term, so a token that ``clip_higher`` stops stays
          stopped.
        - ``stare`` in variant C2 damps and ``lp_reg`` holds the same tokens, rare ones that were punished, so the
          effects add up.

    Example:
        A correct and a wrong response of two tokens each, share one half: one token in each pool. The mean entropy is
        0.2, below 0.3, so the gate is open. The rewarded token of probability 0.1 weighs 1.1, the punished one of 0.05
        weighs 0.9.

        >>> import torch
        >>> from rlstab import STARE, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.9, 0.1], [0.8, 0.05]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     entropies=torch.tensor([[0.1, 0.3], [0.2, 0.2]]),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> objective = compose(STARE(variant="C2", share=0.5))
        >>> out = objective(batch, PolicyOutputs.from_padded(batch, logprobs=live), state=objective.init_state())
        >>> out.loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.25, -0.275, 0.25, 0.225]

    Source:
        H. Luo, Q. Sun, S. Wu et al., "STARE: Surprisal-Guided Token-Level Advantage Reweighting for Policy Entropy
        Stability", 2026, arXiv 2606.19236. Reference code: hp-luo/STARE ``verl/trainer/ppo/core_algos.py``,
        ``recipe/STARE/stare_ray_trainer.py`` (commit bffb9e7).
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(
            NoOpAt({"boost": 1.0, "variant": "O1", "increment": 0.0}, "every weight is 1."),
            NoOpAt({"boost": 1.0, "damp": 1.0, "increment": 0.0}, "every weight is 1, in variant C2 too."),
            NoOpAt({"target_entropy": 0.0}, "no mean entropy is below 0, so the gate stays closed."),
        ),
        idle_signs=(
            IdleSign("gate", "its gate never opened, the mean entropy stayed at or above {target_entropy} nats"),
        ),
    )

    name = "stare"
    needs = {"entropies", "logprobs"}
    writes = {"weight"}

    target_entropy: Annotated[float, Range(ge=0)] = 0.3
    variant: Literal["O1", "C2"] = "O1"
    share: Annotated[float, Range(gt=0, le=1)] = 0.1
    boost: Annotated[float, Range(ge=1)] = 1.1
    damp: Annotated[float, Range(ge=0, le=1)] = 0.9
    increment: Annotated[float, Range(ge=0)] = 0.0
    max_boost: Annotated[float, Range(ge=1)] = 1.5
    min_damp: Annotated[float, Range(ge=0, le=1)] = 0.5

    @property
    def ascending(self) -> tuple[tuple[str, str], ...]:
        """The bounds are read only where the weights move."""
        return (("boost", "max_boost"), ("min_damp", "damp")) if self.increment else ()

    def init_state(self) -> State:
        return {"gate": True, "boost": self.boost, "damp": self.damp, "next_boost": self.boost, "next_damp": self.damp}

    def measure(self, batch: TokenBatch) -> Stat:
        return {
            "entropy": Mean.of(batch.signal("entropies")),
            "rewarded": Pool.top(-batch.logprobs, self.share, batch.rewarded),
            **({"punished": Pool.top(-batch.logprobs, self.share, batch.punished)} if self.variant == "C2" else {}),
        }

    def advance(self, state: State, stat: Settled) -> State:
        """This optimizer step's entropy decides its gate; the gains that it moves act in the next one."""
        gap = self.target_entropy - stat.mean("entropy").value
        current = {**state, "boost": state["next_boost"], "damp": state["next_damp"]}
        if math.isnan(gap):  # a step without tokens decides nothing
            return current
        move = math.copysign(self.increment, gap) if gap else 0.0
        boost, damp = current["boost"] + move, current["damp"] - move
        if self.increment:
            boost, damp = min(max(boost, 1.0), self.max_boost), min(max(damp, self.min_damp), 1.0)
        return {**current, "gate": gap > 0, "next_boost": boost, "next_damp": damp}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        report = {"gate": Mean.scalar(float(state["gate"])), "boost": Mean.scalar(state["boost"])}
        if not state["gate"]:
            return Terms(report=report)
        rarest = stat.threshold("rewarded")
        boosted = batch.rewarded & rarest.reached(-batch.logprobs)
        weight = torch.where(boosted, state["boost"], torch.ones_like(batch.logprobs))
        report |= {"threshold": rarest.report(), "boosted": Mean.of(boosted)}
        if self.variant == "C2":
            damped = batch.punished & stat.threshold("punished").reached(-batch.logprobs)
            weight = torch.where(damped, state["damp"], weight)
            report["damped"] = Mean.of(damped)
        return Terms(weight=weight, report=report)
