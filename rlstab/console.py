"""A terminal that text from files and models cannot control."""

import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlstab.visible import visible


class Terminal(Console):
    """A console that makes control characters visible in all text: names, paths, errors, completions.

    Colours and progress bars, which rich itself writes, are not affected.
    """

    def on_broken_pipe(self) -> None:
        """End the command as for any other closed pipe."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text, spaces=False), segment.style)


def say(console: Console, text: str, style: str = "", *, copied: bool = False) -> None:
    """Print a text that is not markup: between words a terminal breaks its lines, and a file none.

    Args:
        console: the one to print to.
        text: the text.
        style: a style of rich.
        copied: whether it holds a command or a path to be copied, which a line break would cut.
    """
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=copied or not console.is_terminal)


def command(*arguments: str) -> str:
    """A shell command that starts this program, in the way it was started, with other arguments."""
    path = Path(sys.argv[0])
    if path.name == "__main__.py" and path.parent.name == "rlstab":
        program = ["python", "-m", "rlstab"]
    elif path.name == "rlstab" and shutil.which("rlstab") is None:
        program = [sys.argv[0]]
    else:
        program = ["rlstab"]
    return shlex.join([*program, *arguments])


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in short: ``0-4, 7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def capital(text: str) -> str:
    """A text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def counted(count: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {what}{'s' * (count != 1)}"
