"""How much the policy gradient varies under the baseline of least variance and under plain ones, off-policy.

    python -m benchmarks opob_variance --json benchmarks/results/opob_variance.jsonl

For each seed the countdown model that ships is trained for some optimizer steps with GRPO, and the weights of a few
optimizer steps before the last sample many responses to each of some prompts: that is the staleness. The gradient of
each response's log-prob under the last weights is taken once; all groups that can be drawn from the responses to a
prompt then have gradients that are combinations of these, whose inner products are known. With w_i the importance
weight of a response, truncated at ``--cap`` as in the loss of VCPO, the gradient of a group is the mean of w_i A_i g_i.

- variance: expected squared distance of the gradient of a group from its mean, summed over prompts.
- noise: that over the square of what the mean gradient of all prompts has along the direction of ``rloo``, which is
  unbiased, or of ``grpo`` where rewards are divided by their standard deviation. A baseline that only makes gradients
  shorter lowers the variance and not this, and one that turns them raises this.
- direction: the cosine between the mean gradient and that one.

Groups of one permutation share no response, so products of different groups estimate products of means without bias.
Ratios are paired by seed; intervals are Student's t at 95 % on their logarithms.

Then, on the responses of all seeds, how well the stand-in of ``opob_proxy`` tracks the exact squared norms, and what
the exact norms of one rollout cost in optimizer steps.
"""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from rich.table import Table
from scipy import stats
from torch import Tensor

from benchmarks.protocol import Case, Run, interleave, listed, parser
from rlstab.config import load_run
from rlstab.config.runs import RunConfig
from rlstab.config.settings import RolloutSettings
from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.models.policy import Policy, Sequences, load_policy
from rlstab.report.statistics import Estimate, against_baseline
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.group_relative import grpo
from rlstab.stages.grpo import GRPO
from rlstab.stages.opo import OPO
from rlstab.stages.opob import OPOB
from rlstab.stages.opob_proxy import OPOBProxy, logit_squares
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.rloo import RLOO
from rlstab.stages.stage import AdvantageEstimator
from rlstab.tasks import Countdown
from rlstab.tasks.rewards import score
from rlstab.train.engine import Engine
from rlstab.train.learn import Learner, squared_gradients
from rlstab.train.rollout import Progress, Rollout
from rlstab.train.sampling import sample
from rlstab.train.tracking import Metrics

PROMPTS, GROUP, LEARNING_RATE = 16, 8, 2e-4
#: Where the identities of the responses that are measured begin: no rollout of the training has them.
MEASURED = 1 << 40
#: By name: what is compared, and the baseline of its kind. A division by the standard deviation is one kind.
PLAIN: dict[str, AdvantageEstimator] = {
    "dr_grpo": DrGRPO(),
    "rloo": RLOO(),
    "opo": OPO(),
    "opob": OPOB(norm_by_std=False),
    "opob_proxy": OPOBProxy(norm_by_std=False),
}
DIVIDED: dict[str, AdvantageEstimator] = {
    "grpo": GRPO(ddof=0),
    "opob, std": OPOB(),
    "opob_proxy, std": OPOBProxy(),
}
#: Whose mean gradient is the one that is meant.
REFERENCES = dict.fromkeys(PLAIN, "rloo") | dict.fromkeys(DIVIDED, "grpo")


@dataclass(frozen=True)
class Moments:
    """Of one estimator on the prompts of one seed.

    Attributes:
        variance: of the gradient of a group, mean over prompts.
        signal: squared length of the mean gradient over prompts.
        along: product of the mean gradient with that of the reference.
    """

    variance: float
    signal: float
    along: float

    def plus(self, other: Moments) -> Moments:
        """The sums of both."""
        return Moments(self.variance + other.variance, self.signal + other.signal, self.along + other.along)


def settings(seed: int) -> RunConfig:
    """A short GRPO run, as `examples/grpo_countdown.yaml`."""
    return load_run(
        {
            "seed": seed,
            "model": {"name": "countdown-tiny"},
            "task": {"name": "countdown"},
            "objective": "clip_higher",
            "rollout": {"prompts": PROMPTS, "group": GROUP},
            "optimisation": {"lr": LEARNING_RATE, "micro_batch_size": PROMPTS * GROUP},
        }
    )


def learner(policy: Policy, run: RunConfig) -> Learner:
    return Learner(Engine(policy, Accelerator(cpu=True), run.optimisation), run, LocalComm(), main=True)


def start(run: RunConfig) -> Progress:
    return Progress(0, 0, 0, 0, run.composition.init_state(), run.pipeline.init_state())


def rollout(policy: Policy, task: Countdown, prompts: list[int], group: int, first: int, seed: int) -> Rollout:
    examples = [task.example("train", prompt) for prompt in prompts for _ in range(group)]
    ids = first + torch.arange(len(examples))
    chosen = RolloutSettings(prompts=len(prompts), group=group, batch_size=256)
    return sample(policy, examples, ids, chosen, seed=seed, needs={"sum_p_sq"}, skip_special_tokens=False)


def rewards(task: Countdown, prompts: list[int], group: int, drawn: Rollout) -> Tensor:
    return score(task, [task.example("train", prompt) for prompt in prompts for _ in range(group)], drawn.texts).rewards


def experience(task: Countdown, prompts: list[int], drawn: Rollout, first: int) -> Rollout:
    ids = first + torch.arange(len(drawn.texts))
    signals = {"rollout_logprobs": drawn.signals["logprobs"]}
    advantages = grpo(rewards(task, prompts, GROUP, drawn), ids // GROUP).float()
    zeros = torch.zeros(len(ids), dtype=torch.float64)
    identities = ResponseBatch(zeros, zeros, drawn.ended, ids, ids // GROUP, ids, zeros.long(), zeros, 1)
    return replace(drawn, signals=signals, responses=identities, advantages=advantages)


def trained(seed: int, updates: int, staleness: int) -> tuple[Policy, Policy]:
    """The policy after so many optimizer steps, and what it was ``staleness`` of them before."""
    run, task, policy = settings(seed), Countdown(seed=seed), load_policy("countdown-tiny")
    learning, progress, before = learner(policy, run), start(run), copy.deepcopy(policy.model)
    for number in range(updates):
        if number == updates - staleness:
            before = copy.deepcopy(policy.model)
        prompts = list(range(number * PROMPTS, (number + 1) * PROMPTS))
        drawn = rollout(policy, task, prompts, GROUP, prompts[0] * GROUP, seed)
        progress, _ = learning.learn(experience(task, prompts, drawn, prompts[0] * GROUP), progress, Metrics())
    stale = Policy(before.eval(), policy.tokenizer, policy.pad_id, policy.eos_ids, policy.precision)
    return policy, policy if staleness == 0 else stale


def gradients(policy: Policy, sequences: Sequences) -> Tensor:
    """``(S, d)`` float32 gradients of the log-probs of whole responses."""
    weights, rows = list(policy.model.parameters()), []
    for row in range(len(sequences.response_ids)):
        response = sequences.rows(torch.tensor([row]))
        index = response.response_mask.reshape(-1).nonzero().squeeze(-1)
        logprobs = policy.signals(response, index, temperature=1.0, needs={"logprobs"}, options={}).logprobs
        gradients = torch.autograd.grad(logprobs.sum(), weights)
        rows.append(torch.cat([each.reshape(-1) for each in gradients]))
    return torch.stack(rows)


def regrouped(whole: ResponseBatch, permutations: int, generator: torch.Generator) -> tuple[ResponseBatch, Tensor]:
    """The responses to one prompt in groups of all their permutations, and the place of each in ``whole``."""
    size = len(whole)
    order = torch.cat([torch.randperm(size, generator=generator) for _ in range(permutations)])
    groups = torch.arange(permutations * size) // GROUP
    drawn = whole.select(order)
    tensors = {**drawn.tensors(), "group_ids": groups, "sequence_ids": torch.arange(len(order))}
    return ResponseBatch.from_tensors(tensors, whole.limit), order


@dataclass(frozen=True, eq=False)
class Measured:
    """What the sampler drew and what the learner says of it, ``S`` responses in a row per prompt.

    Attributes:
        rewards, weights: ``(S,)``, weights truncated as in the loss.
        now, then: signals of learner and sampler, ``(S, T)`` by name.
        norms: ``(S,)`` squared norms of the gradients.
    """

    drawn: Rollout
    rewards: Tensor
    weights: Tensor
    now: dict[str, Tensor]
    then: dict[str, Tensor]
    norms: Tensor

    def batch(self, own: Tensor) -> ResponseBatch:
        """Some responses, all to one prompt."""
        zeros = torch.zeros(len(own), dtype=torch.float64)
        return ResponseBatch(
            rewards=self.rewards[own],
            lengths=self.drawn.sequences.response_mask[own].sum(-1).double(),
            ended=self.drawn.ended[own],
            prompt_ids=zeros.long(),
            group_ids=zeros.long(),
            sequence_ids=torch.arange(len(own)),
            given=zeros.long(),
            pivot=zeros,
            limit=RolloutSettings().max_new_tokens,
            extra={
                "logprobs": self.now["logprobs"][own],
                "rollout_logprobs": self.then["logprobs"][own],
                "sum_p_sq": self.now["sum_p_sq"][own],
                "squared_gradient": self.norms[own],
            },
        )


def measure(policy: Policy, stale: Policy, seed: int, options: Any) -> tuple[dict[str, Moments], Measured]:
    """Moments by estimator, and what they were found from."""
    task, per = Countdown(seed=seed), options.responses
    first = options.updates * PROMPTS
    prompts = list(range(first, first + options.prompts))
    drawn = rollout(stale, task, prompts, per, MEASURED, seed)
    rows = torch.arange(options.prompts * per)
    needs = {"logprobs", "sum_p_sq"}
    now = policy.evidence(drawn.sequences, needs, len(rows), temperature=1.0)
    weights = (now["logprobs"].double() - drawn.signals["logprobs"].double()).sum(-1).exp().clamp(max=options.cap)
    earned = rewards(task, prompts, per, drawn)
    measured = Measured(drawn, earned, weights, now, dict(drawn.signals), torch.zeros(len(rows), dtype=torch.float64))
    generator, estimators = torch.Generator().manual_seed(seed), PLAIN | DIVIDED
    sums = {name: Moments(0.0, 0.0, 0.0) for name in estimators}
    means: dict[str, list[Tensor]] = {name: [] for name in estimators}
    for own in rows.split(per):
        matrix = gradients(policy, drawn.sequences.rows(own))
        gram = _gram(matrix)
        measured.norms[own] = gram.diagonal()
        groups, order = regrouped(measured.batch(own), options.permutations, generator)
        spreads = {}
        for name, estimator in estimators.items():
            stat, _ = measure_all(estimator, [groups], {}, LocalComm())
            pulls = estimator.advantages(groups, stat, {}) * weights[own][order] / GROUP
            spreads[name] = coefficients(pulls, order, options.permutations, per)
            means[name].append((spreads[name].mean((0, 1)).float() @ matrix).double())
        for name, spread in spreads.items():
            sums[name] = sums[name].plus(spread_moments(spread, spreads[REFERENCES[name]], gram))
    stacked = {name: torch.stack(values) for name, values in means.items()}
    return {
        name: Moments(
            sums[name].variance / options.prompts,
            (sums[name].signal + across(stacked[name], stacked[name])) / options.prompts**2,
            (sums[name].along + across(stacked[name], stacked[REFERENCES[name]])) / options.prompts**2,
        )
        for name in estimators
    }, measured


def across(first: Tensor, other: Tensor) -> float:
    """Sum of the products of ``(prompts, d)`` mean gradients of different prompts."""
    return float(first.sum(0) @ other.sum(0) - (first * other).sum())


def coefficients(pulls: Tensor, order: Tensor, permutations: int, per: int) -> Tensor:
    """``(permutations, groups, per)``: how much of each response's gradient is in the gradient of each group."""
    spread = torch.zeros(permutations, per // GROUP, per, dtype=torch.float64)
    return spread.scatter_(2, order.view(permutations, -1, GROUP), pulls.view(permutations, -1, GROUP))


def spread_moments(spread: Tensor, reference: Tensor, gram: Tensor) -> Moments:
    """Of groups of one prompt, from their coefficients, those of the reference, and inner products of the gradients."""
    own = (spread @ gram @ spread.transpose(1, 2)).diagonal(dim1=1, dim2=2).mean()
    signal = _of_different(spread, spread, gram)
    return Moments(float(own) - signal, signal, _of_different(spread, reference, gram))


def _of_different(first: Tensor, other: Tensor, gram: Tensor) -> float:
    """Mean product of the gradients of different groups of a permutation."""
    products, count = first @ gram @ other.transpose(1, 2), first.shape[1]
    between = products.sum((1, 2)) - products.diagonal(dim1=1, dim2=2).sum(1)
    return float(between.mean()) / (count * (count - 1))


def _gram(matrix: Tensor) -> Tensor:
    """Inner products of float32 rows, each block of columns added up in float64."""
    return torch.stack([(part @ part.T).double() for part in matrix.split(4096, dim=1)]).sum(0)


def price(repeat: int) -> tuple[float, float]:
    """The exact norms of one rollout, in optimizer steps on it: of all responses, and of groups that teach something.

    Medians of ratios of CPU-seconds. An optimizer step leaves the other groups out too.
    """
    run, task, policy = settings(0), Countdown(), load_policy("countdown-tiny")
    learning, prompts = learner(policy, run), list(range(PROMPTS))
    drawn = rollout(policy, task, prompts, GROUP, 0, 0)
    given = experience(task, prompts, drawn, 0)
    assert given.advantages is not None
    unequal = given.advantages != 0
    cases = {
        "step": Case(lambda _: learning.learn(given, start(run), Metrics())),
        "all": Case(lambda _: squared_gradients(policy, drawn.sequences, 1.0)),
        "uneven": Case(lambda _: squared_gradients(policy, drawn.sequences, 1.0, unequal)),
    }
    times, _ = interleave(cases, repeat)
    return times["step"].ratio_to(times["all"]), times["step"].ratio_to(times["uneven"])


def shown(estimate: Estimate, digits: int = 3) -> str:
    """A ratio with its interval, from an estimate of its logarithm."""
    if estimate.value is None:
        return ""
    value = f"{math.exp(estimate.value):.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{math.exp(estimate.low):.{digits}f}, {math.exp(estimate.high):.{digits}f}]"


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--seeds", default="0,1,2,3,4")
    arguments.add_argument("--staleness", type=int, default=4, help="optimizer steps between sampler and learner")
    arguments.add_argument("--updates", type=int, default=20, help="optimizer steps before anything is measured")
    arguments.add_argument("--prompts", type=int, default=16, help="that are measured, for each seed")
    arguments.add_argument("--responses", type=int, default=64, help="to each of them, a multiple of 8 and at least 16")
    arguments.add_argument("--permutations", type=int, default=200, help="of the responses into groups of 8")
    arguments.add_argument("--cap", type=float, default=8.0, help="where importance weights of the loss are truncated")
    options = arguments.parse_args()
    if options.responses % GROUP or options.responses < 2 * GROUP:
        arguments.error("--responses: give a multiple of 8, at least 16, so that there are several groups.")
    if not 0 <= options.staleness <= options.updates:
        arguments.error("--staleness: give at most as many optimizer steps as --updates.")
    torch.set_num_threads(options.threads)
    run = Run("opob_variance", options.json)
    run.say()
    seeds = [int(seed) for seed in listed(options.seeds)]
    moments: dict[int, dict[str, Moments]] = {}
    logs, ranks, largest = [], [], []
    for seed in seeds:
        policy, stale = trained(seed, options.updates, options.staleness)
        moments[seed], measured = measure(policy, stale, seed, options)
        largest.append(float(measured.weights.max()))
        proxy = torch.where(
            measured.drawn.sequences.response_mask,
            logit_squares(measured.now["logprobs"], measured.now["sum_p_sq"]),
            0.0,
        ).sum(-1)
        logs.append(float(stats.pearsonr(measured.norms.log(), proxy.log())[0]))
        pairs = zip(measured.norms.split(options.responses), proxy.split(options.responses), strict=True)
        ranks.append(statistics.fmean(float(stats.spearmanr(*pair)[0]) for pair in pairs))
    drawn = Table("estimator", "against", title=f"staleness {options.staleness}, {len(seeds)} seeds, groups of {GROUP}")
    for title in ("variance", "noise", "verdict on the variance", "on the noise", "direction"):
        drawn.add_column(title, justify="right")
    direction = {
        name: [
            by_name[name].along / math.sqrt(max(by_name[name].signal * by_name[REFERENCES[name]].signal, 1e-300))
            for by_name in moments.values()
        ]
        for name in PLAIN | DIVIDED
    }
    for kind, base in ((PLAIN, "dr_grpo"), (DIVIDED, "grpo")):
        compared = {}
        for what in ("variance", "noise"):
            values = {name: {seed: _log(moments[seed], name, what) for seed in seeds} for name in kind}
            compared[what] = against_baseline(
                {name: by_seed for name, by_seed in values.items() if name != base}, values[base]
            )
        for name in kind:
            if name == base:
                continue
            pair = {what: compared[what][name] for what in compared}
            drawn.add_row(
                name,
                base,
                *(shown(comparison.difference) for comparison in pair.values()),
                *(comparison.verdict for comparison in pair.values()),
                f"{statistics.fmean(direction[name]):.3f}",
            )
            run.add(
                name,
                against=base,
                staleness=options.staleness,
                seeds=seeds,
                updates=options.updates,
                prompts=options.prompts,
                responses=options.responses,
                cap=options.cap,
                direction=direction[name],
                **{
                    f"{what}_ratio": [
                        None if edge is None else math.exp(edge)
                        for edge in (comparison.difference.value, comparison.difference.low, comparison.difference.high)
                    ]
                    for what, comparison in pair.items()
                },
            )
    run.console.print(drawn)
    everything, uneven = price(options.repeat)
    run.add("tracking", pearson_of_logs=logs, spearman_within_prompts=ranks, largest_weights=largest)
    run.add("price", all_over_step=everything, uneven_over_step=uneven, shape=[PROMPTS, GROUP])
    run.console.print(
        f"opob_proxy against exact norms, mean over seeds: Pearson of the logs {statistics.fmean(logs):.2f}, Spearman "
        f"within prompts {statistics.fmean(ranks):.2f}; largest importance weight {max(largest):.3g}; exact norms of a "
        f"rollout of {PROMPTS} x {GROUP}: {everything:.1f} optimizer steps, of groups that differ alone {uneven:.1f}",
        highlight=False,
    )


def _log(moments: dict[str, Moments], name: str, what: str) -> float:
    """The logarithm of the variance, or of the noise."""
    own = moments[name]
    if what == "variance":
        return math.log(own.variance)
    return math.log(own.variance * moments[REFERENCES[name]].signal / own.along**2)


if __name__ == "__main__":
    main()
