"""Prompts and answers from a JSON Lines file."""

from pathlib import Path
from typing import Literal

from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.jsonl_file import Fields, read_examples
from rlstab.tasks.prompt_template import PromptTemplate
from rlstab.tasks.scorers import TextScorer
from rlstab.tasks.text_task import TextTask


class Jsonl(TextTask):
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
        TextScorer(scorer, AnswerPattern(answer_pattern))  # before the file, which may be long
        fields = Fields(prompt_field, answer_field, PromptTemplate(prompt_template, "prompt"), system)
        rows = read_examples(path, fields)
        super().__init__(
            str(path),
            rows,
            None if eval_path is None else read_examples(Path(eval_path), fields),
            eval_size,
            "eval_path",
            scorer=scorer,
            answer_pattern=answer_pattern,
            time_limit=time_limit,
            workers=workers,
        )
        self.name = path.stem
