"""Metrics of a loss that only TRL logs, computed from a planned micro-batch and its live outputs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rlstab.adapters.metrics import SIDES
from rlstab.core.compose import Composition, walk
from rlstab.core.loss import held_ratio, loss_of_part
from rlstab.core.objective import State
from rlstab.core.plan import Plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.core.terms import Constants


def entropy_price(objective: Composition, state: State) -> float | None:
    """TRL's ``entropy_coef``, the coefficient of entropy in the next step; None if no method has one."""
    for key, method in objective.keyed.items():
        if method.name == "adaptive_entropy":
            return float(state[key]["next_coefficient"])
        if method.name == "entropy_bonus":
            coefficient: Any = getattr(method, "coefficient", None)
            return float(coefficient)
    return None


def in_trls_terms(report: Mapping[str, Mean], config: Any) -> Mapping[str, Mean]:
    """A report in which ``delta`` stops no token by the clip, as in TRL; those it stops have another name."""
    high, delta, name = config.epsilon if config.epsilon_high is None else config.epsilon_high, config.delta, SIDES[1]
    if delta is None or delta > 1 + high or name not in report:
        return report
    return {**report, name: Mean(0 * report[name].total, report[name].count), "ratio/clipped_delta": report[name]}


def trl_report(plan: Plan, index: int, live: PolicyOutputs) -> Mapping[str, Mean]:
    """The metrics of one micro-batch that TRL has for this objective, by TRL's names.

    ``policy_loss`` is the loss of the optimizer step without its entropy term.
    """
    part, constant, report = plan.part(index), live.constant(), {}
    batch, methods = part.batch, {leaf.method.name: leaf.method for leaf in walk(plan.objective)}
    cap: Any = getattr(methods.get("cispo"), "cap", None)
    if cap is not None:
        report["cispo_clip_ratio"] = Mean.of((held_ratio(part, constant) > cap) & batch.rewarded)
    if "vespo" in methods and part.terms.surrogate is not None:
        kernel = part.terms.surrogate.fn(held_ratio(part, constant), Constants(constant, part.advantages, part.kept))
        report["vespo/phi_seq_mean"] = Mean.of(batch.sequence_mean(kernel), batch.lengths > 0)
    if methods.keys() & {"entropy_bonus", "adaptive_entropy"}:
        penalties = {name: term for name, term in part.terms.penalties.items() if "entropies" not in term.reads}
        without = replace(part, terms=replace(part.terms, penalties=penalties))
        with torch.no_grad():
            loss = loss_of_part(without, constant, None, plan.kept, plan.everything).loss
        # these sum to one step
        parts = torch.tensor(len(batch) / max(plan.everything.tokens, 1.0), dtype=torch.float64)
        report["policy_loss"] = Mean(loss.double(), parts)
    return report
