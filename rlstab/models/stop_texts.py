"""Stop texts: texts other than the end token that end a response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlstab.errors import ConfigError

#: To find a stop text, this many more tokens are decoded than it has bytes.
SPARE = 4


def completes(tokenizer: Any, stops: Sequence[str], answers: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each answer ends with a stop text, or with a token that contains the end of one.

    A stop text may begin inside a token, or in the tokens that the answer was given, and it may contain special tokens.
    All but a few tokens have at least one byte; an exception is a space that a decoder strips at the start.

    Args:
        tokenizer: decodes the answers.
        stops: the stop texts, at least one.
        answers: the tokens of each answer so far; those before the last :func:`window` are not looked at.
    """
    texts = tokenizer.batch_decode([[*answer[-window(stops) :]] for answer in answers], skip_special_tokens=False)
    return [any(stop in text for stop in stops) for text in texts]


def window(stops: Sequence[str]) -> int:
    """The number of tokens at the end of an answer in which a stop text is looked for."""
    return max(len(stop.encode()) for stop in stops) + SPARE


def require_stop_texts(tokenizer: Any, vocabulary: int, stops: Sequence[str]) -> list[str]:
    """Refuse stop texts that the tokenizer cannot write; notes name those that only look like special tokens.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: the number of tokens that the model has embeddings for.
        stops: the stop texts.

    Raises:
        ConfigError: names the text.
    """
    notes = []
    for stop in stops:
        try:  # twice: a decoder may strip the blank before the first token
            ids = tokenizer(stop + stop, add_special_tokens=False)["input_ids"]
            written = tokenizer.decode(ids, skip_special_tokens=False)
        except Exception:  # text outside of the vocabulary
            ids, written = [], ""
        if stop not in written or max(ids) >= vocabulary:
            raise ConfigError(
                f"rollout.stop: the tokenizer of '{tokenizer.name_or_path}' cannot write {stop!r}, so it would end no "
                f"response. Write it as the model does, or leave it out."
            )
        if re.fullmatch(r"<\|[^|]*\|>|\[[A-Z/_]+\]|</?s>", stop) and len(tokenizer.tokenize(stop)) > 1:
            notes.append(
                f"rollout.stop: {stop!r} is not a token of the model, which has to spell it out to end a response"
            )
    return notes
