"""What an objective needs and costs, on top of plain GRPO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rlstab.config import RunConfig
from rlstab.core.batch import BASICS, SIGNALS, TokenBatch
from rlstab.core.compose import Composition, walk
from rlstab.core.objective import State, TokenObjective, no_fit_warnings
from rlstab.core.plan import make_plan
from rlstab.core.terms import Terms
from rlstab.hosts import measures

#: What a signal costs in the trainer that ships.
COSTS = {
    "entropies": "free: the sampler has the logits",
    "max_logprobs": "free: the sampler has the logits",
    "log_kept_mass": "one more reduction over the vocabulary",
    "sum_p_sq": "one more reduction over the vocabulary",
    "rollout_logprobs": "free: the sampler has it",
    "truncated": "free: the sampler knows it",
    "branch": "free: the sampler knows it",
    "block_ids": "free where the task tells its blocks; else yours to provide",
    "ref_logprobs": "a second model in memory and one more forward per rollout",
}
#: What it costs the trainer that ships to differentiate an output of the live policy.
_LIVE_COSTS = {
    "entropies": "in the pass that gives the log-probs",
    "log_kept_mass": "one more reduction over the vocabulary in that pass, on the tokens that read it",
}


def costs(objective: Composition, run: RunConfig | None) -> list[str]:
    """Signals, passes, rows of the backward, state, statistics: what comes on top of plain GRPO."""
    lines = [_reads(objective, name) for name in sorted(objective.needs - BASICS)]
    lines += [
        f"- `{name}` of the live policy, with gradient, for {_who(objective, 'live_needs', name)}: "
        f"{_LIVE_COSTS.get(name, 'yours to provide')}."
        for name in sorted(objective.live_needs)
    ]
    if not lines:
        lines.append("- No signal beyond log-probs and advantages.")
    if run:
        lines.append(_passes(objective, run))
    lines.append(_rows(objective))
    state = [f"`{leaf.name}` ({', '.join(one)})" for leaf in walk(objective) if (one := leaf.method.init_state())]
    lines.append(f"- State, saved with the checkpoint: {'; '.join(state) or 'none'}.")
    deciding = dict.fromkeys(leaf.name for leaf in walk(objective) if measures(leaf.method))
    if deciding:
        lines.append(
            f"- {listed(deciding)} {'decides' if len(deciding) == 1 else 'decide'} by statistics over the whole "
            f"optimizer step, all micro-batches and ranks, before the first backward pass. {_refresh(run)}{_scope(run)}"
        )
    return lines


#: What it costs the trainer that ships that two policies can be told apart; see ``TokenObjective.reads_drift``.
_DRIFT_COSTS = {
    "sampler": "one more forward per rollout",
    "start": "one more forward per optimizer step",
    "step": "one more forward per optimizer step, where a rollout makes several",
}


def beyond_free(method: TokenObjective) -> list[str]:
    """What a method costs in the trainer that ships, at its settings, on top of plain GRPO; empty where it is free."""
    found = [
        f"{name}: {cost}" for name in sorted(method.needs - BASICS) if not (cost := _cost(name)).startswith("free")
    ]
    found += [f"live {name}: {_LIVE_COSTS.get(name, 'yours to provide')}" for name in sorted(method.live_needs)]
    return found + [_DRIFT_COSTS[one] for one in sorted(method.reads_drift) if one in _DRIFT_COSTS]


def _cost(name: str) -> str:
    return COSTS.get(name, "yours to provide")


def _reads(objective: Composition, name: str) -> str:
    what, cost = SIGNALS.get(name, "a signal of your own"), _cost(name)
    return f"- `{name}`, for {_who(objective, 'needs', name)}: {what}. {cost[0].upper()}{cost[1:]}."


def _who(objective: Composition, attribute: str, name: str) -> str:
    return listed(leaf.name for leaf in walk(objective) if name in getattr(leaf.method, attribute))


def listed(names: Iterable[str]) -> str:
    """Names in backticks, each once."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _passes(objective: Composition, run: RunConfig) -> str:
    optimisation, found = run.optimisation, []
    if optimisation.old_logprobs == "recompute":
        found.append("one per rollout for the old log-probs")
    if "ref_logprobs" in objective.needs:
        found.append("one per rollout of the reference model")
    if optimisation.refresh == "step":
        found.append("one per optimizer step for fresh evidence")
    beyond = "; ".join(found) or "none"
    steps, rollout = optimisation.optimizer_steps_per_rollout, f"{run.rollout.prompts} x {run.rollout.group} responses"
    taken = f"{steps} optimizer step{'s' * (steps != 1)} per rollout of {rollout}"
    return f"- {taken}. Forward passes beyond sampling and the loss: {beyond}."


def _rows(objective: Composition) -> str:
    dense = everywhere(objective)
    if dense:
        return (
            f"- {listed(dense)} {'acts' if len(dense) == 1 else 'act'} on every token, so every token has a gradient, "
            f"also one that is dropped: the backward through the vocabulary head skips no row (`head/live_fraction` is "
            f"1)."
        )
    dropping = listed(leaf.name for leaf in walk(objective) if _drops(leaf.method))
    who = f", dropped or given weight 0 by {dropping}" if dropping else ""
    return (
        f"- A token without a gradient (advantage 0{who}, stopped by the trust region; and under no penalty) has no "
        f"row in the backward through the vocabulary head where that starts from hidden states "
        f"(`rlstab.signals.token_signals`); from logits, only what comes after them is saved. The metric "
        f"`tokens/live` is the share whose policy term can have a gradient, `head/live_fraction` that of the rows that "
        f"had a backward."
    )


def _drops(method: TokenObjective) -> bool:
    """It drops tokens, or gives some the weight 0."""
    return "keep" in method.writes or any(
        one.weight is not None and bool((one.weight == 0).any()) for one in _tried(method)
    )


def everywhere(objective: Composition) -> list[str]:
    """Methods whose penalty acts on every token, found by trying them."""
    return [
        leaf.name
        for leaf in walk(objective)
        if not leaf.around  # else it has only the tokens that others keep
        and any(
            penalty.coefficient != 0 and (penalty.where is None or bool(penalty.where.all()))
            for terms in _tried(leaf.method)
            for penalty in terms.penalties.values()
        )
    ]


def _tried(method: TokenObjective) -> list[Terms]:
    """What a method asks for in three steps whose entropy is so low that controllers act."""
    count = 64
    rng = torch.Generator().manual_seed(0)
    values = {name: 1e-6 * torch.rand(8, 8, generator=rng) for name in {"entropies", *(method.needs - BASICS)}}
    known: dict[str, Any] = {name: values[name] for name in values if name in SIGNALS}
    batch = TokenBatch.from_padded(
        response_mask=torch.ones(8, 8),
        advantages=torch.tensor([1.0, -1.0]).repeat(4),
        old_logprobs=-9 * torch.rand(count, generator=rng).view(8, 8),
        extra={name: values[name] for name in values if name not in SIGNALS},
        **known,
    )
    state: State | None = None
    found = []
    with no_fit_warnings():
        for _ in range(3):
            plan = make_plan(method, [batch], state)
            state = plan.state
            found.append(plan.terms(batch))
    return found


def _refresh(run: RunConfig | None) -> str:
    if run is None:
        return "Of which policy (`refresh`) and over how much (`scope`) is for the run to say."
    if run.optimisation.refresh == "step":
        return "`refresh: step`: of the policy at the start of each optimizer step."
    if run.optimisation.optimizer_steps_per_rollout == 1:
        return "`refresh: rollout`: of the policy that sampled, which is the one that learns."
    return "`refresh: rollout`: of the policy that sampled, also in the later optimizer steps, when it is older."


def _scope(run: RunConfig | None) -> str:
    return (
        " `scope: microbatch`: no, of each micro-batch alone." if run and run.optimisation.scope == "microbatch" else ""
    )
