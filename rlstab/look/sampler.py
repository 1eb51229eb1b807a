"""Whether the sampler is the policy: how far apart they are, how much of it is staleness, and what a correction leaves.

Sources: effective sample size and truncated weights, arXiv:2510.26788; the mean weight that a mask leaves, from the
normal approximation of a sum of log-ratios (see :func:`mean_weight`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

import torch
from torch import Tensor

from rlstab.config import load_objective
from rlstab.console import counted
from rlstab.core.objective import no_fit_warnings
from rlstab.core.plan import make_plan
from rlstab.look.alternatives import CORRECTIONS
from rlstab.record import Header, Step

#: Lengths of responses, tokens, for which the mean weight is reported, in addition to those of the dump.
LENGTHS = (256, 1024, 4096, 16384)
#: A disagreement is confident if one side gives a token more than the first and the other less than the second.
CONFIDENT = (0.9, 0.5)
#: Numbers of updates that are reported one by one; the largest stands for all above, too.
MOST_LAGS = 12
#: If the unbounded mean weight is below this, the sampler's log-probs are renormalised over top-p or top-k, if the dump
#: does not say otherwise.
RENORMALISED = 0.97
#: Staleness below this share of the engine's gap cannot be told from it.
VISIBLE = 0.2


@dataclass(frozen=True)
class Lag:
    """Tokens whose sampler is this many updates behind.

    Attributes:
        updates: of the weights since the token was sampled; None if unknown.
        gap: mean absolute difference between the log-probs of the sampler and of the policy at the start of the
            optimizer step, nats.
        low, high: quartiles of its mean by optimizer step, nats.
        tokens: their number.
    """

    updates: int | None
    gap: float
    low: float
    high: float
    tokens: int


@dataclass(frozen=True)
class Sampler:
    """The sampler of a dump against its trainer.

    Attributes:
        lags: by number of updates, or one for all.
        sizes: by step, the effective sample size of weights by token and by response, as shares of their number.
        disagreements: tokens that one side is confident of and the other is not, as a share.
        mean_weight: without a bound, over all tokens; 1 if the sampler's log-probs are of the whole distribution.
        corrections: by name, the mean weight at each of ``lengths``, measured or computed.
        lengths: tokens of a response; those above ``longest`` are computed.
        longest: response of the dump, tokens.
        cut: how the sampler draws from a part of the distribution, such as ``top_p 0.8``; empty if it draws from all
            of it, None if the dump does not say.
        apart: why the two log-probs are not of the same distribution, whatever the weights; empty if they are.
    """

    lags: Sequence[Lag]
    sizes: Sequence[tuple[float, float]]
    disagreements: float
    mean_weight: float
    corrections: Mapping[str, Sequence[float]]
    lengths: Sequence[int]
    longest: int
    cut: str | None = None
    apart: str = ""

    @property
    def engine(self) -> float | None:
        """The gap at no lag, due to the engine and its precision, nats; None if every token has a lag."""
        return next((lag.gap for lag in self.lags if lag.updates == 0), None)

    def staleness(self, lag: Lag) -> float | None:
        """What the updates since a token was sampled add to the gap of the engine, nats; None if unknown.

        The two are independent, so their squares add.
        """
        if self.engine is None or lag.updates == 0:
            return None
        return math.sqrt(max(0.0, lag.gap**2 - self.engine**2))

    @property
    def gap(self) -> float:
        """The gap over all tokens, nats."""
        return sum(lag.gap * lag.tokens for lag in self.lags) / sum(lag.tokens for lag in self.lags)


def sampler_of(steps: Sequence[Step]) -> Sampler | None:
    """Compare sampler and trainer; None if the dump has no log-probs of the sampler."""
    steps = [step for step in steps if step.batch.rollout_logprobs is not None and len(step.batch)]
    if not steps:
        return None
    gaps = [log_weights(step) for step in steps]
    every = torch.cat(gaps)
    sampled = torch.cat([_sampled(step) for step in steps]).exp()
    trained = torch.cat([step.batch.old_logprobs for step in steps]).double().exp()
    sure, unsure = CONFIDENT
    apart = ((sampled > sure) & (trained < unsure)) | ((trained > sure) & (sampled < unsure))
    longest = max(int(torch.bincount(step.batch.sequence).max()) for step in steps)
    lengths = [longest, *(length for length in LENGTHS if length > longest)]
    return Sampler(
        lags=_lags(steps),
        sizes=[_effective(step, gap) for step, gap in zip(steps, gaps, strict=True)],
        disagreements=float(apart.double().mean()),
        mean_weight=float(every.clamp(max=20).exp().mean()),
        corrections=_corrections(steps, every, lengths),
        lengths=lengths,
        longest=longest,
        cut=_cut(steps[0].header),
        apart=_not_comparable(steps[0].header),
    )


def _cut(header: Header) -> str | None:
    if header.top_p is None and header.top_k is None:
        return None
    cut = {"top_p": header.top_p if (header.top_p or 1) < 1 else None, "top_k": header.top_k or None}
    return " and ".join(f"{name} {value:g}" for name, value in cut.items() if value is not None)


def _not_comparable(header: Header) -> str:
    """Raw log-probs are before the temperature, and before top-p and top-k, which they do not show."""
    if header.logprobs_mode != "raw_logprobs":
        return ""
    if header.temperature not in (None, 1.0):
        return f"the sampler's log-probs are raw, those of the trainer at temperature {header.temperature:g}"
    cut = _cut(header)
    return f"the sampler's log-probs are raw, so that none shows its {cut}" if cut else ""


def _sampled(step: Step) -> Tensor:
    assert step.batch.rollout_logprobs is not None
    return step.batch.rollout_logprobs.double()


def log_weights(step: Step) -> Tensor:
    """``(n,)`` float64, log-prob of the old policy minus that of the sampler, nats."""
    return step.batch.old_logprobs.double() - _sampled(step)


def _lags(steps: Sequence[Step]) -> list[Lag]:
    """By optimizer steps since the versions of the dump; without these by the signal ``lag``; without both, what was
    sampled by the policy itself apart from the rest.
    """
    by_lag: dict[int | None, list[Tensor]] = {}
    for step in steps:
        gap, lags, versions = (
            step.batch.logprobs.double() - _sampled(step),
            step.batch.lag,
            step.tensors.get("versions"),
        )
        if lags is None:
            by_lag.setdefault(0 if step.header.first else None, []).append(gap.abs())
            continue
        if versions is not None:  # a host may count `lag` in rollouts
            lags = (step.number - 1 - versions[step.mask]).float()
        behind = lags.nan_to_num().clamp(0, MOST_LAGS).long()
        for lag in behind.unique().tolist():
            by_lag.setdefault(int(lag), []).append(gap.abs()[behind == lag])
    found = []
    for updates in sorted(by_lag, key=lambda updates: math.inf if updates is None else updates):
        means = torch.stack([values.mean() for values in by_lag[updates]])
        whole = torch.cat(by_lag[updates])
        ordered = sorted(means.tolist())
        low, high = ordered[(len(ordered) - 1) // 4], ordered[(3 * len(ordered)) // 4]
        found.append(Lag(updates, float(whole.mean()), low, high, len(whole)))
    return found


def _effective(step: Step, gap: Tensor) -> tuple[float, float]:
    sums = torch.zeros(step.batch.num_sequences, dtype=torch.float64).index_add(0, step.batch.sequence, gap)
    there = torch.bincount(step.batch.sequence, minlength=len(sums)) > 0

    def size(logs: Tensor) -> float:
        weights = (logs - logs.max()).exp()
        return float(weights.sum() ** 2 / weights.square().sum() / len(weights))

    return size(gap), size(sums[there])


def _corrections(steps: Sequence[Step], gaps: Tensor, lengths: Sequence[int]) -> dict[str, list[float]]:
    """The mean weights, measured on the responses of the dump and computed for longer ones."""
    rows: dict[str, list[float]] = {}
    for name, settings in CORRECTIONS.items():
        with no_fit_warnings():
            method = load_objective([{"name": "importance_correction", **settings}])
        weights = []
        for step in steps:
            weight = make_plan(method, [step.batch]).part(0).terms.weight
            weights.append(torch.ones(len(step.batch)) if weight is None else weight)
        measured = float(torch.cat(weights).double().mean())
        rows[name] = [measured, *(mean_weight(gaps, settings, length) for length in lengths[1:])]
    return rows


def mean_weight(gaps: Tensor, settings: Mapping[str, Any], length: int) -> float:
    """The mean weight that a correction leaves on responses of a length.

    The log-ratios of the tokens of a response are taken as independent, with the variance that they have here and the
    mean that makes the sampler unbiased. Their sum S over T tokens is then about normal with a variance v and a mean
    of -v / 2, and the mean of the weight e^S inside a bound h is that of a normal number around +v / 2.

    Args:
        gaps: ``(n,)`` log-ratios of the tokens, nats.
        settings: of ``importance_correction``.
        length: of the response, tokens.
    """
    level = settings.get("level", "token")
    count = 1 if level == "token" else length
    variance = float(gaps.var(correction=0)) * count
    if level == "token":
        weights = gaps.clamp(max=20).exp()
        kept = (weights >= (settings.get("keep_low") or 0.0)) & (weights <= (settings.get("keep_high") or math.inf))
        return float((weights.clamp(max=settings["max_weight"] or math.inf) * kept).mean())
    deviation = math.sqrt(max(variance, 1e-12))
    if level == "geometric":  # the mean of T tokens, which rejects and does not weigh
        mean, spread = float(gaps.mean()), math.sqrt(max(float(gaps.var(correction=0)), 1e-12) / length)
        law = NormalDist(mean, spread)
        return law.cdf(math.log(settings["keep_high"])) - law.cdf(math.log(settings["keep_low"]))
    inside = NormalDist(variance / 2, deviation)  # of the sum, where each response counts by its weight
    if settings.get("keep_high"):
        return inside.cdf(math.log(settings["keep_high"]))
    cap = float(settings["max_weight"])
    return inside.cdf(math.log(cap)) + cap * (1 - NormalDist(-variance / 2, deviation).cdf(math.log(cap)))


def sentence(sampler: Sampler) -> str:
    """The finding in one sentence."""
    engine, gap = sampler.engine, sampler.gap
    size = median(responses for _, responses in sampler.sizes)
    worth = f"the median rollout is worth {size:.0%} of its responses"
    if sampler.apart:
        return f"they cannot be compared: {sampler.apart}."
    weight = f"a mean weight of {sampler.mean_weight:.2f}"
    if sampler.cut:
        return f"they differ by {gap:.3f} nats a token: {sampler.cut} renormalised the sampler, with {weight}; {worth}."
    if sampler.cut is None and sampler.mean_weight < RENORMALISED:
        renormalised = f"{weight} says that top-p or top-k renormalised the sampler"
        return f"they differ by {gap:.3f} nats a token, and {renormalised}; {worth}."
    if engine is None:
        return f"they differ by {gap:.3f} nats a token; {worth}."
    last = sampler.lags[-1]
    later = "later" if last.updates is None else f"{counted(last.updates, 'update')} later"
    added = sampler.staleness(last)
    stale = "" if added is None else f"; staleness adds {added:.3f} {later}"
    if added is not None and added <= VISIBLE * engine:
        stale = ", and staleness adds nothing visible"
    return f"they differ by {engine:.3f} nats a token at no lag (engine and precision){stale}; {worth}."
