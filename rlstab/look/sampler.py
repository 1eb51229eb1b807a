"""Whether the sampler is the policy: how far apart they are, how much of it is staleness, and what a correction leaves.

Sources: effective sample size and truncated weights, arXiv:2510.26788; the mean weight that a mask leaves, from the
normal approximation of a sum of log-ratios (see :func:`mean_weight`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

import torch
from torch import Tensor

from rlstab.console import counted
from rlstab.look.alternatives import CORRECTIONS, own_objective
from rlstab.look.host_loss import summed
from rlstab.record import Header, Step
from rlstab.zoo.importance_correction import ImportanceCorrection

#: Lengths of responses, tokens, for which the mean weight is reported, along with the longest of the dump.
LENGTHS = tuple(2**power for power in range(15))
#: Settings of ``importance_correction`` that bound its weights.
BOUNDS = ("level", "min_weight", "max_weight", "keep_low", "keep_high")
#: The correction of the run, if it is not one of :data:`CORRECTIONS`.
OWN = "this run's"
#: A disagreement is confident if one side gives a token more than the first and the other less than the second.
CONFIDENT = (0.9, 0.5)
#: Numbers of updates that are reported one by one; the largest stands for all larger ones as well.
MOST_LAGS = 12
#: If the unbounded mean weight is below this, the sampler's log-probs are renormalised over top-p or top-k, if the dump
#: does not say otherwise.
RENORMALISED = 0.97
#: What makes log-probs of the trainer comparable with those of a sampler that draws from a part.
REPLAY = "support_replay takes both over the tokens that were kept"
#: Staleness below this share of the engine's gap cannot be told from it.
VISIBLE = 0.2


@dataclass(frozen=True)
class Lag:
    """Tokens whose sampler is this many updates behind.

    Attributes:
        updates: how often the weights changed since the token was sampled; None if unknown.
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
        lags: the tokens of each number of updates, or all tokens together.
        sizes: the effective sample size of weights by token and by response, for each step by number, as shares of
            their number.
        disagreements: tokens that one side is confident of and the other is not, as a share.
        mean_weight: without a bound, over all tokens; 1 if the sampler's log-probs are of the whole distribution.
        corrections: the mean weight at each of ``lengths``, measured or computed, by name of the correction.
        alone: these weights for the gap of the engine alone, computed; empty where no other gap is known.
        own: name of the correction that the run has; empty where it has none, or one that is not known.
        lengths: tokens of a response: those above ``longest`` are computed, and the others measured on the first tokens
            of each response.
        longest: response of the dump, tokens.
        cut: how the sampler draws from a part of the distribution, such as ``top_p 0.8``; empty if it draws from all
            of it or the run replays its support, None if the dump does not say.
        sides: the probabilities that bound a confident disagreement, see :data:`CONFIDENT`.
        apart: why the two log-probs are not of the same distribution, whatever the weights; empty if they are.
    """

    lags: Sequence[Lag]
    sizes: Mapping[int, tuple[float, float]]
    disagreements: float
    mean_weight: float
    corrections: Mapping[str, Sequence[float]]
    alone: Mapping[str, Sequence[float]]
    own: str
    lengths: Sequence[int]
    longest: int
    cut: str | None = None
    apart: str = ""
    sides: tuple[float, float] = CONFIDENT

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

    def told(self, lag: Lag) -> str:
        """The figures of the tokens of one lag."""
        limit = " or more" if lag.updates == MOST_LAGS else ""
        behind = "" if lag.updates is None else f"{counted(lag.updates, 'update')}{limit} behind: "
        quartiles = "" if lag.low == lag.high else f", quartiles over the steps {lag.low:.4f} to {lag.high:.4f}"
        stale = "" if (added := self.staleness(lag)) is None else f", of it staleness {added:.4f}"
        return f"{behind}{lag.gap:.4f} nats per token{stale}{quartiles}, {lag.tokens:,} tokens"

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        engine, differ = self.engine, f"they differ by {self.gap:.3f} nats per token"
        size = median(responses for _, responses in self.sizes.values())
        worth = f"the median rollout is worth {size:.0%} of its responses"
        if self.apart:
            return f"they cannot be compared: {self.apart}."
        weight = f"a mean weight of {self.mean_weight:.2f}"
        if self.cut:
            return f"{differ}: {self.cut} renormalised the sampler, with {weight}; {REPLAY}; {worth}."
        if self.cut is None and self.mean_weight < RENORMALISED:
            renormalised = f"{weight} says that top-p or top-k renormalised the sampler"
            return f"{differ}, and {renormalised}; {REPLAY}; {worth}."
        if engine is None:
            return f"{differ}; {worth}."
        last = self.lags[-1]
        added = self.staleness(last)
        stale = "" if added is None else f"; after {counted(last.updates or 0, 'update')}, staleness adds {added:.3f}"
        if added is not None and added <= VISIBLE * engine:
            stale = ", and staleness adds nothing visible"
        return f"they differ by {engine:.3f} nats per token at no lag (engine and precision){stale}; {worth}."


def sampler_of(steps: Sequence[Step]) -> Sampler | None:
    """Compare sampler and trainer; None if the dump has no log-probs of the sampler."""
    steps = [step for step in steps if step.batch.rollout_logprobs is not None and len(step.batch)]
    if not steps:
        return None
    gaps = [log_weights(step) for step in steps]
    tokens = torch.cat(gaps)
    sampled = torch.cat([_sampled(step) for step in steps]).exp()
    trained = torch.cat([step.batch.old_logprobs for step in steps]).double().exp()
    sure, unsure = CONFIDENT
    disagree = ((sampled > sure) & (trained < unsure)) | ((trained > sure) & (sampled < unsure))
    longest = max(int(torch.bincount(step.batch.sequence).max()) for step in steps)
    lengths = sorted({*LENGTHS, longest})
    name_of_run, settings = _of_run(steps)
    corrections = CORRECTIONS if name_of_run in ("", *CORRECTIONS) else {name_of_run: settings, **CORRECTIONS}
    fresh = [gap[lag == 0] for step, gap in zip(steps, gaps, strict=True) if (lag := _behind(step)) is not None]
    engine, lags = torch.cat([*fresh, tokens[:0]]), _lags(steps)
    computed = [length for length in lengths if length > longest]

    def measured(correction: Mapping[str, Any], length: int) -> float:
        return float(torch.cat([weights_of(step, correction, length) for step in steps]).mean())

    return Sampler(
        lags=lags,
        sizes={step.number: _effective(step, gap) for step, gap in zip(steps, gaps, strict=True)},
        disagreements=float(disagree.double().mean()),
        mean_weight=float(tokens.clamp(max=20).exp().mean()),
        corrections={
            name: [
                mean_weight(tokens, row, length) if length > longest else measured(row, length) for length in lengths
            ]
            for name, row in corrections.items()
        },
        alone={
            name: [mean_weight(engine, row, length) for length in computed if len(engine) and len(lags) > 1]
            for name, row in corrections.items()
        },
        own=name_of_run,
        lengths=lengths,
        longest=longest,
        cut="" if "support" in steps[0].tensors else _cut(steps[0].header),
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
    return step.tensors["rollout_logprobs"][step.mask].double()


def log_weights(step: Step) -> Tensor:
    """``(n,)`` float64, log-prob of the old policy minus that of the sampler, nats."""
    return step.batch.old_logprobs.double() - _sampled(step)


def _behind(step: Step) -> Tensor | None:
    """``(n,)`` updates since each token was sampled: by the versions of the dump, without these by the signal ``lag``;
    without both, 0 where nothing was updated since, and else None.
    """
    lags, versions = step.batch.lag, step.tensors.get("versions")
    if lags is None:
        return torch.zeros(len(step.batch), dtype=torch.long) if step.header.first else None
    if versions is not None:  # a host may count `lag` in rollouts
        lags = (step.number - 1 - versions[step.mask]).float()
    return lags.nan_to_num().clamp(0, MOST_LAGS).long()


def _lags(steps: Sequence[Step]) -> list[Lag]:
    by_lag: dict[int | None, list[Tensor]] = {}
    for step in steps:
        gap, behind = (step.batch.logprobs.double() - _sampled(step)).abs(), _behind(step)
        if behind is None:
            by_lag.setdefault(None, []).append(gap)
            continue
        for lag in behind.unique().tolist():
            by_lag.setdefault(int(lag), []).append(gap[behind == lag])
    lags = []
    for updates, gaps in sorted(by_lag.items(), key=lambda item: math.inf if item[0] is None else item[0]):
        tokens = torch.cat(gaps)
        means = sorted(float(gap.mean()) for gap in gaps)
        low, high = means[(len(means) - 1) // 4], means[(3 * len(means)) // 4]
        lags.append(Lag(updates, float(tokens.mean()), low, high, len(tokens)))
    return lags


def _effective(step: Step, gap: Tensor) -> tuple[float, float]:
    sums = summed(gap, step.batch.sequence, step.batch.num_sequences)
    nonempty = torch.bincount(step.batch.sequence, minlength=len(sums)) > 0

    def size(logs: Tensor) -> float:
        weights = (logs - logs.max()).exp()
        return float(weights.sum() ** 2 / weights.square().sum() / len(weights))

    return size(gap), size(sums[nonempty])


def _of_run(steps: Sequence[Step]) -> tuple[str, Mapping[str, Any]]:
    """Name and settings of the correction that the run has: one of :data:`CORRECTIONS`, or :data:`OWN`."""
    members = [member for member in own_objective(steps).members if isinstance(member, ImportanceCorrection)]
    settings = {name: getattr(member, name) for member in members for name in BOUNDS}
    if len(members) > 1 or any(member.veto or member.max_divergence or member.normalize for member in members):
        return "", {}
    if not settings and not all("weights" in step.tensors for step in steps):
        return "", {}

    def is_like(row: Mapping[str, Any]) -> bool:
        weights = (
            weights_of(step, settings) if settings else step.tensors["weights"][step.mask].double() for step in steps
        )
        return all(torch.allclose(x, weights_of(step, row)) for x, step in zip(weights, steps, strict=True))

    like = [name for name, row in CORRECTIONS.items() if is_like(row)]
    if len(like) == 1:
        return like[0], CORRECTIONS[like[0]]
    return (OWN, settings) if settings else ("", {})


def weights_of(step: Step, settings: Mapping[str, Any], length: float = math.inf) -> Tensor:
    """``(m,)`` float64: the weight of each of the first tokens of each response, up to a length.

    Args:
        step: a step of a dump with log-probs of the sampler.
        settings: those of ``importance_correction``.
        length: tokens.
    """
    mask, level = step.batch.position < length, settings.get("level", "token")
    logs, response = log_weights(step)[mask], step.batch.sequence[mask]
    if level != "token":
        sums = summed(logs, response, step.batch.num_sequences)
        logs = (sums / (torch.bincount(response, minlength=len(sums)) if level == "geometric" else 1))[response]
    return _bounded(logs, settings)


def _bounded(logs: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Log-ratios as weights, each within the bounds of a correction; 0 where it rejects."""
    weights = logs.clamp(max=20).exp()
    accepted = (weights >= (settings.get("keep_low") or 0.0)) & (weights <= (settings.get("keep_high") or math.inf))
    return weights.clamp(settings.get("min_weight") or 0.0, settings.get("max_weight") or math.inf) * accepted


def mean_weight(gaps: Tensor, settings: Mapping[str, Any], length: int) -> float:
    """The mean weight that a correction leaves on responses of a length.

    The log-ratios of the tokens of a response are taken as independent, with the variance that they have here and the
    mean that makes the sampler unbiased. Their sum S over T tokens is then about normal with a variance v and a mean
    of -v / 2; inside the bounds, the mean of the weight e^S is that of a normal number around +v / 2. The mean that a
    geometric correction takes is normal too, around the mean of the log-ratios.

    Args:
        gaps: ``(n,)`` log-ratios of the tokens, nats.
        settings: those of ``importance_correction``.
        length: the length of the response, tokens.
    """
    level, variance = settings.get("level", "token"), max(float(gaps.var(correction=0)), 1e-12)
    if level == "token":
        return float(_bounded(gaps, settings).mean())
    mean, variance = (
        (float(gaps.mean()), variance / length) if level == "geometric" else (-variance * length / 2, variance * length)
    )
    law = NormalDist(mean, math.sqrt(variance))
    tilted = NormalDist(mean + variance, math.sqrt(variance))  # where each response counts by its weight

    def within(law: NormalDist, low: float, high: float) -> float:
        return max(0.0, law.cdf(high) - law.cdf(low))

    low, least = (math.log(settings.get(name) or 1e-300) for name in ("keep_low", "min_weight"))
    high, largest = (math.log(settings.get(name) or 1e300) for name in ("keep_high", "max_weight"))
    raised = (settings.get("min_weight") or 0.0) * within(law, low, min(least, high))
    cut = (settings.get("max_weight") or 0.0) * within(law, max(low, largest), high)
    return raised + cut + math.exp(mean + variance / 2) * within(tilted, max(low, least), min(high, largest))
