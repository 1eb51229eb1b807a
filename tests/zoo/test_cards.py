"""Every method carries a card, what the card says is what the method does, and the pages say what the cards say."""

from __future__ import annotations

import doctest
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import torch

import rlstab
from rlstab.atlas import written
from rlstab.cli import main
from rlstab.core.compose import walk
from rlstab.core.metadata import About, Interaction, NoOpAt
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import Range, settings_of
from rlstab.core.terms import Penalty, Terms
from rlstab.explain import card_sections, cards
from rlstab.explain.card_page import markdown
from rlstab.explain.card_sections import CardError, card
from rlstab.explain.exclusions import shipped
from tests.core.says import says
from tests.core.test_import import beyond
from tests.zoo.watch import differences, examples

ROOT = Path(__file__).parent.parent.parent
NAMES = [cls.name for cls in shipped()]

every_method = pytest.mark.parametrize("cls", [pytest.param(cls, id=cls.name) for cls in shipped()])


def test_nothing_is_registered_without_a_name_here() -> None:
    assert len(NAMES) >= 11


@every_method
def test_sections_and_parameters_are_in_order(cls: type[TokenObjective]) -> None:
    found = card(cls)
    assert tuple(found.sections) == card_sections.SECTIONS
    assert found.heads("Parameters") == [one.name for one in found.parameters]


@every_method
def test_example_runs(cls: type[TokenObjective]) -> None:
    module = sys.modules[cls.__module__]
    tests = [
        one for one in doctest.DocTestFinder(recurse=False).find(cls, cls.__name__, module, globs={}) if one.examples
    ]
    assert len(tests) == 1
    printed: list[str] = []
    result = doctest.DocTestRunner().run(tests[0], out=printed.append)
    assert result.failed == 0, "".join(printed)
    sections = card(cls).sections
    assert [name for name, text in sections.items() if ">>> " in text] == ["Example"]


@every_method
def test_example_on_the_page_prints_what_its_comments_say(cls: type[TokenObjective], capsys) -> None:
    page = (ROOT / "docs" / "methods" / f"{cls.name}.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(block, str(cls), "exec", dont_inherit=True), {})
    comments = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
    assert capsys.readouterr().out.splitlines() == comments
    assert comments


@every_method
def test_what_is_declared_is_what_is_done(cls: type[TokenObjective]) -> None:
    found = differences(cls)
    assert not found, "\n".join(found)


@every_method
def test_sections_without_items_say_so(cls: type[TokenObjective]) -> None:
    found = card(cls)
    assert found.heads("Reads") or found.sections["Reads"].startswith("nothing")
    assert found.heads("State") or found.sections["State"] == "none"


@every_method
def test_denominator(cls: type[TokenObjective]) -> None:
    writes = frozenset().union(*(one.writes for one in examples(cls)))
    assert ("kept" in card(cls).denominators) == ("keep" in writes)


@every_method
def test_deviations_and_source(cls: type[TokenObjective]) -> None:
    found = card(cls)
    assert all(item.startswith("From ") for item in found.items("Deviations"))
    assert re.search(r"\b(19|20)\d\d\b", found.sections["Source"])
    assert re.search(r"arXiv \d{4}\.\d{5}", found.sections["Source"])


# -- a card that is wrong is refused, with a text that says what to do -----------------------------------------------


def other(cls: type[TokenObjective], old: str, new: str) -> type[TokenObjective]:
    """The method with another docstring."""
    assert old in (cls.__doc__ or "")
    return type(cls.__name__, (cls,), {"__doc__": (cls.__doc__ or "").replace(old, new), "__module__": cls.__module__})


SHARE = "- ``share`` (rho): float in (0, 1], default 0.2. The paper, eq. 6; 0.1 to 0.5 are reported similar.\n"
ORDER = ", ".join(card_sections.SECTIONS)


@pytest.mark.parametrize(
    ("cls", "old", "new", "text"),
    [
        (rlstab.S2TMask, "    State:\n        none\n\n", "",
         f"S2TMask: the card lacks the section 'State'. Its sections are, in this order: {ORDER}."),
        (rlstab.S2TMask, "    Surprises:\n", "    Surprise:\n",
         "S2TMask: the card has a section 'Surprise', which no card has. Did you mean 'Surprises'?"),
        (rlstab.S2TMask, "    Surprises:\n", "    Notes:\n",
         "S2TMask: the card has a section 'Notes', which no card has. Known: ..."),
        (rlstab.S2TMask, "    Surprises:\n", "    State:\n",
         "S2TMask: the card has two sections 'State'. Merge them."),
        (rlstab.S2TMask, "    State:\n        none\n", "    State:\n",
         "S2TMask: the section 'State' of the card is empty. Write 'none' if there is nothing."),
        (rlstab.S2TMask, "    State:\n        none\n", "    State:\n    none\n",
         "S2TMask: the line 'none' under 'State' is not indented. Indent it by 4."),
        (rlstab.TokenMean, "    Parameters:\n        none\n\n    State:\n        none\n\n    Deviations:\n",
         "    State:\n        none\n\n    Deviations:\n        none\n\n    Parameters:\n",
         f"TokenMean: the section 'State' is where 'Parameters' belongs. Order: {ORDER}."),
        (rlstab.S2TMask, "was otherwise sure.\n", "was otherwise\n    sure.\n",
         "S2TMask: the card does not begin with one line, and an empty one, on what it does to tokens."),
        (rlstab.S2TMask, "kept: dropped", "Dropped",
         "S2TMask: Denominator begins with 'Dropped'. Begin it with 'kept:', 'all:' or 'untouched:', or with two of "
         "them and 'or' between."),
        (rlstab.TopEntropyMask, SHARE, SHARE + "        - ``shares``: float, default 0.1. The paper.\n",
         "TopEntropyMask: Parameters: 'shares' is not a field of the class. Did you mean 'share'?"),
        (rlstab.TokenMean, "Parameters:\n        none", "Parameters:\n        - ``share``: float, default 0.1. Ours.",
         "TokenMean: Parameters: 'share' is not a field of the class. The class has no field."),
        (rlstab.TokenMean, "Parameters:\n        none", "Parameters:\n        The mean has none.",
         "TokenMean: Parameters: the class has no field, and the section says 'The mean has none.'. Write 'none'."),
        (rlstab.TopEntropyMask, SHARE, "",
         "TopEntropyMask: Parameters: the field 'share' is not there. Add: - ``share``: float in (0, 1], default 0.2. "
         "and then where the default comes from."),
        (rlstab.TopEntropyMask, SHARE, f"{SHARE}        {SHARE}",
         "TopEntropyMask: Parameters: the card lists share, share, denominator, the class share, denominator."),
        (rlstab.TopEntropyMask, "``share`` (rho): float in", "share (rho): float in",
         "TopEntropyMask: Parameters: 'share (rho): float in (0, 1], default 0.2. The ..."),
        (rlstab.TopEntropyMask, SHARE, SHARE.replace("0.2. ", "0.3. "),
         "TopEntropyMask: Parameters: 'share' is 'float in (0, 1], default 0.3' on the card, 'float in (0, 1], "
         "default 0.2.' in the code."),
        (rlstab.TopEntropyMask, SHARE, "- ``share`` (rho): float in (0, 1], default 0.2.\n",
         "TopEntropyMask: Parameters: 'share' has a default without a source. After 'float in (0, 1], default 0.2.' "
         "say where it comes from: the paper and its section, code, or your own choice."),
    ],
)  # fmt: skip
def test_a_card_that_is_wrong(cls: type[TokenObjective], old: str, new: str, text: str) -> None:
    with says(CardError, text):
        card(other(cls, old, new))


def test_a_class_without_a_docstring_has_no_card() -> None:
    @dataclass(frozen=True)
    class Bare(rlstab.TokenMean):
        pass

    with says(CardError, "test_a_class_without_a_docstring_has_no_card.<locals>.Bare: the card lacks the section ..."):
        card(Bare)


# -- what is declared and not done, or done and not declared, is found ------------------------------------------------


class NeedsMore(rlstab.S2TMask):
    needs = {"logprobs", "entropies", "max_logprobs"}


class NeedsLess(rlstab.S2TMask):
    needs = {"logprobs"}


class DifferentiatesLess(rlstab.EntropyBonus):
    live_needs = frozenset()


class DifferentiatesMore(rlstab.KLPenalty):
    live_needs = {"entropies"}


class WritesMore(rlstab.S2TMask):
    writes = {"keep", "weight"}


class WritesLess(rlstab.S2TMask):
    writes = frozenset()


class FillsMore(rlstab.TokenMean):
    def terms(self, batch, stat, state):
        return Terms(weight=torch.ones_like(batch.advantages))


class PenaltyReadsLess(rlstab.EntropyBonus):
    def terms(self, batch, stat, state):
        return Terms(penalties={"": Penalty(-0.1, lambda policy, anchor: policy.signal("entropies"))})


class Remembers(rlstab.TokenMean):
    def init_state(self):
        return {"steps": 0}


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (NeedsMore, ["`needs` names 'max_logprobs', and nothing comes of it."]),
        (NeedsLess, ["reads 'entropies', which `needs` does not name."]),
        (DifferentiatesLess, ["reads the live 'entropies', which `live_needs` does not name."]),
        (DifferentiatesMore, ["`live_needs` names 'entropies', and nothing comes of it."]),
        (WritesMore, ["`writes` names 'weight', and nothing comes of it."]),
        (WritesLess, ["fills 'keep', which `writes` does not name."]),
        (
            FillsMore,
            [
                "fills 'weight', which `writes` does not name.",
                "`writes` names 'aggregate', and nothing comes of it.",
                "FillsMore has 'advantages', which the card's Reads does not name.",
                "FillsMore has 'weight', which the card's Writes does not name.",
                "the card's Writes names 'aggregate', and nothing comes of it.",
            ],
        ),
        (PenaltyReadsLess, ["the penalty '' reads the live ['entropies'], its `reads` are []."]),
        (Remembers, ["Remembers has 'steps', which the card's State does not name."]),
        (
            other(rlstab.S2TMask, "- ``advantages`` (n,)", "- ``positions`` (n,)"),
            [
                "S2TMask has 'advantages', which the card's Reads does not name.",
                "the card's Reads names 'positions', and nothing comes of it.",
            ],
        ),
        (
            other(rlstab.S2TMask, "- ``keep``: False", "- ``weight``: 0"),
            [
                "S2TMask has 'keep', which the card's Writes does not name.",
                "the card's Writes names 'weight', and nothing comes of it.",
            ],
        ),
        (
            other(rlstab.S2TMask, "- ``keep``: False", "- ``keep``: True elsewhere.\n        - ``keep``: False"),
            ["the card's Writes names something twice: keep, keep."],
        ),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
def test_declared_is_not_done(broken: type[TokenObjective], expected: list[str]) -> None:
    broken.__doc__ = broken.__doc__ or broken.__mro__[1].__doc__
    found = [re.sub(r"^\w+\([^)]*\): ", "", one) for one in differences(broken)]
    assert list(dict.fromkeys(found)) == expected


# -- the pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["card_sections", "card_page", "cards", "markdown_text", "interactions"])
def test_cards_need_the_lower_floors(name: str) -> None:
    path, lower = f"rlstab/explain/{name}.py", ["core", "errors", "stages", "zoo", "presets", "explain"]
    assert beyond(path, *(f"rlstab.{one}" for one in lower)) == []


def test_the_pages_in_docs_are_fresh() -> None:
    found = written.stale(ROOT / "docs" / "methods")
    assert not found, "\n".join([*found, "run: rlstab cards"])


def test_the_pages_tell_where_the_class_is() -> None:
    for cls in shipped():
        assert getattr(rlstab, cls.__name__) is cls
        assert f"`from rlstab import {cls.__name__}`" in markdown(card(cls))


def test_stale_pages_are_named_by_line(tmp_path: Path, capsys) -> None:
    out = str(tmp_path / "pages")
    assert main(["cards", "--out", out]) == 0
    assert main(["cards", "--out", out, "--check"]) == 0
    assert capsys.readouterr() == ("", "")

    page = tmp_path / "pages" / "s2t.md"
    text = page.read_text()
    number = text.splitlines().index("## Writes") + 1
    page.write_text(text.replace("## Writes", "## Changes"))
    (tmp_path / "pages" / "kl.md").unlink()
    (tmp_path / "pages" / "gone.md").write_text(text)
    (tmp_path / "pages" / "mine.md").write_text("# A page of somebody else\n")
    assert main(["cards", "--out", out, "--check"]) == 2
    assert capsys.readouterr() == (
        "",
        f"CardError: {out} is stale.\n"
        f"  {out}/kl.md: is missing.\n"
        f"  {out}/s2t.md:{number}: the page says '## Changes', the class '## Writes'.\n"
        f"  {out}/gone.md: no method has this name any more.\n"
        f"Run: rlstab cards --out {out}\n",
    )
    assert main(["cards", "--out", out]) == 0
    assert written.stale(out) == []
    assert (tmp_path / "pages" / "mine.md").exists()
    assert not (tmp_path / "pages" / "gone.md").exists()


def test_a_difference_is_shown_where_it_is(tmp_path: Path) -> None:
    written.write(tmp_path)
    page = tmp_path / "s2t.md"
    page.write_text(page.read_text().replace("S2T removes them", "S2T moves them"))
    (line,) = written.stale(tmp_path)
    assert line == (
        f"{page}:17: the page says '...t are digits and symbols. S2T moves them from the policy term.', the class "
        f"'...t are digits and symbols. S2T removes them from the policy term.'."
    )


def test_a_page_that_lost_its_end_is_stale(tmp_path: Path) -> None:
    written.write(tmp_path)
    page = tmp_path / "index.md"
    page.write_text(page.read_text().rstrip("\n"))
    assert len(written.stale(tmp_path)) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["cards", "--out", f"{tmp_path}/file"]) == 2
    assert capsys.readouterr().err == (
        f"CardError: {tmp_path}/file: cannot be written: file exists. Give another folder.\n"
    )


@every_method
def test_run_settings_stand_where_something_is_measured(cls: type[TokenObjective]) -> None:
    measures = "measure" in vars(cls)
    page = markdown(card(cls))
    assert ("`refresh: rollout | step`" in page) == ("`scope: step | microbatch`" in page) == measures


def test_the_comparison_has_every_method_and_every_value_of_a_preset() -> None:
    text = cards.comparison()
    for name in NAMES:
        assert f"| [`{name}`]({name}.md) |" in text
    rows = dict(
        line.removeprefix("| ").split(" | ", 1) for line in text.split("## Presets")[1].splitlines() if "|" in line
    )
    for name, one in rlstab.presets.PRESETS.items():
        row = rows[f"`{name}`"]
        assert f" | `{one.estimator}` | " in row
        for leaf in walk(one.objective):
            assert f"[`{leaf.name}`]({leaf.name}.md)" in row
            for setting in settings_of(type(leaf.method)):
                assert re.search(rf"`{setting.name}` {re.escape(str(getattr(leaf.method, setting.name)))}[,<\s]", row)
    assert "<br>[`stare`](stare.md) within `s2t`: `target_entropy` 0.3, " in rows["`recommended`"]
    assert rows["`dapo`"].endswith("`dual_clip` None<br>[`token_mean`](token_mean.md) |")


class Foreign(TokenObjective):
    """Keep a * b and <b> and __this__, of ``a | b``.

    Problem:
        none

    Equation:
        Two:

            a = 1

            b = 2

        With a.

    Reads:
        nothing

    Writes:
        - ``bounds``: its own.
        - ``keep``: some.

    Denominator:
        kept: some

    Parameters:
        - ``share`` (p_t): float in (0, 1], required. Ours, or ``a | b``.

    State:
        none

    Deviations:
        none

    Surprises:
        none

    Example:
        >>> 1 + 1
        2

    Source:
        Ours.
    """

    name = "foreign"
    about = About(
        no_op_at=(NoOpAt({"share": 1.0}, "``x * y`` is 1."), NoOpAt({}, "Always."), NoOpAt(None, "On a_b.")),
        interacts=(Interaction("good", ("s2t", "stare"), "{own} goes with {other}."),),
        exceptions={"replication": "it counts."},
    )
    writes = {"bounds"}

    share: Annotated[float, Range(gt=0, le=1)]

    def terms(self, batch, stat, state):
        return Terms()


def test_a_page_of_another_package() -> None:
    page = markdown(card(Foreign))
    assert f"| `from {__name__} import Foreign` | `{{name: foreign, share: ...}}` | none |" in page
    assert "**Keep a * b and \\<b> and \\_\\_this\\_\\_, of `a | b`.**" in page
    assert "Two:\n\n```text\na = 1\n\nb = 2\n```\n\nWith a.\n" in page
    assert "| `share` | p_t | `float in (0, 1]` | required | Ours, or `a \\| b`. |" in page
    assert re.search(r"- \*\*Conflict:\*\* `clip_higher`.* and `lp_reg` can define the bounds as well; only one", page)
    assert "- **Good together:** `foreign` goes with `s2t` and `stare`.\n" in page
    assert "- **Good to know:** `kl` acts on every token, also on those that `foreign` drops: " in page
    assert "## Limits\n\n- `Foreign(share=1.0)`: `x * y` is 1.\n- Always.\n- On a_b.\n\nLaws" in page
    assert "- *replication*: it counts.\n" in page
    assert "```python\nprint(1 + 1)\n# 2\n```" in page
    assert "[`s2t`](s2t.md)" in markdown(card(Foreign), NAMES)
