"""The docstring of a class and its first line, also where Python runs without docstrings."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap


def docstring(cls: type) -> str:
    """The docstring of a class itself, dedented; empty where it has none.

    ``python -OO`` drops docstrings, and a dataclass then puts its signature there. It is read from the source instead,
    and is empty where the source is not installed either.
    """
    if sys.flags.optimize < 2:
        return inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return ""
    assert isinstance(found, ast.ClassDef)
    return ast.get_docstring(found) or ""


def summary(cls: type) -> str:
    """The first line of the docstring of a class, without its markup."""
    return docstring(cls).partition("\n")[0].replace("``", "")
