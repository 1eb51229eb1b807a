"""Making a rollout: choose prompts, sample, score, shape the rewards, sample more or drop. Then it can be learnt from.

Nothing here changes what the maker holds: a rollout comes with the standing after it, and the loop keeps that once the
rollout counts. All randomness is by identity: a response's number comes from the place of its prompt in the rollout, a
branch's from its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event

import torch
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.core.comm import Comm
from rlstab.core.method import State
from rlstab.core.stats import Settled
from rlstab.errors import MethodError
from rlstab.signals import SIGNAL_NAMES
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Expansion, Offer, RolloutExpander, Stage, no_features
from rlstab.tasks import Example, Task
from rlstab.tasks.rewards import Rewards
from rlstab.train.blocks import block_evidence, require_blocks, told_blocks
from rlstab.train.evaluate import Share
from rlstab.train.metrics import Metrics
from rlstab.train.policy import Policy, Sequences
from rlstab.train.providers import Providers, Responses
from rlstab.train.reward import Scores, score
from rlstab.train.rollout import BRANCHES, Rollout, Standing
from rlstab.train.sampling import Sampled, sample
from rlstab.train.stage_evidence import BLOCKS


@dataclass(frozen=True, eq=False)
class _Part:
    """Responses that were sampled at a time on this rank, whole groups in a row."""

    examples: list[Example]
    texts: list[str]
    sequences: Sequences
    signals: dict[str, Tensor]
    responses: ResponseBatch
    timed_out: Tensor


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
        # one worker: a task's generator and scorer are foreign code and need not be safe for several threads
        self._beside = ThreadPoolExecutor(1)
        self._ahead: tuple[list[int], Future[list[Example]]] | None = None

    def begin(self) -> Standing:
        """Where a run begins."""
        return Standing(0, 0, self.stages.init_state())

    def close(self) -> None:
        """Wait for what is being scored, and for nothing else."""
        self._beside.shutdown(cancel_futures=True)

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
        whole = _joined(parts, policy.pad_id)
        bad = self._refused(whole.responses.rewards)
        states = dict(standing.states)
        if not bad:
            for one in (self.stages.selector, *self.stages.shapers, *self.stages.expanders):
                states[one.name] = self._reported(one, whole.responses, standing.states[one.name], metrics)
        self._observe(metrics, whole, learnt)
        rollout = self._finished(whole, learnt.sequence_ids, bad, metrics)
        return rollout, Standing(standing.made + 1, standing.drawn + drawn, states, standing.queue)

    def prepare(self, standing: Standing) -> None:
        """Draw the problems of the next rollout while the last one is learnt."""
        if standing.made < self.run.optimisation.rollouts and "prompt_features" not in self.stages.selector.needs:
            mine = self._mine(self._selected(standing, 0, self.run.rollout.prompts, None), 0)
            self._ahead = mine, self._beside.submit(self._examples, mine)

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

    def _examples(self, numbers: Sequence[int]) -> list[Example]:
        return [self.task.example("train", number) for number in numbers]

    @torch.no_grad()
    def _features(self, policy: Policy, numbers: Tensor) -> Tensor:
        """``(n, width)`` float64 mean input embedding of each prompt."""
        prompts = [one.asked for one in self._examples(numbers.tolist())]
        ids, mask = policy.encode(prompts, self.run.rollout.max_new_tokens, chat=self.run.rollout.chat)
        hidden = policy.model.get_input_embeddings()(ids).double() * mask.unsqueeze(-1)
        found: Tensor = hidden.sum(1) / mask.sum(1, keepdim=True)
        return found.cpu()

    # -- sampling and scoring --------------------------------------------------------------------------------------

    def _prompted(self, policy: Policy, standing: Standing, first: int, count: int, metrics: Metrics) -> _Part:
        """Answers to the next ``count`` prompts, as many as this rank has of them, with shaped rewards."""
        group = self.run.rollout.group
        chosen = self._selected(standing, first, count, policy)
        mine, ahead = self._mine(chosen, first), self._ahead
        self._ahead = None
        ready = ahead is not None and ahead[0] == mine
        examples = ahead[1].result() if ahead is not None and ready else self._examples(mine)
        places = [first + place for place in range(count) if (first + place) % self.share.world == self.share.rank]
        group_ids = torch.tensor([standing.made * self.slots + place for place in places], dtype=torch.int64)
        repeats = torch.arange(len(places)).repeat_interleave(group)
        return self._sampled(
            policy,
            standing,
            [examples[place] for place in repeats.tolist()],
            None,
            group_ids[repeats] * group + torch.arange(group).repeat(len(places)),
            group_ids[repeats],
            torch.tensor(mine, dtype=torch.int64)[repeats],
            torch.zeros(len(repeats), dtype=torch.float64),
            metrics,
        )

    def _branched(
        self, policy: Policy, standing: Standing, whole: _Part, learnt: ResponseBatch, more: Expansion, metrics: Metrics
    ) -> _Part:
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
        return self._sampled(
            policy,
            standing,
            examples,
            given,
            BRANCHES + parent_ids[repeats] * branches + torch.arange(branches).repeat(len(ids)),
            BRANCHES + parent_ids[repeats],
            learnt.prompt_ids[parents][repeats],
            (pivots.double() / learnt.lengths[parents])[repeats],
            metrics,
        )

    def _sampled(
        self,
        policy: Policy,
        standing: Standing,
        examples: list[Example],
        given: list[list[int]] | None,
        sequence_ids: Tensor,
        group_ids: Tensor,
        prompt_ids: Tensor,
        pivot: Tensor,
        metrics: Metrics,
    ) -> _Part:
        run, scoring = self.run, list[Future[Scores]]()
        options = run.composition.signal_options
        with metrics.phase("sample"):
            drawn = sample(
                policy,
                [one.asked for one in examples],
                sequence_ids,
                run.rollout,
                given=given,
                seed=run.seed,
                needs={"entropies"} | ((run.composition.needs | self.stages.needs) & SIGNAL_NAMES),
                options=options,
                skip_special_tokens=not self.task.keeps_special_tokens,
                on_texts=lambda start, texts: scoring.append(
                    self._beside.submit(
                        score,
                        self.task,
                        examples[start : start + len(texts)],
                        texts,
                        rewards=self.rewards,
                        stop=self.leaving,
                    )
                ),
            )
        with metrics.phase("score"):
            scores = Scores.joined([one.result() for one in scoring], self.rewards.names)
        self._tell(scores, drawn.texts, metrics)
        signals = dict(drawn.signals)
        signals["rollout_logprobs"] = signals.pop("logprobs")
        extra = {"raw_rewards": scores.rewards, **{part(name): one for name, one in scores.parts.items()}}
        if self.blocks:
            extra |= self._blocks(policy, examples, drawn, given, metrics)
        timed_out = torch.zeros(len(examples), dtype=torch.bool)
        timed_out[scores.timed_out] = True
        responses = ResponseBatch(
            scores.rewards,
            drawn.sequences.response_mask.sum(-1).double().cpu(),
            drawn.ended,
            prompt_ids,
            group_ids,
            sequence_ids,
            torch.tensor([len(one) for one in given], dtype=torch.int64) if given else torch.zeros_like(sequence_ids),
            pivot,
            run.rollout.max_new_tokens,
            extra,
        )
        found = _Part(examples, drawn.texts, drawn.sequences, signals, responses, timed_out)
        return replace(found, responses=self._shaped(found, standing))

    def _blocks(
        self,
        policy: Policy,
        examples: Sequence[Example],
        drawn: Sampled,
        given: list[list[int]] | None,
        metrics: Metrics,
    ) -> dict[str, Tensor]:
        """What the task says of the blocks of some responses."""
        sequences, special = drawn.sequences, not self.task.keeps_special_tokens
        blocks, errors = told_blocks(self.task, examples, drawn.texts)
        metrics.add("blocks/errors", len(errors))
        if errors:
            self.say("blocks raised, none for the response", errors[0])
        begun = given or [[]] * len(examples)
        pairs = zip(begun, sequences.response_ids.cpu(), sequences.response_mask.cpu(), strict=True)
        answers = [[*first, *row[kept].tolist()] for first, row, kept in pairs]
        found = block_evidence(
            blocks,
            drawn.texts,
            answers,
            [len(one) for one in begun],
            sequences.response_ids.shape[1],
            lambda ids: policy.decode(ids, skip_special_tokens=special),
        )
        return {"block_ids": found.ids, "block_rewards": found.rewards, "block_outcomes": found.outcomes}

    def _tell(self, scores: Scores, texts: Sequence[str], metrics: Metrics) -> None:
        metrics.add("scorer/errors", len(scores.errors))
        metrics.add("scorer/timeouts", len(scores.timed_out))
        where = f" on rank {self.share.rank}" if self.share.world > 1 else ""
        if scores.timed_out:
            first = texts[scores.timed_out[0]]
            self.say(f"scorer timed out{where}, reward 0", f"{len(scores.timed_out)} times, first on {first[:80]!r}")
        if scores.errors:
            self.say(f"scorer raised{where}, reward 0", scores.errors[0])

    # -- stages ----------------------------------------------------------------------------------------------------

    def _seen(self, part: _Part, needs: frozenset[str]) -> ResponseBatch:
        """The responses with the evidence that a stage needs, as far as a sampler can know it."""
        extra = {**part.responses.extra}
        for name in needs & part.signals.keys():
            extra[name] = part.signals[name].cpu()
        return replace(part.responses, extra=extra)

    def _shaped(self, part: _Part, standing: Standing) -> ResponseBatch:
        """Rewards with what the shapers add; those of the scorer are what each of them sees."""
        rewards = part.responses.rewards
        if self.stages.shapers and not self._refused(rewards):
            for one in self.stages.shapers:
                seen, state = self._seen(part, one.needs), standing.states[one.name]
                stat, _ = one.settle([seen], state, self.comm)
                rewards = rewards + checked(one, "shape", one.shape(seen, stat, state), len(seen))
        return part.responses.reshaped(rewards)

    def _expanded(
        self,
        expander: RolloutExpander,
        policy: Policy,
        standing: Standing,
        parts: list[_Part],
        learnt: ResponseBatch,
        drawn: int,
        metrics: Metrics,
    ) -> tuple[ResponseBatch, int]:
        """Ask an expander as often as it asks for fresh prompts: what is learnt from then, and prompts chosen."""
        state = standing.states[expander.name]
        for number in range(expander.rounds):
            whole = _joined(parts, policy.pad_id)
            kept = torch.isin(whole.responses.sequence_ids, learnt.sequence_ids)
            seen = self._seen(whole, expander.needs).select(kept)
            stat, _ = expander.settle([seen], state, self.comm)
            more = expander.expand(seen, stat, state, self.run.seed)
            learnt = seen if more.drop is None else seen.select(~more.drop)
            fresh: list[_Part] = []
            if more.parents is not None:
                fresh.append(self._branched(policy, standing, whole, seen, more, metrics))
            if more.fresh and number + 1 < expander.rounds:
                fresh.append(self._prompted(policy, standing, drawn, more.fresh, metrics))
                drawn += more.fresh
            for one in fresh:
                parts.append(one)
                learnt = concatenated([learnt, one.responses])
            if not more.fresh:
                break
        return learnt, drawn

    def _reported(self, stage: Stage, responses: ResponseBatch, state: State, metrics: Metrics) -> State:
        """The next state of a stage, by all responses of the rollout; its metrics are logged."""
        stat, after = stage.settle([responses], state, self.comm)
        report(stage, responses, stat, state, metrics)
        return after

    # -- what comes of it ------------------------------------------------------------------------------------------

    def _observe(self, metrics: Metrics, whole: _Part, learnt: ResponseBatch) -> None:
        """Of answers to prompts as they were scored; of groups that are learnt from, whether they teach anything."""
        own = whole.responses.select(whole.responses.given == 0)
        raw = own.evidence("raw_rewards")
        metrics.mean("reward/mean", float(raw.sum()), len(own))
        for name in self.rewards.names:
            metrics.mean(f"reward/{name}", float(own.evidence(part(name)).sum()), len(own))
        if self.stages.shapers:
            metrics.mean("reward/shaped_mean", float(own.rewards.sum()), len(own))
        metrics.mean("response/length", float(own.lengths.sum()), len(own))
        metrics.mean("response/ended", float(own.ended.sum()), len(own))
        prompted = learnt.select(learnt.given == 0)
        metrics.mean("reward/zero_std_groups", float(prompted.even[prompted.first].sum()), prompted.groups)

    def _finished(self, whole: _Part, learnt: Tensor, refused: int, metrics: Metrics) -> Rollout:
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


def part(name: str) -> str:
    """The evidence that holds one of several rewards."""
    return f"reward/{name}"


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


def concatenated(batches: Sequence[ResponseBatch]) -> ResponseBatch:
    """The responses of all batches; evidence that not all of them have is left out."""
    names = set[str].intersection(*(set(one.tensors()) for one in batches))
    found: dict[str, Tensor] = {}
    for name in names:
        values = [one.tensors()[name] for one in batches]
        if values[0].ndim == 2:
            width = max(one.shape[1] for one in values)
            fill = -1 if name == "extra/block_ids" else 0
            values = [torch.nn.functional.pad(one, (0, width - one.shape[1]), value=fill) for one in values]
        found[name] = torch.cat(values)
    return ResponseBatch.from_tensors(found, batches[0].limit)


def _joined(parts: Sequence[_Part], pad_id: int) -> _Part:
    """All that was sampled, in the order in which it was."""
    if len(parts) == 1:
        return parts[0]
    sequences = Sequences.joined([one.sequences for one in parts], pad_id)
    length = sequences.response_ids.shape[1]
    signals = {
        name: torch.cat(
            [torch.nn.functional.pad(one.signals[name], (0, length - one.signals[name].shape[1])) for one in parts]
        )
        for name in parts[0].signals
    }
    return _Part(
        [example for one in parts for example in one.examples],
        [text for one in parts for text in one.texts],
        sequences,
        signals,
        concatenated([one.responses for one in parts]),
        torch.cat([one.timed_out for one in parts]),
    )
