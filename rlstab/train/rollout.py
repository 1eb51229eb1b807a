"""The rollout, the one object that goes from the sampler to the loss; and the progress of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.method import State
from rlstab.core.padding import joined_rows
from rlstab.models.policy import Sequences
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Example, Task

#: Where the ids of branches begin; those of responses to prompts count from 0.
BRANCHES = 2**50


@dataclass(frozen=True, eq=False)
class Rollout:
    """``R`` responses of this rank, whole groups of them. All tensors are on the CPU.

    The sampler makes it, the scorer fills in ``texts`` and rewards, the stages shape these, and the estimator fills in
    ``advantages``. User-defined signals are functions of a rollout.

    Attributes:
        sequences: ids and masks; the tokens that a branch was given are part of its prompt.
        signals: ``(R, T)`` float32 by name, 0 in the padding.
        examples: ``R``, the example that each response answers.
        responses: what stages see; ``rewards`` are shaped, ``raw_rewards`` are not, and ``timed_out`` is True where a
            scorer exceeded its time limit.
        texts: ``R``, the decoded answers as a whole.
        advantages: ``(R,)`` or ``(R, T)`` float32; None until they are estimated.
    """

    sequences: Sequences
    signals: Mapping[str, Tensor]
    examples: Sequence[Example]
    responses: ResponseBatch
    texts: Sequence[str] = ()
    advantages: Tensor | None = None

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def response_ids(self) -> Tensor:
        """``(R, T)`` int64."""
        return self.sequences.response_ids

    @property
    def response_mask(self) -> Tensor:
        """``(R, T)`` bool, True up to and including the end, but not on replies of the environment."""
        return self.sequences.response_mask

    @property
    def rewards(self) -> Tensor:
        """``(R,)`` float64, as shaped so far."""
        return self.responses.rewards

    @property
    def sequence_ids(self) -> Tensor:
        """``(R,)`` int64, unique over the run and over all ranks."""
        return self.responses.sequence_ids

    @property
    def group_ids(self) -> Tensor:
        """``(R,)`` int64, unique over the run and over all ranks."""
        return self.responses.group_ids

    def rewards_by_name(self, mean: str) -> dict[str, str]:
        """The evidence of each reward as it was scored, by its name in records; their sum is called ``mean``.

        ``reward/true`` is the sum before a flaky task lost some of it.
        """
        return {mean: "raw_rewards", **{name: name for name in self.responses.extra if name.startswith("reward/")}}

    def seen_by(self, needs: Set[str]) -> ResponseBatch:
        """The responses with those signals that a stage needs and that are known before learning."""
        return self.responses.knowing({name: self.packed(self.signals[name]) for name in needs & self.signals.keys()})

    def packed(self, values: Tensor) -> Tensor:
        """``(R, T)`` values as stages see them: those of the response one after another, without replies between."""
        return values.gather(1, self._packing)

    def unpacked(self, values: Tensor) -> Tensor:
        """``(R, T)`` values of a stage at the tokens that they belong to, the reverse of :meth:`packed`."""
        return torch.zeros_like(values).scatter(1, self._packing, values)

    @property
    def _packing(self) -> Tensor:
        return (~self.response_mask).to(torch.uint8).argsort(dim=1, stable=True)

    def rows(self, rows: Tensor) -> Rollout:
        """Some of the responses, cut to the longest of them."""
        sequences, responses = self.sequences.rows(rows), self.responses.select(rows)
        length = sequences.response_ids.shape[1]
        if "block_ids" in responses.extra:
            responses = responses.knowing({"block_ids": responses.extra["block_ids"][:, :length]})
        return replace(
            self,
            sequences=sequences,
            signals={name: values[rows][:, :length] for name, values in self.signals.items()},
            examples=[self.examples[row] for row in rows.tolist()],
            responses=responses,
            texts=[self.texts[row] for row in rows.tolist()],
        )

    def token_batch(self, rows: Tensor, *, live_ratio: bool) -> tuple[Sequences, TokenBatch]:
        """A micro-batch: the sequences to forward, and the evidence that the loss reads."""
        assert self.advantages is not None
        sequences = self.sequences.rows(rows)
        length = sequences.response_ids.shape[1]
        cut = {name: values[rows][:, :length] for name, values in self.signals.items()}
        extra = {name: cut.pop(name) for name in cut.keys() - SIGNALS.keys() - {"old_logprobs", "logprobs"}}
        advantages = self.advantages[rows]
        return sequences, TokenBatch.from_padded(
            response_mask=sequences.response_mask,
            advantages=advantages if advantages.ndim == 1 else advantages[:, :length],
            sequence_ids=self.sequence_ids[rows],
            group_ids=self.group_ids[rows],
            live_ratio=live_ratio,
            extra=extra,
            **cut,
        )

    def answers(self) -> list[list[int]]:
        """The tokens of each answer, including those that a branch was given and replies of the environment."""
        answers, context = [], self.sequences.context
        for row, prefix_length in enumerate(self.responses.given.tolist()):
            prompt = self.sequences.prompt_ids[row][self.sequences.prompt_mask[row]].tolist()
            sampled = self.response_ids[row][context[row]].tolist()
            answers.append(prompt[len(prompt) - prefix_length :] + sampled)
        return answers

    @classmethod
    def joined(cls, parts: Sequence[Rollout], pad_id: int) -> Rollout:
        """All responses, in the order in which they were sampled."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            Sequences.joined([part.sequences for part in parts], pad_id),
            {name: joined_rows([part.signals[name] for part in parts]) for name in parts[0].signals},
            [example for part in parts for example in part.examples],
            ResponseBatch.joined([part.responses for part in parts]),
            [text for part in parts for text in part.texts],
        )

    # -- in a checkpoint -----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, before the advantages are estimated."""
        saved = {f"sequences/{name}": values for name, values in vars(self.sequences).items()}
        saved |= {f"signals/{name}": values for name, values in self.signals.items()}
        return saved | {f"responses/{name}": values for name, values in self.responses.tensors().items()}

    @classmethod
    def from_tensors(cls, saved: Mapping[str, Tensor], limit: int, task: Task) -> Rollout:
        """The rollout whose :meth:`tensors` were saved, without texts.

        Args:
            saved: tensors by name.
            limit: the maximum number of tokens of an answer.
            task: has the examples.
        """

        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): values for name, values in saved.items() if name.startswith(prefix)}

        responses = ResponseBatch.from_tensors(under("responses/"), limit)
        examples = [task.example("train", number) for number in responses.prompt_ids.tolist()]
        return cls(Sequences(**under("sequences/")), under("signals/"), examples, responses)


@dataclass(frozen=True)
class Progress:
    """The progress of a run: all that a checkpoint holds besides weights and moments. Random numbers derive from it.

    Attributes:
        rollouts: number of rollouts learnt from.
        optimizer_steps: number of attempted optimizer steps, including skipped and refused ones, as in the schedule.
        made: number of rollouts made; those not yet learnt from wait in the queue.
        drawn: number of prompts chosen.
        objective: the state of the objective.
        stages: the states of the stages, by name.
        queue: rollouts that wait, oldest first.
    """

    rollouts: int
    optimizer_steps: int
    made: int
    drawn: int
    objective: State
    stages: Mapping[str, State]
    queue: tuple[Rollout, ...] = field(default=(), repr=False)

    def saved(self, pad_id: int) -> dict[str, Any]:
        """Numbers and tensors to save, with the rollouts of all ranks; every rank calls it."""
        # texts and examples follow from the ids
        ranks = [gather_object([replace(rollout, texts=[], examples=[])]) for rollout in self.queue]
        waiting = {str(index): Rollout.joined(parts, pad_id).tensors() for index, parts in enumerate(ranks)}
        return {**vars(self), "stages": dict(self.stages), "queue": waiting}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], rollout: Callable[[Mapping[str, Tensor]], Rollout]) -> Progress:
        """The progress that :meth:`saved` returned; ``rollout`` builds a rollout from the rows of this rank."""
        queue = saved["queue"]
        return cls(**{**saved, "queue": tuple(rollout(queue[str(index)]) for index in range(len(queue)))})
