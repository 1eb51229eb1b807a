"""The atlas: every method is in it, it shows what the method does, and its files are small and the same again."""

from __future__ import annotations

import functools
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from rlstab import (
    ASPO,
    CISPO,
    DPPO,
    GSPO,
    MASPO,
    SAPO,
    STARE,
    VESPO,
    ClipHigher,
    ConstantLength,
    EntropyBonus,
    Gate,
    KLPenalty,
    S2TMask,
    SequenceMean,
    Terms,
    TokenObjective,
    compose,
    make_plan,
)
from rlstab.atlas import probes, views, written
from rlstab.atlas.cloud import LIMIT, cloud, live
from rlstab.atlas.drawing import NOTE, large, small
from rlstab.atlas.effect import Decided, cloud_of, coefficients, divisors, factors
from rlstab.atlas.panel import PUNISHED, REWARDED, Picture
from rlstab.atlas.probes import BASE, MATTERS, RATIOS, Case, measured, what_matters
from rlstab.atlas.svg import Drawing, same_drawing, simplified
from rlstab.core.metadata import SOURCES
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.terms import WRITABLE, Penalty
from rlstab.explain.card_sections import CardError
from rlstab.explain.exclusions import shipped
from tests.core.says import says
from tests.core.test_pull import Capped

PICTURES = Path(__file__).parent.parent / "docs" / "methods" / "pictures"
METHODS = {cls.name: views.method_of(cls) for cls in shipped()}
every_method = pytest.mark.parametrize("name", METHODS)


@functools.cache
def drawn(name: str) -> Picture:
    return views.picture(METHODS[name])


# -- every method is in it --------------------------------------------------------------------------------------------


@every_method
def test_a_picture_shows_something_that_token_mean_does_not(name: str) -> None:
    own, other = (drawn(one) for one in (name, "token_mean"))
    assert own.kind in views.KINDS
    assert own.panels
    assert own.caption
    if name != "token_mean":
        assert _seen(own) != _seen(other)
        assert own.kind not in ("tokens", "responses") or _labels(own) != {"left alone"}


def _seen(picture: Picture) -> list[tuple[object, ...]]:
    return [(panel.lines, panel.marks) for panel in picture.panels]


def _labels(picture: Picture) -> set[str]:
    return {one.label.partition(":")[0] for panel in picture.panels for one in panel.marks}


@every_method
def test_files_are_small_well_formed_and_named(name: str) -> None:
    picture = drawn(name)
    for text in (large(picture), small(picture)):
        assert len(text) < 40_000
        root = ElementTree.fromstring(text)
        assert float(root.attrib["width"]) <= 800
        assert f"<!-- {NOTE} -->" in text
        assert ">" + name + "</text>" in text
        assert "nan" not in re.sub(r"<title>.*</title>", "", text, flags=re.DOTALL)
    assert ">" + picture.values.replace(">", "&gt;") + "</text>" in large(picture)
    assert picture.settings in written.files()[f"{name}.md"]


def test_every_method_is_in_the_gallery_and_on_the_map() -> None:
    files = written.files()
    for name, method in METHODS.items():
        assert f"[![{name}](pictures/{name}-small.svg)]({name}.md)" in files["gallery.md"]
        assert f"![What {name} does](pictures/{name}.svg)" in files[f"{name}.md"]
        rows = {line.split(" | ")[0]: line for line in files["map.md"].splitlines()}
        assert method.about.addresses, name
        for source in method.about.addresses:
            assert f"[`{name}`]({name}.md)" in rows[f"| **{source}**"]
        assert f"| [`{name}`]({name}.md)" in rows
    assert all(f"- **{source}**: {about}" in files["map.md"] for source, about in SOURCES.items())


def test_settings_of_pictures_are_of_methods_that_ship_and_only_where_they_are_needed() -> None:
    for name, chosen in views.SETTINGS.items():
        settings = {one.name: one.default for one in views.settings_of(type(METHODS[name]))}
        assert all(settings[key] != value for key, value in chosen.items())


def test_a_method_that_cannot_be_made_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "SETTINGS", {})
    with says(CardError, "ConstantLength: 'length' has no default, so the method cannot be drawn. Give it a value ..."):
        views.method_of(ConstantLength)


def test_every_field_that_a_method_may_fill_has_a_place_on_the_map() -> None:
    from rlstab.atlas.source_map import PLACES

    assert frozenset().union(*PLACES.values()) == set(WRITABLE)


# -- curves are what the loss says ------------------------------------------------------------------------------------


def expect(values: torch.Tensor, expected: torch.Tensor) -> None:
    there = values.isfinite()
    assert there.sum() > 100
    torch.testing.assert_close(values[there], expected[there], rtol=1e-12, atol=1e-12)


def test_the_curve_of_clip_higher_is_its_coefficient() -> None:
    for case in measured(ClipHigher(dual_clip=3.0), "live").values():
        expect(case.rewarded, torch.where(RATIOS <= 1.28, RATIOS, 0.0))
        expect(case.punished, -torch.where((RATIOS >= 0.8) & (RATIOS <= 3.0), RATIOS, 0.0))
    assert what_matters(measured(ClipHigher(), "live")) == []


def test_the_curve_of_a_gate_and_of_a_pull_is_theirs() -> None:
    sapo = measured(SAPO(), "live")
    z = torch.sigmoid(1.05 * (RATIOS - 1))
    expect(sapo[BASE].punished, -4 * z * (1 - z) * RATIOS)
    capped = measured(Capped(floor=0.45, cap=1.5), "live")
    expect(capped[BASE].rewarded, torch.where(RATIOS < 0.45, 0.0, RATIOS.clamp(max=1.5)))


def test_the_curve_of_a_sequence_ratio_depends_on_the_response() -> None:
    found = measured(GSPO(), "live")
    assert what_matters(found) == ["together"]
    expect(found[BASE].rewarded, RATIOS ** (1 / probes.LENGTH))
    expect(found[Case(together=True)].rewarded, RATIOS)


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        (CISPO(cap=1.2), []),
        (MASPO(), ["probability"]),
        (DPPO(), ["probability"]),
        (ASPO(), ["entropy"]),
        (VESPO(), ["together"]),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_what_matters_is_found(method: TokenObjective, keys: list[str]) -> None:
    assert what_matters(measured(method, "live")) == keys


def test_no_probability_is_above_1() -> None:
    found = measured(DPPO(), "live")[Case(probability=0.5)].rewarded
    assert torch.equal(found.isfinite(), RATIOS * 0.5 <= 1)


def test_the_curve_of_a_penalty_is_that_of_its_estimator() -> None:
    found = measured(KLPenalty(coefficient=0.1, estimator="k3"), "reference", advantage=0.0)
    expect(found[BASE].rewarded, 0.1 * (1 / RATIOS - 1))  # RATIOS are live over reference


class LaterOnly(TokenObjective):
    """Stops punished tokens once ten optimizer steps are done."""

    name = "later_only"
    writes = {"gates"}

    def init_state(self):
        return {"steps": 0}

    def advance(self, state, stat):
        return {"steps": state["steps"] + 1}

    def terms(self, batch, stat, state):
        late = state["steps"] > 10
        return Terms(
            gates={"": Gate(lambda ratio, constants: torch.where((constants.advantages < 0) & late, 0.0, 1.0))}
        )


def test_what_state_changes_is_shown() -> None:
    assert what_matters(measured(LaterOnly(), "live")) == ["later"]
    panel = views.picture(LaterOnly()).panels[0]
    assert [one.label for one in panel.lines if one.colour == PUNISHED] == ["punished: step 1", "punished: step 500"]
    assert [one.label for one in panel.lines if one.colour == REWARDED] == ["rewarded"]


class Strange(TokenObjective):
    """Fills one field, in a way that no view expects."""

    name = "strange"
    fills: str = ""

    @property
    def writes(self):
        return frozenset({self.fills} if self.fills else ())

    def terms(self, batch, stat, state):
        rare = batch.logprobs < -3
        given = {
            "lr_scale": 0.5,
            "unclipped": rare,
            "bonus": -2.5 * rare * batch.advantages,
            "gates": {"": Gate(lambda ratio, constants: torch.ones_like(ratio))},
            "penalties": {"": Penalty(0.1, lambda policy, anchor: policy.logprobs, rare)},
        }
        return Terms(**{self.fills: given[self.fills]} if self.fills else {})


@pytest.mark.parametrize(
    ("fills", "labels"),
    [
        ("", {"left alone"}),
        ("lr_scale", {"left alone"}),
        ("gates", {"left alone"}),
        ("unclipped", {"left alone", "unclipped"}),
        ("bonus", {"left alone", "turned around, \N{MULTIPLICATION SIGN} -1.5"}),
        ("penalties", {"left alone", "under a penalty"}),
    ],
)
def test_what_was_not_foreseen_has_a_true_picture_too(fills: str, labels: set[str]) -> None:
    found = views.picture(Strange(fills))
    assert _labels(found) == labels
    rare = int((cloud().logprobs < -3).sum())
    counts = [one.label.rpartition(": ") for panel in found.panels for one in panel.marks]
    assert sum(int(count) for label, _, count in counts if label != "left alone") == (rare if len(labels) > 1 else 0)
    assert large(found)
    assert small(found)


def test_a_line_is_drawn_for_each_different_case() -> None:
    labels = {one.label for panel in views.picture(ASPO()).panels for one in panel.lines}
    assert {"rewarded: 0.3 nats, 0.01 nats", "rewarded: 2 nats", "untouched: r A"} <= labels


# -- clouds are what the plan says ------------------------------------------------------------------------------------


def test_the_cloud_has_the_statistics_that_it_claims() -> None:
    batch = cloud()
    H, p = batch.signal("entropies"), batch.logprobs.exp()
    assert float((H < 0.0125).double().mean()) == pytest.approx(0.5, abs=0.05)
    assert float((H > 0.67).double().mean()) == pytest.approx(0.2, abs=0.03)
    assert float((p < 0.002).double().mean()) > 0.02
    assert torch.equal(batch.signal("truncated") == 1, batch.spread(batch.lengths) == LIMIT)
    assert bool((batch.signal("max_logprobs") >= batch.logprobs).all())
    means = batch.sequence_mean(batch.advantages).view(-1, 4)
    torch.testing.assert_close(means.mean(1), torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(means.std(1, correction=0), torch.ones(8, dtype=torch.float64))


@every_method
def test_coefficients_are_those_of_the_plan(name: str) -> None:
    method = METHODS[name]
    if method.requires or method.writes & {"aggregate", "penalties"}:
        return
    batch = cloud_of(method)
    plan, outputs = make_plan(method, [batch]), live(batch)
    plan.loss(0, outputs).loss.backward()
    found = coefficients(Decided.on(method, batch).part(batch), outputs)
    expected = torch.zeros_like(found) if outputs.logprobs.grad is None else -outputs.logprobs.grad
    torch.testing.assert_close(found / plan.kept.tokens, expected, rtol=1e-9, atol=1e-15)


def test_a_cloud_shows_what_a_mask_drops_and_a_weight_boosts() -> None:
    for method, label, expected in (
        (S2TMask(), "dropped", lambda terms: ~terms.keep),
        (STARE(), "boosted, \N{MULTIPLICATION SIGN} 1.1", lambda terms: terms.weight > 1),
    ):
        where = expected(make_plan(compose(method), [cloud()]).terms(0))
        marks = {one.label.partition(":")[0]: one for panel in views.picture(method).panels for one in panel.marks}
        points = zip(cloud().logprobs.exp()[where].tolist(), cloud().signal("entropies")[where].tolist(), strict=True)
        assert sorted(marks[label].points) == sorted(points)
        assert len(marks[label].points) > 5


def test_every_token_with_an_advantage_has_one_mark() -> None:
    for name in ("s2t", "top_entropy", "lp_reg", "stare", "random_mask"):
        assert sum(len(one.points) for panel in views.picture(METHODS[name]).panels for one in panel.marks) == 1143


def test_divisors_and_prices() -> None:
    batch = cloud()
    found = divisors(Decided.on(SequenceMean(), batch).part(batch))
    torch.testing.assert_close(found, len(batch) / (32 * batch.spread(batch.lengths)))
    assert "puts 0.01 before" in views.picture(EntropyBonus(coefficient=0.01)).caption


def test_a_factor_is_relative_to_the_ratio() -> None:
    batch = cloud()
    found = factors(Decided.on(CISPO(cap=1.2), batch).part(batch), live(batch))
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    torch.testing.assert_close(found, ratio.clamp(max=1.2) / ratio)


def test_live_outputs_of_the_cloud_are_those_of_its_policy() -> None:
    outputs = live(cloud())
    assert isinstance(outputs, PolicyOutputs)
    assert torch.equal(outputs.logprobs, cloud().logprobs)


# -- files -------------------------------------------------------------------------------------------------------------


def test_the_same_bytes_again() -> None:
    cloud.cache_clear()
    one = {name: large(views.picture(METHODS[name])) for name in ("s2t", "clip_higher")}
    cloud.cache_clear()
    assert one == {name: large(views.picture(METHODS[name])) for name in one}


def test_a_picture_that_shows_something_else_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "shipped", lambda: [ClipHigher])
    monkeypatch.setattr(written.cards, "pages", lambda pictures: {})
    written.write(tmp_path)
    page = tmp_path / "pictures" / "clip_higher.svg"
    page.write_text(re.sub(r"M70 (\d)", r"M70.1 \1", page.read_text()))  # rounding, on another machine
    assert written.stale(tmp_path) == []
    page.write_text(large(views.picture(ClipHigher(high=0.3))))
    (tmp_path / "pictures" / "gone.svg").write_text(page.read_text())
    (tmp_path / "pictures" / "mine.svg").write_text("<svg></svg>")
    assert written.stale(tmp_path) == [
        f"{page}: the picture is not what the class does.",
        f"{tmp_path}/pictures/gone.svg: no method has this name any more.",
    ]
    written.write(tmp_path)
    assert written.stale(tmp_path) == []
    assert (tmp_path / "pictures" / "mine.svg").exists()


def test_drawings_are_the_same_up_to_rounding() -> None:
    assert same_drawing('<path d="M1 2L3.1 4"/>', '<path d="M1.1 2L3 3.9"/>')
    assert not same_drawing('<path d="M1 2L3 4"/>', '<path d="M1 2L3 5"/>')
    assert not same_drawing('<path d="M1 2L3 4"/>', '<path d="M1 2"/>')
    assert not same_drawing('fill="#112233"', 'fill="#112234"')
    assert not same_drawing("<text>share = 0.1</text>", "<text>share = 0.2</text>")


def test_a_line_breaks_where_there_is_no_value_and_loses_no_corner() -> None:
    on = Drawing(10, 10, "t")
    on.line([(0, 0), (1, 1), (2, math.nan), (3, 3), (4, 4)], "#000")
    assert 'd="M0 0L1 1M3 3L4 4"' in on.svg()
    assert simplified([(0, 0), (1, 0), (2, 0), (3, 5), (4, 0)]) == [(0, 0), (2, 0), (3, 5), (4, 0)]


def test_cases_that_are_compared_begin_with_the_base() -> None:
    assert all(next(iter(cases.values())) == BASE for cases in MATTERS.values())
