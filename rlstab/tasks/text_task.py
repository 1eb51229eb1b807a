"""Examples that are all there, with texts for answers: what a file and a data set have in common."""

from __future__ import annotations

from typing import Literal

from rlstab.errors import DataError, OutOfRange
from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.scorers import TextScorer
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Example, Message, Split


class TextTask:
    """Prompts and answers in memory; where one prompt is a chat, all are.

    Args:
        name: for logs.
        rows: the examples, in their order.
        held_out: those of the eval split; None holds out the last `eval_size` of `rows`.
        eval_size: how many.
        eval_setting: the setting that names other held-out examples, in errors.
        scorer: see :class:`rlstab.tasks.Jsonl`.
        answer_pattern: likewise.
        time_limit: likewise.
        workers: likewise.

    Raises:
        DataError: nothing is left to train on.
        MissingPackage: if math-verify is asked for and not installed.
        OutOfRange: if a setting has a value that cannot be used.
    """

    keeps_special_tokens = False

    def __init__(
        self,
        name: str,
        rows: list[Example],
        held_out: list[Example] | None,
        eval_size: int,
        eval_setting: str,
        *,
        scorer: Literal["exact", "math_verify"],
        answer_pattern: str | None,
        time_limit: float,
        workers: int,
    ) -> None:
        self.name = name
        self._scorer = TextScorer(scorer, AnswerPattern(answer_pattern))
        cheap = scorer == "exact" and answer_pattern is None  # and cannot hang
        self.workers = None if cheap else Workers(self._scorer, workers, time_limit)
        self._rows: dict[Split, list[Example]]
        if held_out is not None:
            self._rows = {"train": rows, "eval": held_out}
        else:
            if eval_size < 1:
                raise OutOfRange(f"`eval_size` is {eval_size}. Set it to 1 or more, or name an `{eval_setting}`.")
            if eval_size >= len(rows):
                raise DataError(
                    f"{name}: has {len(rows)} example{'s' * (len(rows) != 1)}, so holding out the last {eval_size} "
                    f"leaves none to train on. Set a smaller `eval_size`, or name an `{eval_setting}`."
                )
            self._rows = {"train": rows[:-eval_size], "eval": rows[-eval_size:]}
        self.size: dict[Split, int | None] = {split: len(rows) for split, rows in self._rows.items()}
        if any(one.messages for rows in self._rows.values() for one in rows):
            self._rows = {split: [_chat(one) for one in rows] for split, rows in self._rows.items()}

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is a string. Indices beyond the end start again."""
        rows = self._rows[split]
        return rows[index % len(rows)]

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 if the completion has the right answer, else 0.0.

        Raises:
            ScorerError: if that takes too long, or math-verify cannot read the example's own answer.
        """
        if self.workers is None:
            return self._scorer.score(example.answer, completion)
        return self.workers.score_one(example.answer, completion)


def _chat(example: Example) -> Example:
    return example if example.messages else Example.chat([Message("user", example.prompt)], example.answer)
