"""Prompts and answers from a JSON Lines file."""

import random
from pathlib import Path
from typing import Literal

from rlstab.errors import DataError, OutOfRange
from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.jsonl_file import read_examples
from rlstab.tasks.prompt_template import PromptTemplate
from rlstab.tasks.scorers import TextScorer
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Example, Split


class Jsonl:
    r"""One JSON object per line, with a prompt and its answer.

    Training goes through the file again and again, each time in a new order that depends on the seed alone.

    Args:
        path: the file.
        eval_path: a second file, all of which is the eval split.
        eval_size: without `eval_path`, how many examples at the end of `path` are held out as the eval split.
        prompt_field: the field with the prompt, a string.
        answer_field: the field with the right answer, a string or a number.
        scorer: `exact` compares text, blanks around it aside (a number counts as its text); `math_verify` compares
            the mathematics of LaTeX or plain numbers. There, the right answer is mathematics alone, such as
            `\frac{1}{2}`, and the completion may have text around its own.
        answer_pattern: a regular expression whose group 1 is the answer in a completion; its last match counts, and
            a completion without a match scores 0. None: the whole completion.
        prompt_template: the prompt, with `{prompt}` where the field's text belongs.
        seed: chooses the order of training.
        time_limit: seconds that a completion may take to score; then it gets 0.
        workers: processes that score. None is needed for `exact` without a pattern.

    Raises:
        DataError: if a file cannot be read or used; the message has the line and the remedy.
        MissingPackage: if math-verify is asked for and not installed.
        OutOfRange: if a setting has a value that cannot be used.
    """

    keeps_special_tokens = False

    def __init__(
        self,
        path: str | Path,
        eval_path: str | Path | None = None,
        eval_size: int = 64,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        scorer: Literal["exact", "math_verify"] = "exact",
        answer_pattern: str | None = None,
        prompt_template: str = "{prompt}",
        seed: int = 0,
        time_limit: float = 5.0,
        workers: int = 2,
    ) -> None:
        path = Path(path)
        self.name = path.stem
        self.seed = seed
        self._scorer = TextScorer(scorer, AnswerPattern(answer_pattern))
        cheap = scorer == "exact" and answer_pattern is None  # and cannot hang
        self.workers = None if cheap else Workers(self._scorer, workers, time_limit)
        template = PromptTemplate(prompt_template, "prompt")
        rows = read_examples(path, prompt_field, answer_field, template)
        self._rows: dict[Split, list[Example]]
        if eval_path is not None:
            self._rows = {"train": rows, "eval": read_examples(Path(eval_path), prompt_field, answer_field, template)}
        else:
            if eval_size < 1:
                raise OutOfRange(f"`eval_size` is {eval_size}. Set it to 1 or more, or name an `eval_path`.")
            if eval_size >= len(rows):
                raise DataError(
                    f"{path}: has {len(rows)} example{'s' * (len(rows) != 1)}, so holding out the last {eval_size} "
                    "leaves none to train on. Set a smaller `eval_size`, or name an `eval_path`."
                )
            self._rows = {"train": rows[:-eval_size], "eval": rows[-eval_size:]}
        self.size: dict[Split, int | None] = {split: len(rows) for split, rows in self._rows.items()}
        self._order: tuple[int, list[int]] = (-1, [])

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is a string. Indices beyond the end start again."""
        rows = self._rows[split]
        epoch, within = divmod(index, len(rows))
        if split == "train":
            within = self._epoch_order(epoch)[within]
        return rows[within]

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 if the completion has the right answer, else 0.0.

        Raises:
            ScorerError: if that takes too long, or math-verify cannot read the example's own answer.
        """
        if self.workers is None:
            return self._scorer.score(example.answer, completion)
        return self.workers.score_one(example.answer, completion)

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._rows["train"])))
            random.Random(f"jsonl {self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
