"""Every method and stage has a card that says what the class does, and a page and a picture made from it."""

import dataclasses
import doctest
import re
import sys
from pathlib import Path

import torch

import rlstab
from docs.hooks import measure, pages
from rlstab.core.metadata import Card, card
from rlstab.core.method_settings import settings_of
from rlstab.core.objective import TokenObjective
from rlstab.presets import PRESETS
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import Offer, Stage
from tests.examples import EXAMPLES, STAGE_EXAMPLES

METHODS, STAGES = pages.methods(), pages.stages()
SECTIONS = (
    *"Problem Equation Reads Writes Denominator Parameters State Deviations Pitfalls".split(),
    *"Interacts Limits Example Source".split(),
)
STAGE_SECTIONS = "Problem Equation Reads Returns Parameters State Deviations Interacts Limits Example Source".split()
#: What a method may read without naming it in `needs`.
METHOD_BASICS = {"live logprobs", *"old_logprobs logprobs advantages sequence position sequence_ids group_ids".split()}
#: What a stage may read without naming it in `needs`.
STAGE_BASICS = {field.name for field in (*dataclasses.fields(ResponseBatch), *dataclasses.fields(Offer))}


def assert_form(cls: type, known: Card) -> None:
    sections, may_lack = (STAGE_SECTIONS, "Interacts") if issubclass(cls, Stage) else (SECTIONS, "Interacts Limits")
    assert list(known.sections) == [title for title in sections if title not in may_lack or title in known.sections]
    assert known.summary
    assert "\n" not in known.summary
    assert all(text.strip() for text in known.sections.values())
    assert list(known.parameters) == [setting.name for setting in settings_of(cls)]
    for setting in settings_of(cls):
        default = "required" if setting.default is dataclasses.MISSING else f"default {setting.default!r}"
        assert re.match(re.escape(f"{setting}, {default}. ") + r"\w", known.parameters[setting.name])
    words = known.sections.get("Denominator", "kept:").partition(":")[0].split(" or ")
    assert set(words) <= {"kept", "all", "untouched"}
    assert all(item.startswith("From ") for item in known.items("Deviations"))
    assert re.search(r"\b(19|20)\d\d\b|^No paper|^Own", known.sections["Source"])


def heads_of(known: Card, section: str) -> set[str]:
    """The texts in double backticks at the start of each item, with a ``live`` before it."""
    starts = (re.match(r"((?:live )?)``([^`]+)``", item) for item in known.items(section))
    return {start[1] + start[2] for start in starts if start}


def assert_of_method(cls: type[TokenObjective], known: Card) -> None:
    """That a class does what it declares is the law `declared`."""
    methods = EXAMPLES[cls.name]
    needs = {name for method in methods for name in (*method.needs, *(f"live {name}" for name in method.live_needs))}
    heads = {title: heads_of(known, title) for title in ("Reads", "Writes", "State")}
    assert needs <= heads["Reads"] <= needs | METHOD_BASICS
    assert heads["Writes"] == pages.written(cls)
    assert heads["State"] == {key for method in methods for key in method.init_state()}


def assert_of_stage(cls: type[Stage], known: Card) -> None:
    read = set(re.findall(r"``(\w+)``", known.sections["Reads"]))
    named, keys = (
        {name for item in known.items(title) for name in re.findall(r"``(\w+)``", item.partition(":")[0])}
        for title in ("Reads", "State")
    )
    needed = set().union(*(stage.needs for stage in STAGE_EXAMPLES[cls.name]))
    assert needed <= read
    assert named <= STAGE_BASICS | needed
    assert keys == {key for stage in STAGE_EXAMPLES[cls.name] for key in stage.init_state()}


def test_every_card_says_what_the_class_does() -> None:
    assert len(METHODS) >= 46
    assert len(STAGES) >= 21
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert [cls.name for cls in METHODS if f"`{cls.name}`" not in readme] == []
    assert {f"puts {len(METHODS)} of", f"{len(PRESETS)} recipes"} <= {*re.findall(r"puts \d+ of|\d+ recipes", readme)}
    for cls in (*METHODS, *STAGES):
        assert_form(cls, card(cls))
        (assert_of_stage if issubclass(cls, Stage) else assert_of_method)(cls, card(cls))  # type: ignore[arg-type]  # each fits its kind
    assert all(getattr(rlstab, cls.__name__) is cls for cls in METHODS)


def test_every_example_on_a_card_runs() -> None:
    for cls in (*METHODS, *STAGES):
        module = sys.modules[cls.__module__]
        globs = None if issubclass(cls, Stage) else {}  # that of a method can be pasted anywhere
        tests = doctest.DocTestFinder(recurse=False).find(cls, cls.__name__, module, globs=globs)
        assert sum(len(test.examples) for test in tests) > 1, cls
        printed: list[str] = []
        assert doctest.DocTestRunner().run(tests[0], out=printed.append).failed == 0, "".join(printed)


def test_every_method_and_stage_has_a_page_and_every_method_a_picture() -> None:
    texts, drawings = pages.all_pages()
    assert [drawing.method.name for drawing in drawings] == [cls.name for cls in METHODS]
    for folder, classes in (("methods", METHODS), ("stages", STAGES)):
        for cls in classes:
            assert f"`{cls.__name__}`" in texts[f"{folder}/{cls.name}.md"]
            assert f"[`{cls.name}`]({cls.name}.md)" in texts[f"{folder}/index.md"]
    for drawing in drawings:
        assert drawing.panels
        assert f"pictures/{drawing.method.name}-small.svg" in texts["methods/gallery.md"]
    assert frozenset().union(*pages.PLACES.values()) == frozenset(pages.WRITABLE)


def test_a_docstring_becomes_markdown() -> None:
    text = "Of ``s2t``, a_t and *x*, arXiv 1234.56789:\n- one\n\n    a = 1\n\n    b = 2\n\n>>> 1 + 1\n2"
    assert pages.prose(text, {"s2t": "s2t.md"}) == (
        "Of [`s2t`](s2t.md), a_t and \\*x\\*, [arXiv 1234.56789](https://arxiv.org/abs/1234.56789):\n\n- one\n\n"
        "```text\na = 1\n\nb = 2\n```\n\n```pycon\n>>> 1 + 1\n2\n```"
    )


def test_a_picture_measures_the_loss() -> None:
    ratios = measure.RATIOS
    clip = measure.over_ratios(rlstab.ClipHigher(low=0.2, high=0.28, dual_clip=3.0), "live")[measure.BASE]
    torch.testing.assert_close(clip[0], torch.where(ratios <= 1.28, ratios, 0.0))
    torch.testing.assert_close(clip[1], torch.where((ratios >= 0.8) & (ratios <= 3.0), -ratios, 0.0))
    kl = measure.over_ratios(rlstab.KLPenalty(coefficient=2.0, estimator="k3"), "reference")[measure.BASE]
    torch.testing.assert_close(kl[0], 2 * (1 / ratios - 1))
    mean = measure.divisors(measure.Decided.on_cloud(rlstab.SequenceMean()).part())
    batch = measure.cloud()
    lengths = batch.sequence.bincount()
    torch.testing.assert_close(mean, (len(batch) / len(lengths) / lengths[batch.sequence]).to(mean))
