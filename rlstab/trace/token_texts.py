"""The text that each token adds to a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Tokens before a token that decide how it is written: a leading space, the first bytes of a character.
CONTEXT = 8


def token_texts(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """One text per token; joined they are the text of the whole, as far as the tokenizer decodes piece by piece.

    A token that holds only the first bytes of a character has the empty text; the one that completes it has the
    character. Bytes that never become a character stand with the last token as U+FFFD.

    Args:
        decode: of a tokenizer, special tokens included.
        ids: of the tokens.
    """
    texts: list[str] = []
    start = read = 0
    for place in range(len(ids)):
        before = decode(list(ids[start:read]))
        now = decode(list(ids[start : place + 1]))
        if now.endswith("\ufffd") and place < len(ids) - 1 and place - read < 3:
            texts.append("")
            continue
        texts.append(now[len(before) :])
        read = place + 1
        start = max(start, read - CONTEXT)
    return texts
