import subprocess
import sys

from rlstab import S2TMask
from rlstab.core.metadata import docstring, summary

SAID = "Drop rewarded tokens that were sampled with tiny probability where the policy was otherwise sure."


class Plain:
    """Keep ``all`` tokens.

    Nothing else.
    """


class Silent(Plain):
    pass


def test_a_docstring_is_that_of_the_class_itself():
    assert docstring(Plain) == "Keep ``all`` tokens.\n\nNothing else."
    assert summary(Plain) == "Keep all tokens."
    assert summary(S2TMask) == SAID
    assert docstring(Silent) == summary(Silent) == ""


def test_without_docstrings_the_source_has_it_and_without_a_source_nothing():
    program = (
        "import inspect\n"
        "from rlstab import S2TMask\n"
        "from rlstab.core.metadata import docstring, summary\n"
        "from rlstab.explain.card import card\n"
        "def tell():\n"
        "    print(S2TMask.__doc__ is None, summary(S2TMask), 'Source:' in docstring(S2TMask))\n"
        "    print(len(card(S2TMask).sections))\n"
        "def gone(cls): raise OSError\n"
        "tell()\n"
        "inspect.getsource = gone\n"
        "tell()\n"
    )
    ran = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == (f"True {SAID} True\n11\nTrue  False\n0\n")
