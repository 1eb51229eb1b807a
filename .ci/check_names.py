"""`make lint`: local names are nouns of the field, and not words that stand in for one.

A reader of `told`, `there` or `own` has to find the line that assigns it; a reader of `message`, `mask` or `settings`
does not. Names that are assigned in rlstab/, examples/ and .ci/ are checked: targets of assignments, loops,
comprehensions, `with`, `except` and `:=`. Fields of classes and parameters are not, since other code may name them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: What a name should say in place of these words.
NOUNS = {
    "what it is, such as message, reason, record, options, batch, step, path": (
        "told said says given known kept found asked wanted seen made meant held lost called done did has have was "
        "here there now then once again still instead"
    ),
    "whose it is, such as local, host, sampler, shipped, first, second": "own mine theirs ours others both",
    "what is counted or listed, such as names, rows, steps, rest": (
        "some each every everything anything everywhere elsewhere several few many more most whole one none nothing"
    ),
    "the answer itself, such as reason, owner, description, keyword, condition": "why who whose what how when",
    "the field's term for it, such as index, position, path, mask, limit, difference": (
        "place by at of off over near beyond inside apart together alone back twice same otherwise"
    ),
}
ADVICE = {word: advice for advice, words in NOUNS.items() for word in words.split()}

#: Folders whose files are checked.
FOLDERS = ("rlstab", "examples", ".ci")


def assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each assignment outside the body of a class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(tree, ast.ClassDef) and isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name
        yield from assigned(node)


def findings(path: Path, text: str) -> list[str]:
    """A line for each name in a file that is one of the words."""
    names = sorted({*assigned(ast.parse(text))})
    return [f"{path}:{line}: '{name}': write {ADVICE[name]}" for line, name in names if name in ADVICE]


def main() -> None:
    """Print what was found; exit with 1 if anything was."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    lines = [line for path in paths for line in findings(path.relative_to(ROOT), path.read_text(encoding="utf-8"))]
    print("\n".join(lines) or f"names: {len(paths)} files")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
