"""Making a rollout: choose prompts, sample, score, shape the rewards, sample more or drop. Then it can be learnt from.

Nothing here changes what the maker holds: a rollout comes with the standing after it, and the loop keeps that once the
rollout counts. All randomness is by identity: a response's number comes from the place of its prompt in the rollout, a
branch's from its parent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Event

import torch
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.core.comm import Comm
from rlstab.core.method import State
from rlstab.core.stats import Settled
from rlstab.errors import ConfigError, MethodError
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Expansion, Offer, RolloutExpander, Stage, no_features
from rlstab.tasks import Task
from rlstab.tasks.blocks import require_blocks
from rlstab.tasks.rewards import Rewards
from rlstab.tasks.task import flaky_share
from rlstab.train.asking import TRUE, Asked, Asking, Identities, joined, reward_part
from rlstab.train.evaluate import Share
from rlstab.train.metrics import Metrics
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.providers import Providers, Responses
from rlstab.train.rollout import BRANCHES, Rollout, Standing
from rlstab.train.stage_evidence import BLOCKS


class Maker:
    """Makes rollouts.

    Args:
        run: the configuration.
        policy: that samples, asked for before each rollout.
        task: where prompts come from, and rewards where there are no others.
        rewards: what is measured and learnt from.
        comm: over all ranks.
        share: of this rank.
        providers: functions of the user's own.
        say: tells the user something.
        leaving: set once nobody waits for scores any more.
        reference: makes the log-probs of the reference policy, where the objective reads them.
    """

    def __init__(
        self,
        run: RunConfig,
        policy: Callable[[], Policy],
        task: Task,
        rewards: Rewards,
        comm: Comm,
        share: Share,
        providers: Providers,
        say: Callable[[str, str], None],
        leaving: Event,
        reference: Callable[[Sequences], Tensor] | None,
    ) -> None:
        self.run, self.policy, self.task, self.rewards = run, policy, task, rewards
        self.comm, self.share = comm, share
        self.providers, self.say, self.leaving, self.reference = providers, say, leaving, reference
        self.stages = run.pipeline
        #: group ids that a rollout has for prompts: refills have some of their own
        self.slots = run.rollout.prompts * max([1, *(one.rounds for one in self.stages.expanders)])
        #: whether the task is asked for blocks; a method alone may have them from a provider of the user's own
        wanted = self.stages.needs & BLOCKS
        self.blocks = bool(wanted) or ("block_ids" in run.composition.needs and "block_ids" not in providers.signals)
        if self.blocks:
            who = next((f"the stage '{one.name}'" for one in self.stages if one.needs & BLOCKS), None)
            require_blocks(task, who or "the method that reads 'block_ids'")
            if who and flaky_share(task):
                raise ConfigError(
                    f"{who} learns from rewards of blocks, and the task '{task.name}' is flaky, which loses scores of "
                    f"whole answers: nothing would be lost. Set task.flaky to 0, or take another advantage estimator."
                )
        self.asking = Asking(run, task, rewards, self.blocks, share, say, leaving)

    def begin(self) -> Standing:
        """Where a run begins."""
        return Standing(0, 0, self.stages.init_state())

    # -- a rollout -------------------------------------------------------------------------------------------------

    def make(self, standing: Standing, metrics: Metrics) -> tuple[Rollout, Standing]:
        """The next rollout, and how far the making has come with it; its queue is left to the loop.

        Raises:
            MethodError: a stage returned something other than the interface asks for.
        """
        first = self.run.rollout.prompts
        policy = self.policy()
        parts = [self._prompted(policy, standing, 0, first, metrics)]
        learnt = parts[0].responses  # what is learnt from so far
        drawn = first
        if self.stages.expanders and not self._refused(learnt.rewards):
            for expander in self.stages.expanders:
                learnt, drawn = self._expanded(expander, policy, standing, parts, learnt, drawn, metrics)
        whole = joined(parts, policy.pad_id)
        bad = self._refused(whole.responses.rewards)
        states = dict(standing.states)
        if not bad:
            for one in (self.stages.selector, *self.stages.shapers, *self.stages.expanders):
                states[one.name] = self._reported(one, whole.seen(one.needs), standing.states[one.name], metrics)
        self._observe(metrics, whole, learnt)
        rollout = self._finished(whole, learnt.sequence_ids, bad, metrics)
        return rollout, Standing(standing.made + 1, standing.drawn + drawn, states, standing.queue)

    def prepare(self, standing: Standing) -> None:
        """Draw the problems of the next rollout while the last one is learnt."""
        if standing.made < self.run.optimisation.rollouts and "prompt_features" not in self.stages.selector.needs:
            self.asking.prepare(self._mine(self._selected(standing, 0, self.run.rollout.prompts, None), 0))

    def _refused(self, rewards: Tensor) -> int:
        """How many rewards of all ranks are no numbers."""
        return int(self.comm.sum((~torch.isfinite(rewards)).sum().double().reshape(1)))

    # -- prompts ---------------------------------------------------------------------------------------------------

    def _selected(self, standing: Standing, first: int, count: int, policy: Policy | None) -> Tensor:
        selector, size = self.stages.selector, self.task.size["train"]
        offer = Offer(
            standing.made,
            first,
            count,
            standing.drawn + first,
            size,
            self.run.seed,
            no_features if policy is None else lambda numbers: self._features(policy, numbers),
        )
        chosen = selector.select(offer, standing.states[selector.name])
        fits = isinstance(chosen, Tensor) and chosen.dtype == torch.int64 and chosen.shape == (count,)
        if not fits or (count and (int(chosen.min()) < 0 or (size is not None and int(chosen.max()) >= size))):
            what = f"{chosen.dtype} of {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else repr(chosen)
            limit = f" below {size}" if size is not None else ""
            raise MethodError(
                f"'{selector.name}': select returned {what}, expected ({count},) int64 numbers of prompts from 0"
                f"{limit}. Change its function."
            )
        return chosen

    def _mine(self, chosen: Tensor, first: int) -> list[int]:
        """The prompts of this rank among those chosen for the places from ``first`` on."""
        return [
            int(chosen[place]) for place in range(len(chosen)) if (first + place) % self.share.world == self.share.rank
        ]

    @torch.no_grad()
    def _features(self, policy: Policy, numbers: Tensor) -> Tensor:
        """``(n, width)`` float64 mean input embedding of each prompt."""
        prompts = [one.asked for one in self.asking.examples(numbers.tolist())]
        ids, mask = policy.encode(prompts, self.run.rollout.max_new_tokens, chat=self.run.rollout.chat)
        hidden = policy.model.get_input_embeddings()(ids).double() * mask.unsqueeze(-1)
        found: Tensor = hidden.sum(1) / mask.sum(1, keepdim=True)
        return found.cpu()

    # -- sampling and scoring --------------------------------------------------------------------------------------

    def _prompted(self, policy: Policy, standing: Standing, first: int, count: int, metrics: Metrics) -> Asked:
        """Answers to the next ``count`` prompts, as many as this rank has of them, with shaped rewards."""
        group = self.run.rollout.group
        chosen = self._selected(standing, first, count, policy)
        mine = self._mine(chosen, first)
        examples = self.asking.examples(mine)
        places = [first + place for place in range(count) if (first + place) % self.share.world == self.share.rank]
        group_ids = torch.tensor([standing.made * self.slots + place for place in places], dtype=torch.int64)
        repeats = torch.arange(len(places)).repeat_interleave(group)
        ids = Identities(
            sequence_ids=group_ids[repeats] * group + torch.arange(group).repeat(len(places)),
            group_ids=group_ids[repeats],
            prompt_ids=torch.tensor(mine, dtype=torch.int64)[repeats],
            given=None,
            pivot=torch.zeros(len(repeats), dtype=torch.float64),
        )
        return self._shaped(
            self.asking.ask(policy, [examples[place] for place in repeats.tolist()], ids, metrics), standing
        )

    def _branched(
        self, policy: Policy, standing: Standing, whole: Asked, learnt: ResponseBatch, more: Expansion, metrics: Metrics
    ) -> Asked:
        """What goes on from the pivots of some responses of this rank."""
        parents = torch.zeros(0, dtype=torch.int64) if more.parents is None else more.parents
        pivots = torch.zeros(0, dtype=torch.int64) if more.pivots is None else more.pivots
        branches = more.branches
        rows = torch.isin(whole.responses.sequence_ids, learnt.sequence_ids[parents]).nonzero().squeeze(-1)
        place = {int(whole.responses.sequence_ids[row]): int(row) for row in rows}
        examples, given, ids = [], [], []
        for parent, pivot in zip(parents.tolist(), pivots.tolist(), strict=True):
            row = place[int(learnt.sequence_ids[parent])]
            tokens = whole.sequences.response_ids[row][whole.sequences.response_mask[row]].tolist()
            examples += [whole.examples[row]] * branches
            given += [tokens[:pivot]] * branches
            ids.append(int(learnt.sequence_ids[parent]))
        parent_ids = torch.tensor(ids, dtype=torch.int64)
        repeats = torch.arange(len(ids)).repeat_interleave(branches)
        found = Identities(
            sequence_ids=BRANCHES + parent_ids[repeats] * branches + torch.arange(branches).repeat(len(ids)),
            group_ids=BRANCHES + parent_ids[repeats],
            prompt_ids=learnt.prompt_ids[parents][repeats],
            given=given,
            pivot=(pivots.double() / learnt.lengths[parents])[repeats],
        )
        return self._shaped(self.asking.ask(policy, examples, found, metrics), standing)

    # -- stages ----------------------------------------------------------------------------------------------------

    def _shaped(self, part: Asked, standing: Standing) -> Asked:
        """The same with what the shapers add to the rewards; those of the scorer are what each of them sees."""
        rewards = part.responses.rewards
        if self.stages.shapers and not self._refused(rewards):
            for one in self.stages.shapers:
                seen, state = part.seen(one.needs), standing.states[one.name]
                stat, _ = one.settle([seen], state, self.comm)
                rewards = rewards + checked(one, "shape", one.shape(seen, stat, state), len(seen))
        return replace(part, responses=part.responses.reshaped(rewards))

    def _expanded(
        self,
        expander: RolloutExpander,
        policy: Policy,
        standing: Standing,
        parts: list[Asked],
        learnt: ResponseBatch,
        drawn: int,
        metrics: Metrics,
    ) -> tuple[ResponseBatch, int]:
        """Ask an expander as often as it asks for fresh prompts: what is learnt from then, and prompts chosen."""
        state = standing.states[expander.name]
        for number in range(expander.rounds):
            whole = joined(parts, policy.pad_id)
            kept = torch.isin(whole.responses.sequence_ids, learnt.sequence_ids)
            seen = whole.seen(expander.needs).select(kept)
            stat, _ = expander.settle([seen], state, self.comm)
            more = expander.expand(seen, stat, state, self.run.seed)
            more.require(expander.name, seen)
            learnt = seen if more.drop is None else seen.select(~more.drop)
            fresh: list[Asked] = []
            branching = torch.tensor([float(0 if more.parents is None else len(more.parents))], dtype=torch.float64)
            if float(self.comm.sum(branching)):  # every rank samples where one does: they join the same collectives
                fresh.append(self._branched(policy, standing, whole, seen, more, metrics))
            if more.fresh and number + 1 < expander.rounds:
                fresh.append(self._prompted(policy, standing, drawn, more.fresh, metrics))
                drawn += more.fresh
            for one in fresh:
                parts.append(one)
                learnt = ResponseBatch.joined([learnt, one.responses])
            if not more.fresh:
                break
        return learnt, drawn

    def _reported(self, stage: Stage, responses: ResponseBatch, state: State, metrics: Metrics) -> State:
        """The next state of a stage, by all responses of the rollout; its metrics are logged."""
        stat, after = stage.settle([responses], state, self.comm)
        report(stage, responses, stat, state, metrics)
        return after

    # -- what comes of it ------------------------------------------------------------------------------------------

    def _observe(self, metrics: Metrics, whole: Asked, learnt: ResponseBatch) -> None:
        """Of answers to prompts as they were scored; of groups that are learnt from, whether they teach anything."""
        own = whole.responses.select(whole.responses.given == 0)
        raw = own.evidence("raw_rewards")
        metrics.mean("reward/mean", float(raw.sum()), len(own))
        if self.asking.flaky:
            metrics.mean(TRUE, float(own.evidence(TRUE).sum()), len(own))
        for name in self.rewards.names:
            metrics.mean(f"reward/{name}", float(own.evidence(reward_part(name)).sum()), len(own))
        if self.stages.shapers:
            metrics.mean("reward/shaped_mean", float(own.rewards.sum()), len(own))
        metrics.mean("response/length", float(own.lengths.sum()), len(own))
        metrics.mean("response/ended", float(own.ended.sum()), len(own))
        metrics.add("response/tokens", float(whole.sequences.response_mask.sum()))
        prompted = learnt.select(learnt.given == 0)
        metrics.mean("reward/zero_std_groups", float(prompted.even[prompted.first].sum()), prompted.groups)

    def _finished(self, whole: Asked, learnt: Tensor, refused: int, metrics: Metrics) -> Rollout:
        """What is learnt from, in the order of the sequence ids, with all signals that are known now."""
        ids = whole.responses.sequence_ids
        rows = torch.isin(ids, learnt).nonzero().squeeze(-1)
        rows = rows[ids[rows].argsort()]
        device = whole.sequences.response_ids.device
        there = rows.to(device)
        sequences, responses = whole.sequences.rows(there), whole.responses.select(rows)
        length = sequences.response_ids.shape[1]
        if self.blocks:  # the longest response may have been dropped
            extra = {**responses.extra, "block_ids": responses.evidence("block_ids")[:, :length]}
            responses = replace(responses, extra=extra)
        signals = {name: values[there][:, :length] for name, values in whole.signals.items()}
        needs = self.run.composition.needs
        if "truncated" in needs:
            cut = ~responses.ended.to(device).unsqueeze(-1)
            signals["truncated"] = (sequences.response_mask & cut).float()
        if "branch" in needs:
            branch = (responses.given > 0).to(device).unsqueeze(-1)
            signals["branch"] = (sequences.response_mask & branch).float()
        if self.blocks and "block_ids" in needs:
            signals["block_ids"] = responses.evidence("block_ids")[:, :length].to(device).float()
        if self.reference is not None:
            with metrics.phase("reference"):
                signals["ref_logprobs"] = self.reference(sequences)
        advantages = None
        if self.providers and not refused:
            with metrics.phase("provide"):
                asked = Responses(
                    tuple(whole.examples[row] for row in rows.tolist()),
                    tuple(whole.texts[row] for row in rows.tolist()),
                    sequences.response_ids,
                    sequences.response_mask,
                    signals,
                    responses.rewards,
                    responses.sequence_ids,
                    responses.group_ids,
                )
                own = self.providers.signals_of(asked, needs)
                advantages = self.providers.advantages_of(asked)
            signals |= own
        return Rollout(sequences, signals, responses, whole.timed_out[rows], advantages, refused)


def report(stage: Stage, responses: ResponseBatch, stat: Settled, state: State, metrics: Metrics) -> None:
    """Log the metrics of a stage under its name."""
    metrics.report({f"{stage.name}/{name}": one for name, one in stage.report(responses, stat, state).items()})


def checked(stage: Stage, method: str, values: object, count: int, *, tokens: int | None = None) -> Tensor:
    """What a stage returned for ``count`` responses, in float64: ``(count,)``, or ``(count, tokens)`` where allowed.

    Raises:
        MethodError: it is no such tensor.
    """
    allowed = [(count,), *([(count, tokens)] if tokens is not None else [])]
    if not isinstance(values, Tensor) or not values.is_floating_point() or tuple(values.shape) not in allowed:
        what = f"{values.dtype} of {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
        raise MethodError(
            f"'{stage.name}': {method} returned {what}, expected a floating point tensor of "
            f"{' or '.join(map(str, allowed))}. Change its function."
        )
    return values.detach().double()
