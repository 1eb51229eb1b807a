"""The comparisons of ``agreements.yaml``, each with the difference between what is stored and what rlstab gives.

A case lists methods, or names settings of :func:`composed`, or a ``check`` of its own, a function of this file.
``card`` is the ``source`` where it is not named, ``prefix`` begins the names of the cases in the file.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from rlstab import STARE, ESSScale, ImportanceCorrection, Mean, PolicyOutputs, TokenBatch, make_plan
from rlstab.config.objectives import load_objective
from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.core.objective import no_fit_warnings
from rlstab.core.stats import Settled
from rlstab.signals import token_signals_from_logits
from rlstab.stages import group_relative as estimators
from rlstab.stages.gdpo import GDPO
from rlstab.stages.optimal_token_baseline import OptimalTokenBaseline
from rlstab.stages.response_batch import ResponseBatch
from rlstab.zoo import METHODS
from tests.conformance.inputs import load, of_tokens, of_two_rewards, tensors
from tests.conformance.recorded import SHARES, Result, apart, difference, ours, theirs

#: Largest difference that float64 rounding, a denominator with 1e-8 added, and float32 rounding may make.
BOUNDS = {"exact": 1e-13, "added": 1e-8, "single": 1e-6}


@dataclass(frozen=True)
class Agreement:
    """One comparison: ``cases`` give the difference of each stored case, of which none may be above ``bound``."""

    method: str
    source: str
    card: str
    code: str
    settings: str
    cases: Mapping[str, Callable[[], float]]
    bound: float
    of: str

    def largest(self) -> float:
        return max(compared() for compared in self.cases.values())


# -- a composition on stored tensors -----------------------------------------------------------------------------------


#: What is selected, ``(n,)`` bool from the terms.
SELECTED: Mapping[str, Callable[[Any], Tensor]] = {
    "boosted": lambda terms: terms.weight != 1,
    "weighted": lambda terms: terms.weight != 0,
    "dropped": lambda terms: terms.weight == 0,
    "kept": lambda terms: terms.keep,
    "penalised": lambda terms: next(iter(terms.penalties.values())).where,
}


def signal(name: str, source: str, case: str) -> Tensor:
    """``zeros``; which responses were ``cut off`` where some were; or a stored tensor, as ``inputs name``."""
    if name == "zeros":
        return torch.zeros_like(tensors(load(source)["cases"][case]["inputs"])["mask"])
    if name == "cut off":
        return torch.zeros(8).index_fill(0, torch.tensor([0, 5]), 1.0)
    inputs, _, name = name.partition(" ")
    return tensors(inputs)[name]


def composed(source: str, case: str, methods: Sequence[Any], **options: Any) -> Result:
    """What methods, by name or name and settings, give on a stored case; names stand for functions and tensors."""
    for name, value in options.items():
        if name == "selected":
            options[name] = SELECTED[value]
        elif name == "local" and value is not None:
            options[name] = SHARES[value]
        elif isinstance(value, str) and name not in ("evidence", "scope"):
            options[name] = signal(value, source, case)
    items = [{item: {}} if isinstance(item, str) else item for item in methods]
    named = [{"name": name, **settings} for item in items for name, settings in item.items()]
    with no_fit_warnings():  # published code allows what is warned of
        objective = load_objective(named)
    return ours(objective, source, case, **options)


# -- what is compared by a check of its own ----------------------------------------------------------------------------


@functools.cache
def gains(name: str) -> tuple[Mapping[str, Any], ...]:
    """The state of each optimizer step of a stored controller's run."""
    stored = load("stare")["controllers"][name]
    method = STARE(target_entropy=stored["target_entropy"], increment=stored["alpha"])
    state, states = method.init_state(), []
    for step in stored["steps"]:
        state = method.advance(state, Settled({"entropy": Mean.scalar(step["entropy"])}))
        states.append(state)
    return tuple(states)


def controlled(source: str, case: str) -> float:
    """Gates step by step, gains one optimizer step later; infinite where a gate differs."""
    other, mine = load(source)["controllers"][case]["steps"], gains(case)
    if [step["gate"] for step in mine] != [step["gate"] for step in other]:
        return math.inf
    return max(
        apart([step[gain] for step in mine[1:]], [step[gain] for step in other[:-1]]) for gain in ("boost", "damp")
    )


def stored_batch(inputs: str, **signals: str) -> TokenBatch:
    values = tensors(inputs)
    return TokenBatch.from_padded(
        response_mask=values["mask"],
        advantages=values["advantages"],
        old_logprobs=values["old"],
        logprobs=values["live"],
        **{name: values[key] for name, key in signals.items()},
    )


def entropy_of_the_gate() -> float:
    """What STARE compares with its target, on the stored entropies."""
    measured = STARE().measure(stored_batch("main", entropies="entropies"))["entropy"]
    assert isinstance(measured, Mean)
    return measured.value


def mean_entropy(source: str, case: str) -> float:
    return apart(entropy_of_the_gate(), load(source)["mean_entropy"]["token-mean"])


@functools.cache
def signals_of(logits: str, min_p: float = 0.02) -> Mapping[str, Tensor]:
    """``max_logprobs`` and ``log_kept_mass`` (and the log-probs) of the stored logits, (B, T)."""
    values = tensors("main")[f"{logits}_logits"]
    tokens = torch.tensor(load("inputs")["main"]["tokens"])
    names = {"logprobs", "max_logprobs", "log_kept_mass"}
    signals = token_signals_from_logits(values.flatten(0, 1), tokens.flatten(), needs=names, min_p=min_p)
    return {name: getattr(signals, name).view(tokens.shape) for name in sorted(names)}


def proxy_of(inputs: str) -> Mapping[str, Tensor]:
    """Signals that make rlstab's proxy the stored one."""
    values = tensors(inputs)
    plausible = values["target"] > -1e3
    mass = torch.where(plausible, values["live"] - values["target"], 0.0)
    return {"max_logprobs": torch.where(plausible, values["live"], 0.0), "log_kept_mass": mass}


def held_by_lp_reg(
    source: str,
    case: str,
    logits: str = "",
    handed_in: str = "",
    beside: Sequence[Any] = (),
    min_p: float = 0.02,
    live: str = "",
    **options: Any,
) -> Result:
    """Loss and gradient of Lp-Reg, and the tokens at which its coefficient matters."""
    options = {"local": "by_rows_added", **({"live": live} if live else {})} | options
    share = load(source)["cases"][case]["settings"]["logp_neg_k_percent"]
    signals = signals_of(logits, min_p) if logits else proxy_of(handed_in)
    settings = {"form": "code", "share": share, "min_p": min_p, "ratio_cap": None if beside else 10.0}
    on, off = (
        composed(source, case, [{"lp_reg": settings | {"coefficient": coefficient}}, *beside], **options, **signals)
        for coefficient in (1.0, 0.0)
    )
    return {**on, "selected": on["gradient"] != off["gradient"]}


def held(source: str, case: str, **settings: Any) -> float:
    return difference(held_by_lp_reg(source, case, **settings), theirs(source, case))


def held_the_same(source: str, case: str) -> float:
    """Infinite where scope: microbatch selects another token; the loss differs by the counts of the parts."""
    mine = held_by_lp_reg(source, case, logits="live", local=None)
    return 0.0 if torch.equal(mine["selected"], theirs(source, case)["selected"]) else math.inf


def proxy(source: str, case: str) -> float:
    """Of the log-prob of the min-p filtered policy; infinite where the filter keeps another token."""
    largest = 0.0
    for name, stored in load(source)["proxy"].items():
        logits, min_p = name.split()
        mine, other = signals_of(logits, float(min_p)), torch.tensor(stored, dtype=torch.float64)
        left = mine["logprobs"] >= mine["max_logprobs"] + math.log(float(min_p))
        if not torch.equal(left, other > -1e3):
            return math.inf
        largest = max(largest, apart((mine["logprobs"] - mine["log_kept_mass"])[left], other[left]))
    return largest


def drawn(source: str, case: str, methods: Sequence[Any], among: str) -> float:
    """Infinite where another number of tokens is drawn, or one that is not among their candidates."""
    mine = composed(source, case, methods, selected="dropped")["selected"]
    there, candidates = theirs(source, case)["selected"], theirs(source, among)["selected"]
    return 0.0 if mine.sum() == there.sum() and not (mine & ~candidates).any() else math.inf


def scaled(source: str, case: str) -> float:
    """The factor on the learning rate, which is the share itself at ``power`` 1."""
    stored = load(source)["shares"][case]
    batch = stored_batch(stored["inputs"], rollout_logprobs="rollout" if stored["anchor"] == "rollout" else "old")
    plan = make_plan(ESSScale(power=1.0, anchor=stored["anchor"]), [batch])
    live = tensors(stored["inputs"])["live"].requires_grad_()
    return apart(plan.loss(batch, PolicyOutputs.from_padded(batch, logprobs=live)).lr_scale, stored["ess_ratio"])


def responses(source: str, case: str) -> float:
    """Infinite where another response is rejected by the mean of exp(|log-ratio|)."""
    stored = load(source)["responses"][case]
    batch = stored_batch(stored["inputs"], rollout_logprobs="rollout")
    method = ImportanceCorrection(divergence="mean_error", max_divergence=stored["threshold"], denominator="kept")
    keep = SELECTED["kept"](make_plan(method, [batch]).terms(batch))
    return 0.0 if (batch.sequence_mean(keep) > 0).int().tolist() == stored["kept"] else math.inf


def advantages_of(rewards: str, estimator: str, **settings: float) -> Tensor:
    given = load("inputs")["rewards"][rewards]
    values: Tensor = getattr(estimators, estimator)(
        torch.tensor(given["rewards"]), torch.tensor(given["ids"]), **settings
    )
    return values


def estimated(source: str, case: str, estimator: str, **settings: float) -> float:
    stored = load(source)["advantages"][case]
    return apart(advantages_of(stored["rewards"], estimator, **settings), stored["advantages"])


def by_token(source: str, case: str, zero_tail: bool) -> float:
    """The optimal token baseline, over the tokens."""
    given = of_tokens()
    mask = given.pop("mask")
    responses = responses_of(given.pop("rewards"), given.pop("ids"), mask.sum(-1).double(), given)
    mine = OptimalTokenBaseline(zero_tail=zero_tail).advantages(responses, Settled(), {})
    return apart(mine[mask], load(source)["advantages"][case]["advantages"])


def by_reward(source: str, case: str) -> float:
    """GDPO, of responses of one token: theirs is whitened over tokens."""
    given, stage = of_two_rewards(), GDPO(epsilon=1e-6)
    ids, ones = given.pop("ids"), torch.ones(len(given["reward_parts"]), dtype=torch.float64)
    responses = responses_of(ones, ids, ones, given)
    stat, state = measure_all(stage, [responses], stage.init_state(), LocalComm())
    return apart(stage.advantages(responses, stat, state), load(source)["advantages"][case]["advantages"])


def responses_of(rewards: Tensor, ids: Tensor, lengths: Tensor, extra: Mapping[str, Tensor]) -> ResponseBatch:
    return ResponseBatch.of(rewards, ids, lengths=lengths, limit=64, extra=extra)


# -- the table ---------------------------------------------------------------------------------------------------------


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a table of this folder."""
    table: list[dict[str, Any]] = yaml.load(
        (Path(__file__).parent / name).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return table


def _compared(source: str, case: str, of: Sequence[str], settings: Mapping[str, Any]) -> float:
    settings = dict(settings)
    check, case = settings.pop("check", None), settings.pop("case", case)
    if check:
        return float(globals()[check](source, case, **settings))
    return difference(composed(source, case, **settings), theirs(source, case), of)


def _own(given: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a case, which may be its methods alone, or settings of the row's methods that are others here."""
    if isinstance(given, list):
        return {"methods": given}
    own = dict(given or {})
    if changed := {name: own.pop(name) for name in METHODS.names() if name in own}:
        methods = [{item: {}} if isinstance(item, str) else item for item in shared["methods"]]
        own["methods"] = [{name: {**of, **changed.get(name, {})}} for item in methods for name, of in item.items()]
    return own


def _agreement(
    cases: Any,
    method: str,
    source: str,
    code: str,
    settings: str,
    bound: str | float = "exact",
    of: str = "loss, gradient",
    card: str = "",
    prefix: str = "",
    **shared: Any,
) -> Agreement:
    every = cases if isinstance(cases, dict) else dict.fromkeys(cases)
    compared = {
        name: functools.partial(_compared, source, prefix + name, of.split(", "), shared | _own(given, shared))
        for name, given in every.items()
    }
    largest = BOUNDS[bound] if isinstance(bound, str) else bound
    return Agreement(method, source, card or source, code, settings, compared, largest, of)


AGREEMENTS = tuple(_agreement(**row) for row in rows("agreements.yaml"))
