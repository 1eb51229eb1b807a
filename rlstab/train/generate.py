"""Makes rollouts: choose prompts, sample, score, shape the rewards, sample more responses or drop some.

The generator has no state that changes: each rollout comes with the progress after it, which the loop keeps once the
rollout is learnt. Random numbers depend on identities: the id of a response comes from the index of its prompt in the
rollout, that of a branch from its parent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.core.batch import BASICS
from rlstab.core.comm import Comm
from rlstab.core.devices import sent
from rlstab.core.method import State, measure_all
from rlstab.core.objective import active_methods
from rlstab.core.stats import Settled
from rlstab.core.turns import turns_of
from rlstab.errors import ConfigError, MethodError, MissingSignal, NonFinite, ShapeError
from rlstab.models.policy import Policy
from rlstab.signals import SIGNAL_NAMES, TRAINER_SIGNALS
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Expansion, Offer, RolloutExpander, Stage
from rlstab.tasks import Block, Example, Task
from rlstab.tasks.attempts import attempt, offers
from rlstab.tasks.blocks import block_evidence, checked_blocks, require_blocks
from rlstab.tasks.rewards import Rewards, Scores, score, without_lost
from rlstab.tasks.task import Split, flaky_share
from rlstab.tasks.turns import reply_tokens, turn_evidence
from rlstab.train.rollout import BRANCHES, Progress, Rollout
from rlstab.train.sampling import sample
from rlstab.train.tracking import Metrics

#: The seed of evaluations, so that their random numbers are not those of training.
EVALUATION_SEED = 1_000_003

#: ``(R, T)`` float values of a signal. It must be a pure function of the rollout, or a resumed run would differ.
SignalProvider: TypeAlias = Callable[[Rollout], Tensor]


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

    def require_turns(self) -> None:
        """Check that the task provides the turns that are read, and nothing that several turns do not allow.

        Raises:
            MissingSignal: the task has no turns, or no rewards of turns.
            ConfigError: the task has turns, and blocks are read; or it is flaky, which affects no rewards of turns.
        """
        if self.blocks and offers(self.task, "reply"):
            raise ConfigError(f"blocks are read, and responses of '{self.task.name}' have several turns. Read turns.")
        for reader in (*active_methods(self.run.composition), *self.stages):
            read = reader.needs & TURNS
            if read and not offers(self.task, "reply"):
                raise MissingSignal(
                    f"'{reader.name}' reads '{min(read)}', and responses of '{self.task.name}' have one turn. Give the "
                    f"task `reply`, see rlstab.tasks.HasTurns."
                )
            if "turn_reward" in read and not offers(self.task, "turn_rewards"):
                raise MissingSignal(
                    f"'{reader.name}' reads 'turn_reward', and '{self.task.name}' rewards no turns. Give the task "
                    f"`turn_rewards`, see rlstab.tasks.HasTurns."
                )
            if read and flaky_share(self.task):
                raise ConfigError(
                    f"'{reader.name}' reads turns, whose rewards '{self.task.name}' does not lose. Set task.flaky to 0."
                )

    def require_blocks(self) -> None:
        """Check that the task provides the blocks that are read.

        Raises:
            MissingSignal: the task has no blocks.
            ConfigError: the task is flaky, which affects no rewards of blocks.
        """
        if not self.blocks:
            return
        reader = next((f"the stage '{stage.name}'" for stage in self.stages if stage.needs & BLOCKS), None)
        require_blocks(self.task, reader or "the method that reads 'block_ids'")
        if reader and flaky_share(self.task):
            raise ConfigError(
                f"{reader} reads the rewards of blocks, of which '{self.task.name}' loses none. Set task.flaky to 0."
            )

    def start(self) -> Progress:
        """The progress of a run that has not begun."""
        return Progress(0, 0, 0, 0, self.run.composition.init_state(), self.stages.init_state())

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
        policy, drawn = self.policy(), self.run.rollout.prompts
        parts = [self._answers(policy, progress, 0, drawn, metrics)]
        learnt = parts[0].responses  # the responses to learn from so far
        if not count_nonfinite(learnt.rewards, self.comm):
            for expander in self.stages.expanders:
                learnt, drawn = self._expand(expander, policy, progress, parts, learnt, drawn, metrics)
        sampled, states = Rollout.joined(parts, policy.pad_id), dict(progress.stages)
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

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _select(self, policy: Policy, progress: Progress, first: int, count: int) -> Tensor:
        selector, size = self.stages.selector, self.task.size["train"]
        features = partial(self._features, policy)
        offer = Offer(progress.made, first, count, progress.drawn + first, size, self.run.seed, features)
        chosen = selector.select(offer, progress.stages[selector.name])
        fits = isinstance(chosen, Tensor) and chosen.dtype == torch.int64 and chosen.shape == (count,)
        if not fits or not bool(((chosen >= 0) & (chosen < (size or 2**62))).all()):
            raise MethodError(
                f"'{selector.name}': select returned {chosen!r:.60}, expected ({count},) int64 numbers of prompts, "
                f"from 0 to below {size or 'any'}. Change its function."
            )
        return chosen

    @torch.no_grad()
    def _features(self, policy: Policy, numbers: Tensor) -> Tensor:
        """``(n, width)`` float64 mean input embedding of each prompt."""
        ids, mask = policy.encode(self._draw(numbers.tolist()), self.run.rollout)
        hidden = policy.model.get_input_embeddings()(sent(ids, policy.device)).cpu().double()
        mean: Tensor = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return mean

    def _draw(self, numbers: Sequence[int]) -> list[Example]:
        return [self.task.example("train", number) for number in numbers]

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
        run, needs = self.run, {"entropies"}
        settings = run.rollout if cut else run.rollout.model_copy(update={"top_p": 1.0, "top_k": 0})
        if split == "train":
            needs |= (run.composition.needs | self.stages.needs) & SIGNAL_NAMES - BASICS
            needs |= run.composition.live_needs & {"log_support_mass"}  # a support is kept with its mass
        parts, jobs, errors = list[Rollout](), list[Future[Scores]](), list[str]()

        def reply(example: Example, answer: list[int]) -> list[int] | None:
            text, ask = self._texts(policy, [answer])[0], partial(reply_tokens, encode=policy.encode_text)
            return attempt(ask, self.task, example, text, errors.append, None)

        with metrics.phase("sample"):
            for part in sample(
                policy,
                examples,
                planned,
                settings,
                seed=run.seed if split == "train" else EVALUATION_SEED,
                begun=begun,
                needs=needs,
                options=run.composition.signal_options,
                greedy=greedy,
                reply=reply if offers(self.task, "reply") else None,
            ):
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

    def _answers(self, policy: Policy, progress: Progress, first: int, count: int, metrics: Metrics) -> Rollout:
        """This rank's answers to the next ``count`` prompts of all ranks, with shaped rewards."""
        group, chosen = self.run.rollout.group, self._select(policy, progress, first, count)
        indices = torch.arange(count)[(first + torch.arange(count)) % self.world == self.rank]
        repeats = torch.arange(len(indices)).repeat_interleave(group)
        group_ids = (progress.made * self.slots + first + indices)[repeats]
        examples, within = self._draw(chosen[indices].tolist()), torch.arange(group).repeat(len(indices))
        planned = ResponseBatch.of(
            torch.zeros(len(repeats)),
            group_ids,
            limit=self.run.rollout.max_new_tokens,
            sequence_ids=group_ids * group + within,
            prompt_ids=chosen[indices][repeats],
        )
        return self._scored(policy, [examples[index] for index in repeats.tolist()], planned, None, progress, metrics)

    def _branches(
        self,
        policy: Policy,
        progress: Progress,
        rollout: Rollout,
        learnt: ResponseBatch,
        request: Expansion,
        metrics: Metrics,
    ) -> Rollout:
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
        return self._scored(policy, examples, planned, begun, progress, metrics)

    def _scored(
        self,
        policy: Policy,
        examples: Sequence[Example],
        planned: ResponseBatch,
        begun: Sequence[Sequence[int]] | None,
        progress: Progress,
        metrics: Metrics,
    ) -> Rollout:
        """:meth:`answered` with the evidence of rewards, and shaped rewards."""
        rollout, scores = self.answered(policy, "train", examples, planned, metrics, begun=begun)
        self._report_scorer(scores, rollout.texts, metrics)
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
            extra |= self._block_evidence(policy, rollout, metrics)
        if offers(self.task, "reply"):
            errors = list[str]()
            tokens, rewards = (rollout.response_ids, rollout.response_mask), scores.rewards
            extra |= turn_evidence(self.task, examples, rollout.texts, *tokens, rewards, errors.append)
            self._report_errors("turns/errors", errors, f"turn_rewards raised on rank {self.rank}", metrics)
            signals["turn"] = turns_of(rollout.response_mask).float() * rollout.response_mask
        responses = replace(rollout.responses, rewards=scores.rewards, extra=extra)
        return self._shape(replace(rollout, signals=signals, responses=responses), progress)

    def _block_evidence(self, policy: Policy, rollout: Rollout, metrics: Metrics) -> dict[str, Tensor]:
        """The evidence about blocks that the task gives for some responses."""
        errors = list[str]()
        blocks: list[list[Block]] = [
            attempt(checked_blocks, self.task, example, text, errors.append, [])
            for example, text in zip(rollout.examples, rollout.texts, strict=True)
        ]
        self._report_errors("blocks/errors", errors, "blocks raised, none for the response", metrics)
        given_counts, width = rollout.responses.given.tolist(), rollout.response_ids.shape[1]
        decode = partial(policy.decode, skip_special_tokens=not self.task.keeps_special_tokens)
        return block_evidence(blocks, rollout.texts, rollout.answers(), given_counts, width, decode)

    def _report_errors(self, metric: str, errors: Sequence[str], what: str, metrics: Metrics) -> None:
        metrics.add(metric, len(errors))
        if errors:
            self.say(what, errors[0])

    def _report_scorer(self, scores: Scores, texts: Sequence[str], metrics: Metrics) -> None:
        late = [text for text, timed_out in zip(texts, scores.timed_out.tolist(), strict=True) if timed_out]
        metrics.add("scorer/timeouts", len(late))
        if late:
            self.say(f"scorer timed out on rank {self.rank}, reward 0", f"{len(late)} times, first on {late[0][:80]!r}")
        self._report_errors("scorer/errors", scores.errors, f"scorer raised on rank {self.rank}, reward 0", metrics)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _shape(self, rollout: Rollout, progress: Progress) -> Rollout:
        """The rollout with shaped rewards: every shaper sees those of the scorer, and what they return is added."""
        rewards = rollout.rewards
        if self.stages.shapers and not count_nonfinite(rewards, self.comm):
            for shaper in self.stages.shapers:
                evidence, state = rollout.seen_by(shaper.needs), progress.stages[shaper.name]
                stat, _ = measure_all(shaper, [evidence], state, self.comm)
                caller, added = f"'{shaper.name}': shape", shaper.shape(evidence, stat, state)
                rewards = rewards + checked_output(added, caller, [(len(evidence),)], MethodError).double()
        return replace(rollout, responses=rollout.responses.reshaped(rewards))

    def _expand(
        self,
        expander: RolloutExpander,
        policy: Policy,
        progress: Progress,
        parts: list[Rollout],
        learnt: ResponseBatch,
        drawn: int,
        metrics: Metrics,
    ) -> tuple[ResponseBatch, int]:
        """Ask an expander again for as long as it wants fresh prompts.

        Returns:
            the responses to learn from, and how many prompts of the rollout are chosen by now.
        """
        state = progress.stages[expander.name]
        for number in range(expander.rounds):
            sampled = Rollout.joined(parts, policy.pad_id)
            evidence = sampled.seen_by(expander.needs).select(torch.isin(sampled.sequence_ids, learnt.sequence_ids))
            stat, _ = measure_all(expander, [evidence], state, self.comm)
            request = expander.expand(evidence, stat, state, self.run.seed)
            request.require(expander.name, evidence)
            learnt = evidence if request.drop is None else evidence.select(~request.drop)
            fresh: list[Rollout] = []
            branching = torch.tensor(
                [float(0 if request.parents is None else len(request.parents))], dtype=torch.float64
            )
            if float(self.comm.sum(branching)):  # if any rank samples, all do: they join the same collectives
                fresh.append(self._branches(policy, progress, sampled, evidence, request, metrics))
            if request.fresh and number + 1 < expander.rounds:
                fresh.append(self._answers(policy, progress, drawn, request.fresh, metrics))
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


# -- what is refused before anything is sampled ----------------------------------------------------------------------

#: Evidence given by a task that knows blocks.
BLOCKS = frozenset({"block_ids", "block_rewards", "block_outcomes"})

#: Evidence given by a task of several turns.
TURNS = frozenset({"turn", "turn_reward", "turn_rewards", "turn_states"})

#: Evidence that holds each reward of the run separately.
REWARDS = frozenset({"reward_parts", "reward_weights"})


def require_provider_names(signals: Mapping[str, Any]) -> None:
    """Raises ConfigError: a user-defined signal has the name of a signal that the trainer makes."""
    for name in sorted(signals.keys() & (TRAINER_SIGNALS - {"teacher_logprobs"} | {"old_logprobs", "advantages"})):
        raise ConfigError(f"signals: '{name}' is a signal that the trainer makes. Call yours by another name.")
