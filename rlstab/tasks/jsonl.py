"""Prompts and answers from a JSON Lines file."""

from pathlib import Path
from typing import Literal

from rlstab.errors import DataError, OutOfRange
from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.jsonl_file import Fields, read_examples
from rlstab.tasks.prompt_template import PromptTemplate
from rlstab.tasks.scorers import TextScorer
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Example, Message, Split


class Jsonl:
    r"""One JSON object per line, with a prompt and its answer.

    Example `index` is the row `index` of the file, whenever it is asked for. A prompt is text or a list of messages,
    objects with `role` and `content`; where one is, or with `system`, all are chats, and text is a message of the user.

    Args:
        path: the file.
        eval_path: a second file, all of which is the eval split.
        eval_size: without `eval_path`, how many examples at the end of `path` are held out as the eval split.
        prompt_field: the field with the prompt, a string or a list of messages.
        answer_field: the field with the right answer, a string or a number.
        scorer: `exact` compares text, blanks around it aside (a number counts as its text); `math_verify` compares
            the mathematics of LaTeX or plain numbers. There, the right answer is mathematics alone, such as
            `\frac{1}{2}`, and the completion may have text around its own.
        answer_pattern: a regular expression whose group 1 is the answer in a completion; its last match counts, and
            a completion without a match scores 0. None: the whole completion.
        prompt_template: the prompt, with `{prompt}` where the field's text belongs. Not for messages.
        system: content of a system message before every prompt; None for none.
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
        system: str | None = None,
        time_limit: float = 5.0,
        workers: int = 2,
    ) -> None:
        path = Path(path)
        self.name = path.stem
        self._scorer = TextScorer(scorer, AnswerPattern(answer_pattern))
        cheap = scorer == "exact" and answer_pattern is None  # and cannot hang
        self.workers = None if cheap else Workers(self._scorer, workers, time_limit)
        fields = Fields(prompt_field, answer_field, PromptTemplate(prompt_template, "prompt"), system)
        rows = read_examples(path, fields)
        self._rows: dict[Split, list[Example]]
        if eval_path is not None:
            self._rows = {"train": rows, "eval": read_examples(Path(eval_path), fields)}
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
