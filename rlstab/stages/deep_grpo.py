"""DEEP-GRPO: sample again from a promising position of an answer that failed."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from rlstab import About, Grouped, Mean, Range, Settled, Stat, State
from rlstab.core.random import uniform
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Expansion, RolloutExpander

#: Added to the seed, so that the choices of answers and of pivots are separate streams of random numbers.
STREAM = 1_000_000_181
#: Weight of the squared slope, against the sum of log losses: that of scikit-learn's LogisticRegression.
RIDGE = 1.0


class DeepGRPO(RolloutExpander):
    """Cut a failed response at a pivot, and sample several continuations that form a separate group.

    Problem:
        If responses are sampled only from the prompt, most of the budget goes to beginnings that the policy already
        handles. On a hard prompt every response fails, and the group has no advantage. Many of these responses are
        right up to a point. Resampled from there, some succeed, and comparing continuations of the same beginning shows
        which tokens made the difference.

    Equation:
        With y a failed answer of |y| = ``lengths`` tokens, one pivot t* of it is drawn:

            x_t  =  t / |y|,   t = 1 ... |y| - 1
            Q(t) ~  P(success | x_t) x_t^gamma
            P(success | x) = sigmoid(b + w x)  by the last W branch points, 1 until they are more than n, of both kinds

        b and w minimise the sum of the log losses of the window plus w^2 / 2. A branch point is a success where one of
        its K ends is: R > r0 with R = ``raw_rewards``, r0 = ``threshold``. gamma is ``gamma``, K is ``branches``, W is
        ``window``, n is ``warmup``. The K ends are a group, compared with one another only.

    Reads:
        - ``raw_rewards`` (S,): an answer at or below the threshold failed.
        - ``lengths`` (S,), tokens: an answer of one token has no pivot.
        - ``sequence_ids`` (S,): identify the draw of a pivot.
        - ``given`` (S,), ``pivot`` (S,), ``group_ids`` (S,): the branches, their x, and which belong together.
        - ``prompt_ids`` (S,): for the report.

    Returns:
        - ``parents``, ``pivots``, ``branches``: failed answers, how many tokens of each are kept, and K.

    Parameters:
        - ``branches`` (K): int in [1, inf), default 8. The paper, and its code.
        - ``gamma``: float in [0, inf), default 2.0. Its code's configuration; the class there has 0.1. The larger, the
          deeper the pivots.
        - ``threshold`` (r0): float, default 0.0. Its code. Set it where the scorer pays for the form of
          a wrong answer.
        - ``groups``: 'all' | 'failed', default 'all'. Which groups branch: every one that has a failed answer, as in
          its code, or only those in which every answer failed, which have no advantage otherwise.
        - ``max_parents``: int in [1, inf) or None, default None. The most failed answers of a group that branch; None
          is all of them, as in its code.
        - ``window`` (W): int in [2, inf), default 10000. Its code.
        - ``warmup`` (n): int in [0, inf), default 10. Its code.

    State:
        - ``place``, ``success``: (W,) float64, x and 0 or 1 of the last W branch points, in the order of the ids of
          their groups.
        - ``seen``: number of branch points so far; the next one is written at its remainder by W.

    Deviations:
        - From its code: its default is another algorithm, in which a teacher corrects failed
          answers and prompts with right prefixes come again later. This is the one of the paper, its
          ``expand_branch_chain``.
        - From its code: candidates for a pivot are 50 tokens apart there, the prompt itself is one of them, and x
          counts these pieces. Here every token is a candidate and at least one is kept.
        - From its code: the logistic regression is that of scikit-learn with its defaults, which has the same minimum.
          Once the window has lost one of the two labels, the last fit stays in use there; here P is then 1.
        - From its code: a branch point enters the window as soon as its ends are scored, and already affects the next
          pivot of the same rollout, which depends on which answer ends first. Here the window changes once per rollout.
        - From its code: responses without advantage are left out before tokens are counted. Here that is
          ``dynamic_sampling``.

    Interacts:
        - with ``stream_weight``: the paper's loss has a separate mean for each of the two streams. Without it a branch
          token weighs as much as any other, and the many branches outvote the responses from the prompt.
        - with ``dynamic_sampling``: list it after this stage, or it drops the prompts on which every answer failed
          before they are branched.
        - with any estimator within groups: the branches from one pivot are a group, so it applies unchanged. Estimators
          that compare across the rollout mix both streams.
        - with ``overlong``, ``laconic``: shaped rewards decide how branches are compared, not what counts as a success.

    Limits:
        - A rollout without failed responses is not changed.
        - ``gamma=0`` before the window is filled: all positions are equally likely.

    Example:
        A right answer and a failed one of four tokens, and no window yet: x = 1/4, 2/4, 3/4 have weights 1 : 4 : 9.

        >>> import torch
        >>> from rlstab.core.comm import LocalComm
        >>> from rlstab.core.method import measure_all
        >>> rewards = torch.tensor([1.0, 0.0]).double()
        >>> batch = ResponseBatch.of(rewards, lengths=4.0, limit=8, extra={"raw_rewards": rewards})
        >>> stage = DeepGRPO(branches=2)
        >>> stat, state = measure_all(stage, [batch], stage.init_state(), LocalComm())
        >>> asked = stage.expand(batch, stat, state, seed=0)
        >>> asked.parents.tolist(), asked.pivots.tolist(), asked.branches
        ([1], [3], 2)

    Source:
        Y. Guo et al., "Deep Dense Exploration for LLM Reinforcement Learning via Pivot-Driven Resampling", 2026,
        arXiv 2602.14169. Reference code: AgentCombo/DEEP-GRPO ``recipe/deep_grpo/branching_strategy.py``
        (``UtilitySamplingStrategy``), ``recipe/deep_grpo/agent_loop/deep_grpo_agent_loop.py``
        (``_process_single_chain``).
    """

    name = "deep_grpo"
    needs = {"raw_rewards"}
    about = About(
        addresses={"exploration"},
        expects={
            "stream_weight": "the loss of the paper is a mean over answers from the prompt and one over branches."
        },
    )

    branches: Annotated[int, Range(ge=1)] = 8
    gamma: Annotated[float, Range(ge=0)] = 2.0
    threshold: float = 0.0
    groups: Literal["all", "failed"] = "all"
    max_parents: Annotated[int | None, Range(ge=1)] = None
    window: Annotated[int, Range(ge=2)] = 10_000
    warmup: Annotated[int, Range(ge=0)] = 10

    def init_state(self) -> State:
        empty = torch.zeros(self.window, dtype=torch.float64)
        return {"place": empty, "success": empty.clone(), "seen": 0}

    def measure(self, part: ResponseBatch) -> Stat:
        branch, success = part.given > 0, self._succeeded(part).double()
        ends = part.select(branch)
        return {
            "place": Grouped.of(ends.group_ids[ends.first], ends.pivot[ends.first]),
            "success": Grouped.of(ends.group_ids[ends.first], self._best(ends)),
            "of_prompt": Grouped.of(part.prompt_ids, success),
            "without_branches": Grouped.of(part.prompt_ids, success, ~branch),
        }

    def advance(self, state: State, stat: Settled) -> State:
        position, success = stat.grouped("place").totals, stat.grouped("success").totals
        new, count = len(position), int(state["seen"])
        latest = torch.arange(max(0, new - self.window), new)
        slots = (count + latest) % self.window
        return {
            "place": state["place"].index_copy(0, slots, position[latest]),
            "success": state["success"].index_copy(0, slots, success[latest]),
            "seen": count + new,
        }

    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        parents = self._parents(responses, seed)
        draws = uniform(seed + STREAM, responses.sequence_ids[parents], torch.tensor(0))
        fitted = self.fitted(state)
        lengths = responses.lengths[parents].long().tolist()
        pivots = []
        for length, draw in zip(lengths, draws.tolist(), strict=True):  # by inverting the distribution function
            position = torch.arange(1, length, dtype=torch.float64) / length
            weight = position**self.gamma
            if fitted is not None:
                weight = weight * torch.sigmoid(fitted[0] + fitted[1] * position)
            edges = weight.cumsum(0)
            pivots.append(1 + int(torch.searchsorted(edges, draw * edges[-1], right=True).clamp(max=length - 2)))
        return Expansion(parents=parents, pivots=torch.tensor(pivots, dtype=torch.int64), branches=self.branches)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> dict[str, Mean]:
        branch, full, without = responses.given > 0, stat.grouped("of_prompt"), stat.grouped("without_branches")
        fitted, ends, lengths = self.fitted(state), responses.select(branch), responses.lengths
        report = {
            "branches": Mean(Mean.of(branch).total, Mean.of(~branch).total),
            "tokens": Mean(Mean.of(lengths, branch).total, Mean.of(lengths, ~branch).total),
            "pivot": Mean.of(ends.pivot[ends.first]),
            "recovered": Mean.of(self._best(ends)),
            "both_outcomes": Mean.of(_both(full)),
            "both_outcomes_without": Mean.of(_both(without)),
            "fitted": Mean.scalar(float(fitted is not None)),
        }
        return report if fitted is None else {**report, "slope": Mean.scalar(fitted[1])}

    def fitted(self, state: State) -> tuple[float, float] | None:
        """``(b, w)`` of the branch points in the window, None if they are too few or all of one kind."""
        count = min(int(state["seen"]), self.window)
        position, success = state["place"][:count], state["success"][:count]
        if count <= self.warmup or not 0 < float(success.sum()) < count:
            return None
        return logistic(position, success)

    def _parents(self, responses: ResponseBatch, seed: int) -> Tensor:
        """``(b,)`` indices of the answers that branch, in the order of the batch."""
        main, success = responses.given == 0, self._succeeded(responses)
        failed = main & ~success & (responses.lengths >= 2)
        if self.groups == "failed":
            failed &= responses.group_sum(success) == 0
        if self.max_parents is not None:
            draws = uniform(seed + STREAM, responses.sequence_ids, torch.tensor(1))
            order = torch.where(failed, draws, 2.0).argsort(stable=True)
            order = order[responses.group[order].argsort(stable=True)]  # groups, and in each the failed ones first
            size = torch.bincount(responses.group, minlength=responses.groups)
            position = torch.arange(len(order)) - (size.cumsum(0) - size)[responses.group[order]]
            failed = failed.index_copy(0, order, failed[order] & (position < self.max_parents))
        return failed.nonzero().squeeze(-1)

    def _succeeded(self, responses: ResponseBatch) -> Tensor:
        """``(S,)`` bool, by the scorer's rewards."""
        return responses.evidence("raw_rewards") > self.threshold

    def _best(self, ends: ResponseBatch) -> Tensor:
        """``(G,)`` float64, 1 for a group with a success."""
        return (ends.group_sum(self._succeeded(ends))[ends.first] > 0).double()


def logistic(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Intercept and slope of a logistic regression of ``(n,)`` labels of both kinds on ``(n,)`` numbers.

    They minimise the sum of the log losses plus ``RIDGE / 2`` times the squared slope: Newton's steps, halved while
    they do not descend, from the slope 0 and its best intercept. The same numbers give the same bits.
    """
    share = float(y.mean())
    beta = torch.tensor([math.log(share) - math.log1p(-share), 0.0], dtype=torch.float64)
    columns = torch.stack([torch.ones_like(x), x], 1)
    ridge = torch.tensor([0.0, RIDGE], dtype=torch.float64)

    def cost(beta: Tensor) -> float:
        scores = columns @ beta
        return float((torch.nn.functional.softplus(scores) - y * scores).sum() + (ridge * beta.square()).sum() / 2)

    for _ in range(100):
        chance = torch.sigmoid(columns @ beta)
        slope = columns.T @ (chance - y) + ridge * beta
        if float(slope.abs().max()) <= 1e-10 * len(x):
            break
        curve = columns.T @ (columns * (chance * (1 - chance)).unsqueeze(1)) + torch.diag(ridge)
        step, current = torch.linalg.solve(curve, slope), cost(beta)
        while cost(beta - step) > current and float(step.abs().max()) > 1e-14:
            step = step / 2
        beta = beta - step
    return float(beta[0]), float(beta[1])


def _both(outcomes: Grouped) -> Tensor:
    """``(k,)`` bool of prompts: answers of which some succeeded and some failed."""
    return (outcomes.totals > 0) & (outcomes.totals < outcomes.counts)
