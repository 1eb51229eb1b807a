"""Makes rollouts: choose prompts, sample, score, shape the rewards, sample more responses or drop some.

The generator has no state that changes: each rollout comes with the progress after it, which the loop keeps once the
rollout is learnt. Random numbers depend on identities: the id of a response comes from the index of its prompt in the
rollout, that of a branch from its parent.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
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
from rlstab.core.stats import Settled
from rlstab.core.turns import turns_of
from rlstab.errors import ConfigError, MethodError, NonFinite, ShapeError
from rlstab.models.decoding import Decoder
from rlstab.models.policy import Policy
from rlstab.signals import SIGNAL_NAMES
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Expansion, Offer, RolloutExpander, Stage
from rlstab.tasks import Block, Example, Task
from rlstab.tasks.evidence import (
    BLOCKS,
    attempt,
    block_evidence,
    checked_blocks,
    offers,
    reply_tokens,
    turn_evidence,
)
from rlstab.tasks.rewards import Rewards, Scores, score, without_lost
from rlstab.tasks.task import Split, flaky_share
from rlstab.train.rollout import BRANCHES, Progress, Rollout
from rlstab.train.sampling import sample
from rlstab.train.tracking import Metrics

#: The seed of evaluations, so that their random numbers are not those of training.
EVALUATION_SEED = 1_000_003

#: Evidence that holds each reward of the run separately.
REWARDS = frozenset({"reward_parts", "reward_weights"})

#: ``(R, T)`` float values of a signal. It must be a pure function of the rollout, or a resumed run would differ.
SignalProvider: TypeAlias = Callable[[Rollout], Tensor]


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
        task: where prompts come from, and rewards where the run names none.
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
        example = partial(self.task.example, "train")
        rollout = Rollout.from_tensors(saved, self.run.rollout.max_new_tokens, example)
        rollout, ids = replace(rollout, texts=self._texts(policy, rollout.answers())), rollout.group_ids
        prompted = torch.where(ids < BRANCHES, ids, (ids - BRANCHES) // self.run.rollout.group)
        order = rollout.sequence_ids.argsort()
        return rollout.rows(order[prompted[order] % self.slots % self.world == self.rank])

    # -- a rollout ---------------------------------------------------------------------------------------------------

    def make(self, progress: Progress, metrics: Metrics) -> tuple[Rollout, Progress]:
        """The next rollout, and the progress after it, whose queue the loop updates.

        Raises:
            MethodError: a stage returned something other than the interface asks for.
        """
        draft, drawn = _Draft(self.policy(), progress, metrics), self.run.rollout.prompts
        parts = [self._answers(draft, 0, drawn)]
        learnt = parts[0].responses  # the responses to learn from so far
        if not count_nonfinite(learnt.rewards, self.comm):
            for expander in self.stages.expanders:
                learnt, drawn = self._expand(draft, expander, parts, learnt, drawn)
        sampled, states = Rollout.joined(parts, draft.policy.pad_id), dict(progress.stages)
        finite = not count_nonfinite(sampled.rewards, self.comm)
        if finite:
            for stage in (self.stages.selector, *self.stages.shapers, *self.stages.expanders):
                evidence = sampled.seen_by(stage.needs)
                _, states[stage.name] = advance(stage, evidence, states[stage.name], self.comm, metrics)
        self._observe(metrics, sampled, learnt)
        rows = torch.isin(sampled.sequence_ids, learnt.sequence_ids).nonzero().squeeze(-1)
        rollout, lag = sampled.rows(rows[sampled.sequence_ids[rows].argsort()]), progress.made - progress.rollouts
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
            metrics: where the time is noted.
            begun: for each response the tokens that its answer begins with; None if no answer begins with any.
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
        decoder = Decoder(policy, settings, seed, sorted(needs), options, greedy)
        parts, jobs, errors = list[Rollout](), list[Future[Scores]](), list[str]()

        def reply(example: Example, answer: list[int]) -> list[int] | None:
            text, ask = self._texts(policy, [answer])[0], partial(reply_tokens, encode=policy.encode_text)
            return attempt(ask, self.task, example, text, errors.append, None)

        with metrics.phase("sample"):
            answer_to = reply if offers(self.task, "reply") else None
            for part in sample(decoder, examples, planned, begun=begun, reply=answer_to):
                answers = part.answers()
                texts, full_texts = self._texts(policy, answers), [policy.decode(answer) for answer in answers]
                ask = partial(score, rewards=self.rewards, stop=self.leaving, whole=full_texts)
                jobs.append(self.scoring.submit(ask, self.task, part.examples, texts))
                parts.append(replace(part, texts=texts))
        if offers(self.task, "reply"):
            self._report_errors("turns/errors", errors, f"reply raised on rank {self.rank}", metrics)
        with metrics.phase("score"):
            scores = Scores.joined([job.result() for job in jobs], self.rewards)
        return Rollout.joined(parts, policy.pad_id), scores

    def _texts(self, policy: Policy, answers: Sequence[list[int]]) -> list[str]:
        special = not self.task.keeps_special_tokens
        return [policy.decode(answer, skip_special_tokens=special) for answer in answers]

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

    def _branches(self, draft: _Draft, rollout: Rollout, learnt: ResponseBatch, request: Expansion) -> Rollout:
        """Branches from the pivots of some responses of this rank, with shaped rewards.

        Raises:
            ConfigError: the task has several turns.
        """
        if offers(self.task, "reply"):
            raise ConfigError(
                f"a stage branches from inside a response, and those of '{self.task.name}' have several turns. Remove "
                f"the stage, or take another task."
            )
        no_ids, branches = torch.zeros(0, dtype=torch.int64), request.branches
        parents = no_ids if request.parents is None else request.parents
        pivots = no_ids if request.pivots is None else request.pivots
        row_of = {sequence: row for row, sequence in enumerate(rollout.sequence_ids.tolist())}
        rows = [row_of[sequence] for sequence in learnt.sequence_ids[parents].tolist()]
        examples, begun = [], []
        for row, pivot in zip(rows, pivots.tolist(), strict=True):
            tokens = rollout.response_ids[row][rollout.response_mask[row]].tolist()
            examples += [rollout.examples[row]] * branches
            begun += [tokens[:pivot]] * branches
        parent_ids = learnt.sequence_ids[parents].repeat_interleave(branches)
        planned = ResponseBatch.of(
            torch.zeros(len(parent_ids)),
            BRANCHES + parent_ids,
            limit=self.run.rollout.max_new_tokens,
            sequence_ids=BRANCHES + parent_ids * branches + torch.arange(branches).repeat(len(rows)),
            prompt_ids=learnt.prompt_ids[parents].repeat_interleave(branches),
            given=pivots.repeat_interleave(branches),
            pivot=(pivots.double() / learnt.lengths[parents]).repeat_interleave(branches),
        )
        return self._scored(draft, examples, planned, begun)

    def _scored(
        self, draft: _Draft, examples: Sequence[Example], planned: ResponseBatch, begun: Sequence[Sequence[int]] | None
    ) -> Rollout:
        """:meth:`answered` with the evidence of rewards, and shaped rewards: every shaper sees those of the scorer."""
        policy, progress, metrics = draft
        rollout, scores = self.answered(policy, "train", examples, planned, metrics, begun=begun)
        late = [text for text, is_late in zip(rollout.texts, scores.timed_out.tolist(), strict=True) if is_late]
        metrics.add("scorer/timeouts", len(late))
        if late:
            self.say(f"scorer timed out on rank {self.rank}, reward 0", f"{len(late)} times, first on {late[0][:80]!r}")
        self._report_errors("scorer/errors", scores.errors, f"scorer raised on rank {self.rank}, reward 0", metrics)
        signals = dict(rollout.signals)
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
            errors = list[str]()
            blocks: list[list[Block]] = [
                attempt(checked_blocks, self.task, example, text, errors.append, [])
                for example, text in zip(rollout.examples, rollout.texts, strict=True)
            ]
            self._report_errors("blocks/errors", errors, "blocks raised, none for the response", metrics)
            given_counts, width = rollout.responses.given.tolist(), rollout.response_ids.shape[1]
            decode = partial(policy.decode, skip_special_tokens=not self.task.keeps_special_tokens)
            extra |= block_evidence(blocks, rollout.texts, rollout.answers(), given_counts, width, decode)
        if offers(self.task, "reply"):
            errors, mask = list[str](), rollout.response_mask
            texts, ids = rollout.texts, rollout.response_ids
            extra |= turn_evidence(self.task, examples, texts, ids, mask, scores.rewards, errors.append)
            self._report_errors("turns/errors", errors, f"turn_rewards raised on rank {self.rank}", metrics)
            signals["turn"] = turns_of(mask).float() * mask
        responses, rewards = replace(rollout.responses, rewards=scores.rewards, extra=extra), scores.rewards
        rollout = replace(rollout, signals=signals, responses=responses)
        if self.stages.shapers and not count_nonfinite(rewards, self.comm):
            for shaper in self.stages.shapers:
                evidence, state = rollout.seen_by(shaper.needs), progress.stages[shaper.name]
                stat, _ = measure_all(shaper, [evidence], state, self.comm)
                caller, added = f"'{shaper.name}': shape", shaper.shape(evidence, stat, state)
                rewards = rewards + checked_output(added, caller, [(len(evidence),)], MethodError).double()
        return replace(rollout, responses=responses.reshaped(rewards))

    def _report_errors(self, metric: str, errors: Sequence[str], what: str, metrics: Metrics) -> None:
        metrics.add(metric, len(errors))
        if errors:
            self.say(what, errors[0])

    # -- stages ------------------------------------------------------------------------------------------------------

    def _expand(
        self, draft: _Draft, expander: RolloutExpander, parts: list[Rollout], learnt: ResponseBatch, drawn: int
    ) -> tuple[ResponseBatch, int]:
        """Ask an expander again for as long as it wants fresh prompts.

        Returns:
            the responses to learn from, and how many prompts of the rollout are chosen by now.
        """
        state = draft.progress.stages[expander.name]
        for number in range(expander.rounds):
            sampled = Rollout.joined(parts, draft.policy.pad_id)
            evidence = sampled.seen_by(expander.needs).select(torch.isin(sampled.sequence_ids, learnt.sequence_ids))
            stat, _ = measure_all(expander, [evidence], state, self.comm)
            request = expander.expand(evidence, stat, state, self.run.seed)
            request.require(expander.name, evidence)
            learnt = evidence if request.drop is None else evidence.select(~request.drop)
            fresh, parents = list[Rollout](), () if request.parents is None else request.parents
            # if any rank samples branches, all do: they join the same collectives
            if float(self.comm.sum(torch.tensor([float(len(parents))], dtype=torch.float64))):
                fresh.append(self._branches(draft, sampled, evidence, request))
            if request.fresh and number + 1 < expander.rounds:
                fresh.append(self._answers(draft, drawn, request.fresh))
                drawn += request.fresh
            parts += fresh
            learnt = ResponseBatch.joined([learnt, *(part.responses for part in fresh)]) if fresh else learnt
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
        metrics.add("response/tokens", float(sampled.response_mask.sum()))
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
        }
        rows |= {name: responses.evidence(name) for name in self.run.reward_evidence & needs}
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


# -- what stages and providers return --------------------------------------------------------------------------------


def count_nonfinite(rewards: Tensor, comm: Comm) -> int:
    """How many rewards of all ranks are NaN or Inf."""
    return int(comm.sum((~torch.isfinite(rewards)).sum().double().reshape(1)))


def advance(
    stage: Stage, responses: ResponseBatch, state: State, comm: Comm, metrics: Metrics
) -> tuple[Settled, State]:
    """The statistics of a stage over all responses of the rollout, and its next state; logs its metrics."""
    stat, after = measure_all(stage, [responses], state, comm)
    metrics.report({f"{stage.name}/{name}": mean for name, mean in stage.report(responses, stat, state).items()})
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
