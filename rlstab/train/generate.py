"""Makes rollouts: choose prompts, sample, score, shape the rewards, sample more responses or drop some.

The generator has no state that changes: each rollout comes with the progress after it, which the loop keeps once the
rollout is learnt. Random numbers depend on identities: the id of a response comes from the index of its prompt in the
rollout, that of a branch from its parent.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.core.batch import BASICS
from rlstab.core.comm import Comm
from rlstab.core.devices import sent
from rlstab.core.method import State, measure_all
from rlstab.core.padding import padded
from rlstab.core.stats import Settled
from rlstab.core.turns import turns_of
from rlstab.errors import ConfigError, MethodError, NonFinite, ShapeError
from rlstab.models.decoding import Decoder
from rlstab.models.policy import FILLS, Policy
from rlstab.signals import SIGNAL_NAMES
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Expansion, Offer, RolloutExpander, Stage
from rlstab.tasks import Example, Task
from rlstab.tasks.evidence import (
    BLOCKS,
    attempt,
    block_evidence,
    offers,
    reply_tokens,
    turn_evidence,
)
from rlstab.tasks.rewards import Rewards, Scores, score, without_lost
from rlstab.tasks.task import Split, flaky_share
from rlstab.train.rollout import BRANCHES, Progress, Rollout
from rlstab.train.tracking import Metrics

#: The seed of evaluations, so that their random numbers are not those of training.
EVALUATION_SEED = 1_000_003

#: Evidence that holds each reward of the run separately.
REWARDS = frozenset({"reward_parts", "reward_weights"})

#: ``(R, T)`` float values of a signal. It must be a pure function of the rollout, or a resumed run would differ.
SignalProvider: TypeAlias = Callable[[Rollout], Tensor]

#: The reply of an environment to an answer, both as tokens; None ends the response.
Reply: TypeAlias = Callable[[Example, list[int]], Sequence[int] | None]

#: From the seed of a turn to that of the next one.
NEXT_TURN = 2**40


class _Draft(NamedTuple):
    """A rollout in the making: the policy that samples it, the progress before it, and its metrics."""

    policy: Policy
    progress: Progress
    metrics: Metrics


@dataclass(frozen=True)
class Generator:
    """Makes the rollouts of one rank.

    Args:
        run: the configuration.
        policy: returns the policy that samples; called before each rollout.
        task: the source of prompts, and of rewards where the run names none.
        rewards: what responses are scored by.
        comm: over all ranks.
        rank, world: the number of this process, and the number of processes.
        signals: user-defined signals, by name.
        others: return the log-probs of other models, the reference and the teacher, by the name of the signal.
        say: prints a message with its topic.

    Attributes:
        scoring: one thread that scores answers; user-defined scorers may not be safe to call from several.
        leaving: set once scores are no longer wanted.
    """

    run: RunConfig
    policy: Callable[[], Policy]
    task: Task
    rewards: Rewards
    comm: Comm
    rank: int
    world: int
    signals: Mapping[str, SignalProvider]
    others: Mapping[str, Callable[[Rollout], Tensor]]
    say: Callable[[str, str], None]
    leaving: Event = field(default_factory=Event)
    scoring: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def close(self) -> None:
        """Cancel the scores that have not begun, and wait for those that have."""
        self.leaving.set()
        self.scoring.shutdown(cancel_futures=True)

    @property
    def stages(self) -> Pipeline:
        """The stages of the run, which act outside the loss."""
        return self.run.pipeline

    @property
    def slots(self) -> int:
        """How many group ids a rollout reserves for prompts, including those of refills."""
        return self.run.rollout.prompts * max([1, *(expander.rounds for expander in self.stages.expanders)])

    @property
    def blocks(self) -> bool:
        """Whether the task is asked for blocks; where only a method reads them, a user-defined signal may give them."""
        by_method = "block_ids" in self.run.composition.needs and "block_ids" not in self.signals
        return bool(self.stages.needs & BLOCKS) or by_method

    def restored(self, policy: Policy, saved: Mapping[str, Tensor]) -> Rollout:
        """This rank's part of a rollout that was saved: groups whose prompts this rank would have answered."""
        rollout = Rollout.from_tensors(saved, self.run.rollout.max_new_tokens, self.task)
        texts, ids = list(map(self._decode(policy), rollout.answers())), rollout.group_ids
        prompted = torch.where(ids < BRANCHES, ids, (ids - BRANCHES) // self.run.rollout.group)
        order = rollout.sequence_ids.argsort()
        return replace(rollout, texts=texts).rows(order[prompted[order] % self.slots % self.world == self.rank])

    # -- a rollout ---------------------------------------------------------------------------------------------------

    def make(self, progress: Progress, metrics: Metrics) -> tuple[Rollout, Progress]:
        """The next rollout, and the progress after it, whose queue the loop updates.

        Raises:
            MethodError: a stage returned something other than the interface asks for.
        """
        draft, drawn = _Draft(self.policy(), progress, metrics), self.run.rollout.prompts
        parts = [self._answers(draft, 0, drawn)]
        learnt = parts[0].sequence_ids  # of the responses to learn from so far
        if not count_nonfinite(parts[0].rewards, self.comm):
            for expander in self.stages.expanders:
                learnt, drawn = self._expand(draft, expander, parts, learnt, drawn)
        sampled, states = Rollout.joined(parts, draft.policy.pad_id), dict(progress.stages)
        finite = not count_nonfinite(sampled.rewards, self.comm)
        if finite:
            for stage in (self.stages.selector, *self.stages.shapers, *self.stages.expanders):
                evidence = sampled.seen_by(stage.needs)
                _, states[stage.name] = advance(stage, evidence, states[stage.name], self.comm, metrics)
        rows = torch.isin(sampled.sequence_ids, learnt).nonzero().squeeze(-1)
        rollout, lag = sampled.rows(rows[sampled.sequence_ids[rows].argsort()]), progress.made - progress.rollouts
        self._observe(metrics, sampled, rollout.responses)
        rollout = self._with_signals(rollout, metrics, lag, provide=finite)
        return rollout, replace(progress, made=progress.made + 1, drawn=progress.drawn + drawn, stages=states)

    # -- sampling and scoring ----------------------------------------------------------------------------------------

    def answered(
        self,
        policy: Policy,
        split: Split,
        examples: Sequence[Example],
        planned: ResponseBatch,
        metrics: Metrics,
        *,
        begun: Sequence[Sequence[int]] | None = None,
        greedy: bool = False,
        cut: bool = True,
    ) -> tuple[Rollout, Scores]:
        """A response to each example, with its texts, and its scores; a batch is scored while the next is sampled.

        Args:
            policy: the model to sample from.
            split: the split of the examples.
            examples: one for each response.
            planned: the responses, with their ids.
            metrics: the time is noted here.
            begun: the tokens that the answer of each response begins with; None if no answer begins with any.
            greedy: take the most probable token instead of sampling.
            cut: sample with the top-p and top-k of the run.
        """
        run, needs = self.run, {"logprobs", "entropies"}
        settings = run.rollout if cut else run.rollout.model_copy(update={"top_p": 1.0, "top_k": 0})
        seed, options = EVALUATION_SEED, run.composition.signal_options
        if split == "train":
            seed, options = run.seed, run.signal_options
            needs |= (run.composition.needs | self.stages.needs) & SIGNAL_NAMES - BASICS
            needs |= run.composition.live_needs & {"log_support_mass"}  # a support is kept with its mass
        decoder, decode = Decoder(policy, settings, seed, sorted(needs), options, greedy), self._decode(policy)
        parts, jobs, errors = list[Rollout](), list[Future[Scores]](), list[str]()

        def reply(example: Example, answer: list[int]) -> list[int] | None:
            ask = partial(reply_tokens, encode=policy.encode_text)
            return attempt(ask, self.task, example, decode(answer), errors.append, None)

        with metrics.phase("sample"):
            answer_to = reply if offers(self.task, "reply") else None
            for part in sample(decoder, examples, planned, begun=begun, reply=answer_to):
                answers = part.answers()
                texts, full_texts = list(map(decode, answers)), list(map(policy.decode, answers))
                ask = partial(score, rewards=self.rewards, stop=self.leaving, whole=full_texts)
                jobs.append(self.scoring.submit(ask, self.task, part.examples, texts))
                parts.append(replace(part, texts=texts))
        if offers(self.task, "reply"):
            self._report_errors("turns/errors", errors, f"reply raised on rank {self.rank}", metrics)
        with metrics.phase("score"):
            scores = Scores.joined([job.result() for job in jobs], self.rewards)
        return Rollout.joined(parts, policy.pad_id), scores

    def _decode(self, policy: Policy) -> Callable[[list[int]], str]:
        """The text of an answer as the task sees it."""
        return partial(policy.decode, skip_special_tokens=not self.task.keeps_special_tokens)

    def _answers(self, draft: _Draft, first: int, count: int) -> Rollout:
        """This rank's answers to the next ``count`` prompts of all ranks, with shaped rewards."""
        progress, selector, size = draft.progress, self.stages.selector, self.task.size["train"]

        @torch.no_grad()
        def features(numbers: Tensor) -> Tensor:
            """``(n, width)`` float64 mean input embedding of each prompt."""
            prompts = [self.task.example("train", number) for number in numbers.tolist()]
            ids, mask = draft.policy.encode(prompts, self.run.rollout)
            embedding = draft.policy.model.get_input_embeddings()
            hidden = embedding(sent(ids, draft.policy.device)).cpu().double()
            mean: Tensor = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
            return mean

        offer = Offer(progress.made, first, count, progress.drawn + first, size, self.run.seed, features)
        chosen = selector.select(offer, progress.stages[selector.name])
        fits = isinstance(chosen, Tensor) and chosen.dtype == torch.int64 and chosen.shape == (count,)
        if not fits or not bool(((chosen >= 0) & (chosen < (size or 2**62))).all()):
            raise MethodError(
                f"'{selector.name}': select returned {chosen!r:.60}, expected ({count},) int64 numbers of prompts, "
                f"from 0 to below {size or 'any'}. Change its function."
            )
        indices, group = torch.arange(count), self.run.rollout.group
        indices = indices[(first + indices) % self.world == self.rank]
        group_ids = (progress.made * self.slots + first + indices).repeat_interleave(group)
        prompt_ids = chosen[indices].repeat_interleave(group)
        examples = [example for n in chosen[indices].tolist() for example in [self.task.example("train", n)] * group]
        planned = ResponseBatch.of(
            torch.zeros(len(group_ids)),
            group_ids,
            limit=self.run.rollout.max_new_tokens,
            sequence_ids=group_ids * group + torch.arange(group).repeat(len(indices)),
            prompt_ids=prompt_ids,
        )
        return self._scored(draft, examples, planned, None)

    def _branches(self, draft: _Draft, parents: Rollout, request: Expansion) -> Rollout:
        """Branches from the pivots of responses of this rank, one for each row of ``parents``, with shaped rewards.

        Raises:
            ConfigError: the task has several turns.
        """
        if offers(self.task, "reply"):
            raise ConfigError(
                f"a stage branches from inside a response, and those of '{self.task.name}' have several turns. Remove "
                f"the stage, or take another task."
            )
        responses, branches, pivots = parents.responses, max(1, request.branches), request.pivots
        lengths = responses.given if pivots is None else pivots.repeat_interleave(branches)
        begun = [
            ids[mask][:count].tolist()
            for ids, mask, count in zip(parents.response_ids, parents.response_mask, lengths.tolist(), strict=True)
        ]
        planned = ResponseBatch.of(
            torch.zeros(len(lengths)),
            BRANCHES + responses.sequence_ids,
            limit=self.run.rollout.max_new_tokens,
            sequence_ids=BRANCHES + responses.sequence_ids * branches + torch.arange(len(lengths)) % branches,
            prompt_ids=responses.prompt_ids,
            given=lengths,
            pivot=lengths.double() / responses.lengths,
        )
        return self._scored(draft, parents.examples, planned, begun)

    def _scored(
        self, draft: _Draft, examples: Sequence[Example], planned: ResponseBatch, begun: Sequence[Sequence[int]] | None
    ) -> Rollout:
        """:meth:`answered` with the evidence of rewards, and shaped rewards: every shaper sees those of the scorer."""
        policy, progress, metrics = draft
        rollout, scores = self.answered(policy, "train", examples, planned, metrics, begun=begun)
        late = [repr(rollout.texts[row][:80]) for row in scores.timed_out.nonzero().squeeze(-1).tolist()]
        self._report_errors("scorer/timeouts", late, f"scorer timed out on rank {self.rank}, reward 0", metrics)
        self._report_errors("scorer/errors", scores.errors, f"scorer raised on rank {self.rank}, reward 0", metrics)
        signals, texts = dict(rollout.signals), rollout.texts
        signals["rollout_logprobs"] = signals.pop("logprobs")
        extra, flaky, true_rewards = {"timed_out": scores.timed_out}, flaky_share(self.task), scores.rewards
        if flaky:
            scores = without_lost(scores, self.rewards, flaky, self.run.seed, planned.sequence_ids)
        extra |= {f"reward/{name}": scores.parts[name] for name in self.rewards.names}
        extra |= {"raw_rewards": scores.rewards} | ({"reward/true": true_rewards} if flaky else {})
        if self.stages.needs & REWARDS:
            weights = torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float64)
            extra["reward_parts"] = torch.stack([scores.parts[reward.name] for reward in self.rewards], 1)
            extra["reward_weights"] = weights.expand(len(examples), -1)
        if self.blocks:
            errors, width, answers = list[str](), rollout.response_ids.shape[1], rollout.answers()
            prefixes, decode = rollout.responses.given.tolist(), self._decode(policy)
            extra |= block_evidence(self.task, examples, texts, answers, prefixes, width, decode, errors.append)
            self._report_errors("blocks/errors", errors, "blocks raised, none for the response", metrics)
        if offers(self.task, "reply"):
            errors, mask, ids = list[str](), rollout.response_mask, rollout.response_ids
            extra |= turn_evidence(self.task, examples, texts, ids, mask, scores.rewards, errors.append)
            self._report_errors("turns/errors", errors, f"turn_rewards raised on rank {self.rank}", metrics)
            signals["turn"] = turns_of(mask).float() * mask
        rewards = scores.rewards
        rollout = replace(rollout, signals=signals, responses=replace(rollout.responses, rewards=rewards, extra=extra))
        if self.stages.shapers and not count_nonfinite(rewards, self.comm):
            for shaper in self.stages.shapers:
                evidence, state = rollout.seen_by(shaper.needs), progress.stages[shaper.name]
                stat, _ = measure_all(shaper, [evidence], state, self.comm)
                caller, added = f"'{shaper.name}': shape", shaper.shape(evidence, stat, state)
                rewards = rewards + checked_output(added, caller, [(len(evidence),)], MethodError).double()
        return replace(rollout, responses=rollout.responses.reshaped(rewards))

    def _report_errors(self, metric: str, errors: Sequence[str], what: str, metrics: Metrics) -> None:
        metrics.sums[metric] += len(errors)
        if errors:
            self.say(what, errors[0] if len(errors) == 1 else f"{len(errors)} times, first: {errors[0]}")

    # -- stages ------------------------------------------------------------------------------------------------------

    def _expand(
        self, draft: _Draft, expander: RolloutExpander, parts: list[Rollout], learnt: Tensor, drawn: int
    ) -> tuple[Tensor, int]:
        """Ask an expander again for as long as it wants fresh prompts.

        Returns:
            the ids of the responses to learn from, and how many prompts of the rollout are chosen by now.
        """
        state = draft.progress.stages[expander.name]
        for number in range(expander.rounds):
            sampled = Rollout.joined(parts, draft.policy.pad_id)
            rows = torch.isin(sampled.sequence_ids, learnt).nonzero().squeeze(-1)
            evidence = sampled.seen_by(expander.needs).select(rows)
            stat, _ = measure_all(expander, [evidence], state, self.comm)
            request = expander.expand(evidence, stat, state, self.run.seed)
            request.require(expander.name, evidence)
            learnt = learnt if request.drop is None else evidence.sequence_ids[~request.drop]
            fresh, parents = list[Rollout](), rows[:0]
            if request.parents is not None:
                parents = rows[request.parents].repeat_interleave(request.branches)
            # if any rank samples branches, all do: they join the same collectives
            if float(self.comm.sum(torch.tensor([float(len(parents))], dtype=torch.float64))):
                fresh.append(self._branches(draft, sampled.rows(parents), request))
            if request.fresh and number + 1 < expander.rounds:
                fresh.append(self._answers(draft, drawn, request.fresh))
                drawn += request.fresh
            parts += fresh
            learnt = torch.cat([learnt, *(part.sequence_ids for part in fresh)])
            if not request.fresh:
                break
        return learnt, drawn

    # -- what comes of it --------------------------------------------------------------------------------------------

    def _observe(self, metrics: Metrics, sampled: Rollout, learnt: ResponseBatch) -> None:
        """Metrics of all answers to prompts, and the share of groups with equal rewards among those to learn from."""
        answers = sampled.responses.select(sampled.responses.given == 0)
        count = len(answers)
        means = sampled.rewards_by_name("reward/mean")
        if self.stages.shapers:
            means["reward/shaped_mean"] = "rewards"
        for metric, name in means.items():
            metrics.mean(metric, float(answers.evidence(name).sum()), count)
        metrics.mean("response/length", float(answers.lengths.sum()), count)
        metrics.mean("response/ended", float(answers.ended.sum()), count)
        metrics.sums["response/tokens"] += float(sampled.response_mask.sum())
        if offers(self.task, "reply"):
            metrics.mean("response/turns", float((answers.evidence("turn_states") > 0).sum()), count)
        prompted = learnt.select(learnt.given == 0)
        metrics.mean("reward/zero_std_groups", float(prompted.even[prompted.first].sum()), prompted.groups)

    def _with_signals(self, rollout: Rollout, metrics: Metrics, lag: int, *, provide: bool) -> Rollout:
        """The rollout with the signals that are made only for responses to learn from, ``lag`` updates later.

        ``provide`` user-defined ones too.
        """
        needs, responses, mask = self.run.composition.needs, rollout.responses, rollout.response_mask
        signals = dict(rollout.signals)
        rows = {
            "truncated": ~responses.ended,
            "branch": responses.given > 0,
            "lag": torch.full_like(responses.given, lag),
            **{name: responses.evidence(name) for name in self.run.reward_evidence & needs},
        }
        for name in rows.keys() & needs:
            signals[name] = torch.where(mask, rows[name].float().unsqueeze(-1), 0.0)
        if "turn_reward" in needs and "turn" in signals:
            earned = responses.evidence("turn_rewards").float()
            signals["turn_reward"] = earned.gather(1, signals["turn"].long()) * mask
        if self.blocks and "block_ids" in needs:
            signals["block_ids"] = responses.evidence("block_ids").float()
        for name, logprobs in self.others.items():
            with metrics.phase("reference"):
                signals[name] = logprobs(rollout)
        rollout = replace(rollout, signals=dict(signals))  # every user-defined function sees the same
        if self.signals and provide:
            with metrics.phase("provide"):
                for name in sorted(self.signals.keys() & needs):
                    signals[name] = provided(self.signals[name], f"signals['{name}']", rollout)
            rollout = replace(rollout, signals=signals)
        return rollout


# -- sampling ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(
    decoder: Decoder,
    examples: Sequence[Example],
    planned: ResponseBatch,
    *,
    begun: Sequence[Sequence[int]] | None = None,
    reply: Reply | None = None,
) -> Iterator[Rollout]:
    """Sample one response to each example, batch by batch.

    Each token is drawn by inverting the distribution function at a random number that depends only on ``(seed, sequence
    id, position)``, so a response does not depend on its batch or rank. A prompt that occurs several times in a batch
    is forwarded once.

    Args:
        decoder: the policy, and how it is sampled.
        examples: one per response; repeat an example for a group.
        planned: the responses, with their ids.
        begun: the tokens that the answer of each response begins with, as many as ``planned.given`` says; they become
            part of its prompt. They count towards ``rollout.max_new_tokens``.
        reply: answers each response that ended, which then goes on for another turn; None for a task of one turn.

    Yields:
        each batch, with sequences, signals at the sampling temperature, lengths, and which responses ended; without
        texts and scores.

    Raises:
        DataError: a prompt does not fit the model.
    """
    settings, begun = decoder.settings, [tuple(tokens) for tokens in begun or [()] * len(examples)]
    keys = [(example.messages or example.prompt, tokens) for example, tokens in zip(examples, begun, strict=True)]
    different = dict(zip(keys, examples, strict=True))  # prompts
    number = {key: index for index, key in enumerate(different)}
    ids, mask = decoder.policy.encode([*different.values()], settings, [tokens for _, tokens in different])
    prompt = torch.tensor([number[key] for key in keys], dtype=torch.int64)
    room = settings.max_new_tokens - planned.given
    for start in range(0, max(1, len(examples)), settings.batch_size):  # a rank may have no example
        span = slice(start, start + settings.batch_size)
        part = planned.select(span)
        out = decoder.batch(ids, mask, prompt[span], part.sequence_ids, room[span], begun[span])
        responses = replace(part, lengths=out.sequences.response_mask.sum(-1).double(), ended=out.ended)
        rollout, turn = Rollout(out.sequences, out.signals, examples[span], responses), 0
        rows = torch.arange(len(part))
        while reply is not None and len(rows):
            turn += 1
            later = replace(decoder, seed=decoder.seed + turn * NEXT_TURN)
            rollout, rows = _another_turn(rollout, rows, later, reply)
        yield rollout


def _another_turn(rollout: Rollout, rows: Tensor, decoder: Decoder, reply: Reply) -> tuple[Rollout, Tensor]:
    """The rollout with the environment's replies to some rows, and what the policy answers to each.

    Replies count towards the limit of the length; one that leaves no room for an answer cuts the response off.

    Returns:
        the rollout, and the rows that another turn was sampled for.
    """
    answers, limit, begun = rollout.answers(), decoder.settings.max_new_tokens, dict[int, list[int]]()
    ended = rollout.responses.ended.clone()
    for row in rows[ended[rows]].tolist():
        tokens = reply(rollout.examples[row], answers[row])
        if tokens is not None:
            ended[row] = False
            if len(answers[row]) + len(tokens) < limit:
                begun[row] = [*answers[row], *tokens]
    rows = torch.tensor([*begun], dtype=torch.int64)
    if begun:
        rollout, ended[rows] = _with_turn(rollout, begun, decoder)
    lengths = rollout.response_mask.sum(-1).double()
    return replace(rollout, responses=replace(rollout.responses, lengths=lengths, ended=ended)), rows


def _with_turn(rollout: Rollout, begun: Mapping[int, Sequence[int]], decoder: Decoder) -> tuple[Rollout, Tensor]:
    """Sample on after the tokens that some answers begin with, by row; and ``(n,)`` bool, whether each ended."""
    policy, rows, begins = decoder.policy, torch.tensor([*begun]), [*begun.values()]
    ids, mask = policy.encode([rollout.examples[row] for row in begun], decoder.settings, begins)
    lengths = torch.tensor([len(tokens) for tokens in begins])
    room, ids_of_rows = decoder.settings.max_new_tokens - lengths, rollout.sequence_ids[rows]
    # a stop text of the turn before does not end this one
    out = decoder.batch(ids, mask, torch.arange(len(rows)), ids_of_rows, room, [()] * len(rows))
    columns = lengths.unsqueeze(1) + torch.arange(out.sequences.response_ids.shape[1])
    length = max(rollout.response_ids.shape[1], int(columns.max()) + 1)

    def with_answers(values: Tensor, answers: Tensor, fill: float = 0) -> Tensor:
        """``(R, length, ...)`` values with those of the answers after the tokens that these begin with."""
        shape = [max(sizes) for sizes in zip(values.shape[2:], answers.shape[2:], strict=True)]
        wider = padded(values, (length, *shape), fill)
        wider[rows.unsqueeze(1), columns] = padded(answers, (columns.shape[1], *shape), fill)
        return wider

    fills = FILLS | {"response_ids": policy.pad_id}
    responses = {
        name: with_answers(values, out.sequences.responses[name], fills.get(name, 0))
        for name, values in rollout.sequences.responses.items()
    }
    for row, tokens in begun.items():
        responses["response_ids"][row, : len(tokens)] = torch.tensor(tokens)
    signals = {name: with_answers(values, out.signals[name]) for name, values in rollout.signals.items()}
    return replace(rollout, sequences=replace(rollout.sequences, **responses), signals=signals), out.ended


# -- what stages and providers return --------------------------------------------------------------------------------


def count_nonfinite(rewards: Tensor, comm: Comm) -> int:
    """How many rewards of all ranks are NaN or Inf."""
    return int(comm.sum((~torch.isfinite(rewards)).sum().double().reshape(1)))


def advance(
    stage: Stage, responses: ResponseBatch, state: State, comm: Comm, metrics: Metrics
) -> tuple[Settled, State]:
    """The statistics of a stage over all responses of the rollout, and its next state; logs its metrics."""
    stat, after = measure_all(stage, [responses], state, comm)
    metrics.means.add({f"{stage.name}/{name}": mean for name, mean in stage.report(responses, stat, state).items()})
    return stat, after


def checked_output(
    values: object, caller: str, allowed: Sequence[tuple[int, ...]], error: type[MethodError | ShapeError]
) -> Tensor:
    """The detached values that a stage or a user-defined function returned.

    Raises:
        MethodError, ShapeError: they are not a floating point tensor of an allowed shape.
    """
    if isinstance(values, Tensor) and values.is_floating_point() and tuple(values.shape) in allowed:
        return values.detach()
    description = f"{values.dtype} of {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
    shapes = " or ".join(map(str, allowed))
    raise error(f"{caller} returned {description}, expected a floating point tensor of {shapes}. Change its function.")


def provided(provider: SignalProvider, caller: str, rollout: Rollout) -> Tensor:
    """``(R, T)`` values of a user-defined signal, 0 in the padding.

    Args:
        provider: the user-defined function.
        caller: names the function in errors.
        rollout: is passed to the function as a copy.

    Raises:
        ShapeError: the function returned something other than a floating point tensor of this shape.
        NonFinite: it returned NaN or Inf on response tokens.
    """
    mask = rollout.response_mask
    if not len(rollout):  # a rank without responses has nothing to ask about
        return torch.zeros(mask.shape)
    # a function that changes tensors in place must not change the rollout
    separate = copy.deepcopy(rollout, {id(rollout.examples): rollout.examples})
    values = checked_output(provider(separate), caller, [tuple(mask.shape)], ShapeError).cpu()
    values = torch.where(mask, values, 0.0)
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise NonFinite(f"{caller} returned {bad} values that are NaN or Inf on response tokens. Change its function.")
    return values
