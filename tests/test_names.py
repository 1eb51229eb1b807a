"""The lint of local names finds what is assigned, and only that."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]

TEXT = """
known = 1
class Batch:
    given: int = 0
    def rows(self, what):
        there, (mask, *some) = what
        for index, own in enumerate(there):
            with open(own) as mine:
                self.kept = mask[what] = f"{(told := mine)}"
        try:
            return [each for each in some]
        except KeyError as why:
            return told(why, here=known)
"""


def test_each_assignment_of_a_glue_word_is_found_with_what_to_write():
    spec = importlib.util.spec_from_file_location("check_names", ROOT / ".ci/check_names.py")
    assert spec is not None
    assert spec.loader is not None
    lint = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lint)
    lines = lint.findings(Path("batch.py"), TEXT)
    assert [line.split("'")[1] for line in lines] == "known some there own mine told each why".split()
    assert lines[0] == "batch.py:2: 'known': write " + lint.ADVICE["known"]
