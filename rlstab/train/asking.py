"""Asking the policy: responses to prompts, or from inside other responses, with what the task says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstab.config.runs import RunConfig
from rlstab.signals import SIGNAL_NAMES
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Example, Task
from rlstab.tasks.blocks import block_evidence, told_blocks
from rlstab.tasks.rewards import Rewards, Scores, score, without_lost
from rlstab.tasks.task import flaky_share
from rlstab.train.evaluate import Share
from rlstab.train.metrics import Metrics
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.sampling import Sampled, sample

#: The evidence that holds rewards from before a flaky grader lost some of them.
TRUE = "reward/true"


@dataclass(frozen=True, eq=False)
class Asked:
    """Responses of this rank that were sampled and scored at a time, whole groups in a row.

    Attributes:
        examples: ``R``, what each answers.
        texts: ``R``, the whole answers.
        sequences: ids and masks.
        signals: ``(R, T)`` float32 by name, of the sampler.
        responses: what stages see.
        timed_out: ``(R,)`` bool, the scorer took too long.
    """

    examples: list[Example]
    texts: list[str]
    sequences: Sequences
    signals: dict[str, Tensor]
    responses: ResponseBatch
    timed_out: Tensor

    def seen(self, needs: frozenset[str]) -> ResponseBatch:
        """The responses with the evidence that a stage needs, as far as a sampler can know it."""
        own = {name: self.signals[name].cpu() for name in needs & self.signals.keys()}
        return self.responses.knowing(own)


@dataclass(frozen=True, eq=False)
class Identities:
    """Which responses are asked for.

    Attributes:
        sequence_ids, group_ids, prompt_ids: ``(R,)`` int64.
        given: for each, the tokens that its answer begins with; None where no answer has any.
        pivot: ``(R,)`` float64, their number as a share of the answer that they come from.
    """

    sequence_ids: Tensor
    group_ids: Tensor
    prompt_ids: Tensor
    given: list[list[int]] | None
    pivot: Tensor


class Asking:
    """Samples and scores.

    Args:
        run: the configuration.
        task: where prompts come from, and rewards where there are no others.
        rewards: what is measured and learnt from.
        blocks: whether the task is asked for the blocks of an answer.
        share: of this rank.
        say: tells the user something.
        leaving: set once nobody waits for scores any more.
    """

    def __init__(
        self,
        run: RunConfig,
        task: Task,
        rewards: Rewards,
        blocks: bool,
        share: Share,
        say: Callable[[str, str], None],
        leaving: Event,
    ) -> None:
        self.run, self.task, self.rewards, self.blocks = run, task, rewards, blocks
        self.share, self.say, self.leaving = share, say, leaving
        self.flaky = flaky_share(task)
        # one worker: a task's generator and scorer are foreign code and need not be safe for several threads
        self._beside = ThreadPoolExecutor(1)
        self._ahead: tuple[list[int], Future[list[Example]]] | None = None

    def close(self) -> None:
        """Wait for what is being scored, and for nothing else."""
        self._beside.shutdown(cancel_futures=True)

    def prepare(self, numbers: list[int]) -> None:
        """Draw problems that will be asked for next, while something else is done."""
        self._ahead = numbers, self._beside.submit(self._drawn, numbers)

    def examples(self, numbers: list[int]) -> list[Example]:
        """The problems of these numbers."""
        ahead, self._ahead = self._ahead, None
        return ahead[1].result() if ahead is not None and ahead[0] == numbers else self._drawn(numbers)

    def _drawn(self, numbers: Sequence[int]) -> list[Example]:
        return [self.task.example("train", number) for number in numbers]

    def ask(
        self,
        policy: Policy,
        examples: list[Example],
        ids: Identities,
        metrics: Metrics,
    ) -> Asked:
        """Sample a response to each example, and score it while the next ones are sampled."""
        run, scoring, given = self.run, list[Future[Scores]](), ids.given
        with metrics.phase("sample"):
            drawn = sample(
                policy,
                [one.asked for one in examples],
                ids.sequence_ids,
                run.rollout,
                given=given,
                seed=run.seed,
                needs={"entropies"} | ((run.composition.needs | run.pipeline.needs) & SIGNAL_NAMES),
                options=run.composition.signal_options,
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
        extra = {}
        if self.flaky:
            extra[TRUE] = scores.rewards
            scores = without_lost(scores, self.rewards, self.flaky, run.seed, ids.sequence_ids)
        extra |= {"raw_rewards": scores.rewards, **{reward_part(name): one for name, one in scores.parts.items()}}
        if self.blocks:
            extra |= self._blocks(policy, examples, drawn, given, metrics)
        timed_out = torch.zeros(len(examples), dtype=torch.bool)
        timed_out[scores.timed_out] = True
        count = [len(one) for one in given] if given is not None else [0] * len(examples)
        responses = ResponseBatch(
            rewards=scores.rewards,
            lengths=drawn.sequences.response_mask.sum(-1).double().cpu(),
            ended=drawn.ended,
            prompt_ids=ids.prompt_ids,
            group_ids=ids.group_ids,
            sequence_ids=ids.sequence_ids,
            given=torch.tensor(count, dtype=torch.int64),
            pivot=ids.pivot,
            limit=run.rollout.max_new_tokens,
            extra=extra,
        )
        return Asked(examples, drawn.texts, drawn.sequences, signals, responses, timed_out)

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


def reward_part(name: str) -> str:
    """The evidence that holds one of several rewards."""
    return f"reward/{name}"


def joined(parts: Sequence[Asked], pad_id: int) -> Asked:
    """All that was sampled, in the order in which it was."""
    if len(parts) == 1:
        return parts[0]
    sequences = Sequences.joined([one.sequences for one in parts], pad_id)
    length = sequences.response_ids.shape[1]
    signals = {
        name: torch.cat([pad(one.signals[name], (0, length - one.signals[name].shape[1])) for one in parts])
        for name in parts[0].signals
    }
    return Asked(
        [example for one in parts for example in one.examples],
        [text for one in parts for text in one.texts],
        sequences,
        signals,
        ResponseBatch.joined([one.responses for one in parts]),
        torch.cat([one.timed_out for one in parts]),
    )
