"""Text of a docstring as the Markdown of GitHub: paragraphs, lists, formulas, code, tables."""

from __future__ import annotations

import ast
import doctest
import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

#: What Markdown would take for emphasis, a tag or an escape; in ``2 * 3``, ``a_t`` and ``a < b`` it takes nothing.
_MISREAD = re.compile(r"\\|\*(?! )|(?<! )\*|(?<![^\W_])_|_(?![^\W_])|<(?=[\w/!?])")


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def body(text: str, beside: Collection[str]) -> list[str]:
    """Paragraphs unwrapped, items as one list, indented lines as blocks, doctests as the code that they are."""
    pieces: list[str] = []
    for kind, group in itertools.groupby(_blocks(text), key=lambda block: block[0]):
        blocks = ["\n".join(lines) for _, lines in group]
        if kind == "item":
            pieces.append("\n".join(f"- {inline(block.removeprefix('- '), beside)}" for block in blocks))
        elif kind == "code":
            pieces += [f"```text\n{inspect.cleandoc(block)}\n```" for block in blocks]
        elif kind == "doctest":
            pieces.append(f"```python\n{''.join(map(_script, blocks))}```")
        else:
            pieces += [inline(block, beside) for block in blocks]
    return pieces


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    kind, lines = "", [""]
    for line in [*text.splitlines(), ""]:
        if not line and kind == "code":
            lines.append(line)  # a formula may have empty lines between its parts
            continue
        if kind == "doctest" and line:
            new = kind
        elif not line:
            new = ""
        elif line.startswith(">>> "):
            new = "doctest"
        elif line.startswith("    ") and kind in ("", "code"):
            new = "code"
        elif line.startswith("- "):
            new = "item"
        else:
            new = kind if kind in ("item", "text") else "text"
        if new != kind or line.startswith("- "):
            if kind:
                yield kind, lines
            kind, lines = new, []
        lines.append(line)
    if kind:
        yield kind, lines


def _script(session: str) -> str:
    """A doctest as plain Python, with what it prints as comments."""
    pieces = []
    for example in doctest.DocTestParser().get_examples(session):
        source = example.source
        last = ast.parse(source).body[-1]
        if example.want and isinstance(last, ast.Expr) and not _prints(last):
            source = (
                f"print({source.strip()})\n"
                if not isinstance(last.value, ast.Tuple)
                else f"print(({source.strip()}))\n"
            )
        pieces += [source, *(f"# {line}\n" for line in example.want.splitlines())]
    return re.sub(r"\A(?:(?:import|from) .*\n)+", r"\g<0>\n", "".join(pieces))


def _prints(statement: ast.Expr) -> bool:
    call = statement.value
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"


def inline(text: str, beside: Collection[str] = ()) -> str:
    """Text on one line: code spans, links to arXiv and to other pages, nothing that Markdown would misread.

    Args:
        text: of a docstring.
        beside: names that become links, to pages in the same folder, or to those that a mapping gives.
    """
    words = " ".join(text.split())
    pieces = []
    for place, piece in enumerate(re.split("``?", words)):
        if place % 2:
            page = beside.get(piece) if isinstance(beside, Mapping) else f"{piece}.md"
            pieces.append(f"[`{piece}`]({page})" if piece in beside else f"`{piece}`")
        else:
            plain = re.sub(_MISREAD, r"\\\g<0>", piece)
            pieces.append(re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", plain))
    return "".join(pieces)
