"""Find the answer inside a completion."""

import re

from rlstab.errors import OutOfRange


class AnswerPattern:
    """A regular expression whose group 1 is the answer; the last match in a completion counts.

    The last, because a model that corrects itself means its last word.

    Args:
        pattern: the expression, or None: the whole completion is the answer.
        setting: its name, in errors.

    Raises:
        OutOfRange: if the expression is not valid or has no group.
    """

    def __init__(self, pattern: str | None, setting: str = "answer_pattern") -> None:
        self._regex = None if pattern is None else _compiled(pattern, setting)

    def find(self, completion: str) -> str | None:
        """Return the answer without surrounding blanks, or None if the expression matches nowhere."""
        if self._regex is None:
            return completion.strip()
        answer = None
        for match in self._regex.finditer(completion):
            answer = match[1]
        return None if answer is None else answer.strip()


def _compiled(pattern: str, setting: str) -> re.Pattern[str]:
    example = "`#### (.+)` takes what follows the last `####`"
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise OutOfRange(
            f"`{setting}` is not a valid regular expression: {pattern!r} ({error}). For example, {example}."
        ) from error
    if regex.groups < 1:
        raise OutOfRange(f"`{setting}` has no group: {pattern!r}. Put round brackets around the answer: {example}.")
    return regex
