"""The text that each token adds to a response."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rlstab.dump_files import folder_of
from rlstab.errors import ReportError
from rlstab.extras import missing, require
from rlstab.files import is_file
from rlstab.safe_read import read_text

Decode = Callable[[list[int]], str]
#: Number of tokens before a token that decide how it is written: a leading space, the first bytes of a character.
CONTEXT = 8
#: Characters of the text of a token; the rest is cut.
LONGEST = 1000


def decoder_of(path: str | Path, tokenizer: str | Path | None) -> Decode | None:
    """The decoder of token ids: by a given tokenizer, or that of the dump; None if the dump has none.

    Args:
        path: the path of the dump.
        tokenizer: folder of a tokenizer, or its ``tokenizer.json``.

    Raises:
        ReportError: there is no tokenizer that can be read.
    """
    file = folder_of(path) / "tokenizer.json" if tokenizer is None else Path(tokenizer)
    if tokenizer is None and (not is_file(file) or missing("train", "tokenizers")):
        return None
    require("train", "the text of tokens", "tokenizers")
    from tokenizers import Tokenizer  # comes with transformers

    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        decoder = Tokenizer.from_str(read_text(file))
    except Exception as error:  # the library raises a bare Exception
        raise ReportError(f"{file}: not a tokenizer: {error}. Give a folder with a tokenizer.json.") from error
    return lambda ids: str(decoder.decode(ids, skip_special_tokens=False))


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """One text per token; joined, they are the whole text, as far as the tokenizer decodes piece by piece.

    A token with only the first bytes of a character has an empty text; the token that completes the character has it.
    Bytes that never become a character appear as U+FFFD in the text of the last token. Texts of more than
    :data:`LONGEST` characters are cut.

    Args:
        decode: the function of a tokenizer, special tokens included.
        ids: the ids of the tokens.
    """
    texts: list[str] = []
    start = read = 0
    for index in range(len(ids)):
        before, text = decode(list(ids[start:read])), decode(list(ids[start : index + 1]))
        if text.endswith("\ufffd") and index < len(ids) - 1 and index - read < 3:
            texts.append("")
            continue
        text = text[len(before) :]
        texts.append(text if len(text) <= LONGEST else f"{text[:LONGEST]}…")
        read = index + 1
        start = max(start, read - CONTEXT)
    return texts
