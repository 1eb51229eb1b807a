"""Every stage carries a card, what the card says is what the stage does, and the pages say what the cards say."""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from torch import Tensor

import rlstab
from rlstab.atlas import written
from rlstab.cli import main
from rlstab.core.metadata import About
from rlstab.core.settings import Range
from rlstab.explain import stage_cards
from rlstab.explain.card_sections import STAGE_SECTIONS, CardError, card
from rlstab.explain.exclusions import shipped as methods
from rlstab.explain.stage_cards import BEYOND, KINDS, kind_of, page, shipped
from rlstab.stages import STAGES
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Offer, RewardShaper, Stage
from rlstab.testing.stage_examples import STAGE_EXAMPLES
from tests.core.says import says
from tests.core.test_import import beyond

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs" / "stages"
#: What a stage may read without naming it in `needs`.
BASICS = {one.name for one in (*dataclasses.fields(ResponseBatch), *dataclasses.fields(Offer))}

every_stage = pytest.mark.parametrize("cls", [pytest.param(cls, id=cls.name) for cls in shipped()])


def test_names_of_stages_and_methods_differ() -> None:
    assert not set(STAGES.names()) & set(rlstab.available())


def test_every_stage_that_ships_is_registered_under_its_name() -> None:
    assert [cls.name for cls in shipped()] == [name for name in STAGES.names() if name == STAGES.get(name).name]
    files = {path.stem for path in (ROOT / "rlstab" / "stages").glob("*.py")}
    assert {cls.__module__.rpartition(".")[2] for cls in shipped()} <= files
    assert {kind_of(cls) for cls in shipped()} <= set(KINDS)


@every_stage
def test_every_stage_has_a_card(cls: type[Stage]) -> None:
    found = card(cls)
    assert tuple(found.sections) == STAGE_SECTIONS
    assert len(f'    """{found.summary}') <= 120


@every_stage
def test_every_stage_has_examples_and_a_test(cls: type[Stage]) -> None:
    assert cls.name in STAGE_EXAMPLES
    tests = [path.read_text() for path in (ROOT / "tests" / "stages").glob("test_*.py") if path.stem != "test_cards"]
    assert any(re.search(rf"\b{cls.__name__}\b", text) for text in tests), f"no test in tests/stages of {cls.__name__}"


@every_stage
def test_example_runs(cls: type[Stage]) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(cls, cls.__name__)
    assert sum(len(one.examples) for one in tests) > 1
    printed: list[str] = []
    result = doctest.DocTestRunner().run(tests[0], out=printed.append)
    assert result.failed == 0, "".join(printed)
    assert [name for name, text in card(cls).sections.items() if ">>> " in text] == ["Example"]


@every_stage
def test_what_it_needs_is_what_its_card_reads(cls: type[Stage]) -> None:
    found = card(cls)
    mentioned = set(re.findall(r"``(\w+)``", found.sections["Reads"]))
    needed = set().union(*(one.needs for one in STAGE_EXAMPLES[cls.name]))
    assert needed <= mentioned
    assert {name for name in found.named("Reads") if name in BEYOND} <= needed
    assert set(found.named("Reads")) <= BASICS | BEYOND | needed
    assert found.named("Reads") or found.sections["Reads"].startswith("nothing")


@every_stage
def test_its_state_is_what_its_card_says(cls: type[Stage]) -> None:
    found = card(cls)
    keys = {key for one in STAGE_EXAMPLES[cls.name] for key in one.init_state()}
    assert set(found.named("State")) == keys
    assert keys or found.sections["State"] == "none"


@every_stage
def test_deviations_and_source(cls: type[Stage]) -> None:
    found = card(cls)
    assert all(item.startswith("From ") for item in found.items("Deviations"))
    assert re.search(r"\b(19|20)\d\d\b|^No paper|^Own", found.sections["Source"]), found.sections["Source"]


@every_stage
def test_others_that_a_card_names_exist(cls: type[Stage]) -> None:
    """A name that looks like a stage and is none has been renamed, or was never there."""
    known = {*STAGES.names(), *rlstab.available(), *rlstab.presets.PRESETS}
    assert {*cls.excludes, *cls.about.expects} <= known


@every_stage
def test_in_words_is_a_sentence(cls: type[Stage]) -> None:
    for one in STAGE_EXAMPLES[cls.name]:
        words = one.in_words()
        assert words[0].isupper()
        assert "\n" not in words
        if cls.in_words is not Stage.in_words:
            assert words.endswith(".")


# -- a card that is wrong is refused, with a text that says what to do -----------------------------------------------


@dataclasses.dataclass(frozen=True)
class Foreign(RewardShaper):
    """Take ``share`` of the reward of a long answer.

    Problem:
        none

    Equation:
        R - share

    Reads:
        - ``rewards`` (S,), ``lengths`` (S,): all.

    Gives:
        - numbers.

    Parameters:
        - ``share`` (s): float in (0, 1], default 0.5. Own choice.

    State:
        none

    Deviations:
        none

    Interacts:
        - with ``grpo``: none.

    Limits:
        none

    Example:
        none

    Source:
        Own, 2026.
    """

    name = "foreign"
    excludes: ClassVar = {"s2t": "it counts, and so does this."}
    about = About(
        expects={"token_mean": "it was tried with it."},
        exceptions={"split": "it reproduces published code."},
    )

    share: Annotated[float, Range(gt=0, le=1)] = 0.5

    def shape(self, responses: ResponseBatch, stat: Any, state: Any) -> Tensor:
        return -self.share * responses.rewards


def other(old: str, new: str) -> type[Stage]:
    """The stage with another docstring."""
    assert old in (Foreign.__doc__ or "")
    docstring = (Foreign.__doc__ or "").replace(old, new)
    return type("Foreign", (Foreign,), {"__doc__": docstring, "__module__": Foreign.__module__})


ORDER = ", ".join(STAGE_SECTIONS)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("    Gives:\n        - numbers.\n\n", "",
         f"Foreign: the card lacks the section 'Gives'. Its sections are, in this order: {ORDER}."),
        ("    Gives:\n", "    Writes:\n",
         "Foreign: the card has a section 'Writes', which no card has. Known: ..."),
        ("    Limits:\n        none\n", "    Limits:\n",
         "Foreign: the section 'Limits' of the card is empty. Write 'none' if there is nothing."),
        ("of a long answer.\n", "of a long\n    answer.\n",
         "Foreign: the card does not begin with one line, and an empty one, on what it does."),
        ("default 0.5", "default 0.4",
         "Foreign: Parameters: 'share' is 'float in (0, 1], default 0.4' on the card, 'float in (0, 1], default 0.5.' "
         "in the code."),
    ],
)  # fmt: skip
def test_a_card_that_is_wrong(old: str, new: str, text: str) -> None:
    with says(CardError, text):
        card(other(old, new))


def test_the_card_of_a_method_keeps_its_own_sections() -> None:
    class Confused(rlstab.TokenMean):
        __doc__ = (rlstab.TokenMean.__doc__ or "").replace("    Writes:\n", "    Gives:\n")

    with says(
        CardError,
        "test_the_card_of_a_method_keeps_its_own_sections.<locals>.Confused: the card has a section 'Gives', ...",
    ):
        card(Confused)


# -- the pages --------------------------------------------------------------------------------------------------------


def test_cards_need_the_lower_floors() -> None:
    lower = ["core", "errors", "zoo", "presets", "explain", "stages"]
    assert beyond("rlstab/explain/stage_cards.py", *(f"rlstab.{one}" for one in lower)) == []


def test_the_pages_in_docs_are_fresh() -> None:
    found = written.stale(DOCS, written.stage_files())
    assert not found, "\n".join([*found, "run: rlstab cards"])


@every_stage
def test_example_on_the_page_prints_what_its_comments_say(cls: type[Stage], capsys: Any) -> None:
    text = (DOCS / f"{cls.name}.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(block, str(cls), "exec", dont_inherit=True), {})
    comments = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == comments
    assert comments


def test_a_page_in_full() -> None:
    text = page(card(Foreign), {"grpo": "grpo.md", "s2t": "../methods/s2t.md", "foreign": "foreign.md"})
    assert text.startswith(
        "<!-- Written by `rlstab cards` from the class; edit Foreign. -->\n\n# `foreign` · `Foreign`\n"
    )
    assert "| rewards | `from tests.stages.test_cards import Foreign` | `{name: foreign}` | none |" in text
    assert "| `share` | s | `float in (0, 1]` | `0.5` | Own choice. |" in text
    assert "- with [`grpo`](grpo.md): none." in text
    assert "- **Conflict:** [`s2t`](../methods/s2t.md): it counts, and so does this." in text
    assert "- **Published with:** `token_mean`: it was tried with it." in text
    assert "- *split*: it reproduces published code." in text


def test_the_page_imports_what_its_example_has_from_the_module() -> None:
    class Exemplary(Foreign):
        __doc__ = (Foreign.__doc__ or "").replace(
            "    Example:\n        none\n",
            "    Example:\n        One::\n\n        >>> import math\n        >>> one = Foreign()\n"
            "        >>> [len(ResponseBatch.empty(n)) for n in [()]], math.pi > 3\n        ([0], True)\n",
        )

    text = page(card(Exemplary), {})
    assert (
        "```python\nimport math\nfrom rlstab.stages.response_batch import ResponseBatch\n"
        "from tests.stages.test_cards import Foreign\n\none = Foreign()\n"
    ) in text


def test_the_index_has_every_stage_under_its_kind_in_the_order_of_a_rollout() -> None:
    text = stage_cards.pages("../methods")["index.md"]
    heads = [head for head, _ in KINDS.values()]
    places = [text.index(f"\n## {head}\n") for head in heads]
    assert places == sorted(places)
    for kind, (head, _) in KINDS.items():
        section = text.split(f"\n## {head}\n")[1].split("\n## ")[0]
        for cls in shipped():
            assert (f"| [`{cls.name}`]({cls.name}.md) |" in section) == issubclass(cls, kind)


def test_pages_are_written_beside_those_of_the_methods(tmp_path: Path, capsys: Any) -> None:
    assert main(["cards", "--out", str(tmp_path / "methods")]) == 0
    assert {path.stem for path in (tmp_path / "stages").glob("*.md")} == {"index", *(cls.name for cls in shipped())}
    assert {path.stem for path in (tmp_path / "methods").glob("*.md")} > {cls.name for cls in methods()}
    index = tmp_path / "stages" / "index.md"
    index.write_text(index.read_text().replace("# All stages", "# Stages"))
    (tmp_path / "stages" / "mine.md").write_text("# A page of somebody else\n")
    assert main(["cards", "--out", str(tmp_path / "methods"), "--check"]) == 2
    assert capsys.readouterr().err == (
        f"CardError: {tmp_path}/stages is stale.\n"
        f"  {index}:3: the page says '# Stages', the class '# All stages'.\n"
        f"Run: rlstab cards --out {tmp_path}/methods\n"
    )
    assert (tmp_path / "stages" / "mine.md").exists()


def test_pages_in_a_folder_of_their_own_link_to_those_of_the_methods(tmp_path: Path) -> None:
    out, stages = tmp_path / "methods", tmp_path / "more" / "of" / "them"
    stages.parent.mkdir(parents=True)
    assert main(["cards", "--out", str(out), "--stages", str(stages)]) == 0
    assert "](../../../methods/index.md)" in (stages / "index.md").read_text()
