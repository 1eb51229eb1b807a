"""Text that somebody else wrote, shown so that it can be read and cannot act."""

from __future__ import annotations

import unicodedata

#: How white space is shown. A newline also breaks the line, which the reader's page or terminal does itself.
MARKS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}

#: Characters of the longest line of an error.
LINE = 500


def visible(text: str, *, spaces: bool = True) -> str:
    """The text with everything replaced that has no shape of its own, or that would steer a terminal or a page.

    Control characters of ASCII become their pictures (ESC is ``␛``); other controls, format characters (the
    bidirectional ones and the zero-width ones among them), line separators and lone surrogates become ``⟨U+202E⟩``.

    Args:
        text: anything.
        spaces: False leaves spaces and newlines as they are, for text that is read and not looked at by token.
    """
    return "".join(_shown(character, spaces) for character in text)


def in_error(text: str) -> str:
    """An error text for a terminal: :func:`visible`, and of each line longer than :data:`LINE` the ends alone."""
    return "\n".join(map(_cut, visible(text, spaces=False).split("\n")))


def _cut(line: str) -> str:
    # an error names who and what first, and ends with what to do
    end = LINE // 3
    return line if len(line) <= LINE else f"{line[: LINE - end - 5]} ... {line[-end:]}"


def _shown(character: str, spaces: bool) -> str:
    if character in MARKS:
        return character if not spaces and character in " \n" else MARKS[character]
    number = ord(character)
    if number < 0x20:
        return chr(0x2400 + number)
    if number == 0x7F:
        return "␡"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{number:04X}⟩"
    return character
