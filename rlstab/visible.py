"""Makes foreign text visible, so that it can be read and cannot control a terminal or a page."""

import unicodedata

#: Marks for white space. The page or terminal also breaks the line at a newline.
MARKS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}

#: Characters of the longest line of an error.
LINE = 500


def visible(text: str, *, spaces: bool = True) -> str:
    """The text with a mark for every character that is invisible or could control a terminal or a page.

    Control characters of ASCII become their pictures (ESC is ``␛``); other controls, format characters (the
    bidirectional ones and the zero-width ones among them), line separators and lone surrogates become ``⟨U+202E⟩``.

    Args:
        text: any text.
        spaces: whether spaces and newlines get marks too, for text that is shown by token.
    """
    return "".join(_shown(character, spaces) for character in text)


def in_error(text: str) -> str:
    """An error text for a terminal: :func:`visible`, and with only the ends of lines longer than :data:`LINE`."""
    return "\n".join(map(_cut, visible(text, spaces=False).split("\n")))


def _cut(line: str) -> str:
    # an error begins with who and what, and ends with what to do
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
