"""Every value of a preset has a source, and is the value of that source."""

from __future__ import annotations

import pytest
import yaml

from rlstab.config import dump_objective, load_objective, load_run
from rlstab.core.compose import Within
from rlstab.core.settings import settings_of
from rlstab.core.walk import walk
from rlstab.errors import UnknownName
from rlstab.presets import PRESETS, preset

#: Published values, written down by hand; where a source says nothing, the neutral setting.
S2T = {"s2t.max_prob": 0.002, "s2t.quantile": 0.75, "s2t.population": "candidates"}
STARE = {
    "stare.target_entropy": 0.3,
    "stare.variant": "O1",
    "stare.share": 0.1,
    "stare.boost": 1.1,
    "stare.damp": 0.9,
    "stare.increment": 0.0,
    "stare.max_boost": 1.5,
    "stare.min_damp": 0.5,
}


def clip(low: float, high: float, dual: float | None) -> dict[str, float | None]:
    return {"clip_higher.low": low, "clip_higher.high": high, "clip_higher.dual_clip": dual}


PUBLISHED = {
    # arXiv 2402.03300: KL k3 with 0.04 in the loss, mean per response; it never says its clip, 0.2 is PPO's
    "grpo": {**clip(0.2, 0.2, None), "kl.coefficient": 0.04, "kl.estimator": "k3", "kl.cap": None},
    # arXiv 2503.14476
    "dapo": clip(0.2, 0.28, None),
    # arXiv 2503.20783 and sail-sg/understand-r1-zero: generate_max_length
    "dr_grpo": {**clip(0.2, 0.2, None), "constant_length.length": 3000},
    # arXiv 2512.16649 and the script of thunlp/JustRL
    "justrl": clip(0.2, 0.28, 10.0),
    # arXiv 2506.01939 eq. 6: the fifth of the tokens, divided by those selected, on top of DAPO
    "20_entropy": {**clip(0.2, 0.28, None), "top_entropy.share": 0.2, "top_entropy.denominator": "kept"},
    # arXiv 2510.03222, 14B: beta 1.0, kappa 0.02, rho 1 %, U = 10
    "lp_reg": {
        "lp_reg.share": 0.01,
        "lp_reg.min_p": 0.02,
        "lp_reg.coefficient": 1.0,
        "lp_reg.form": "paper",
        "lp_reg.ratio_cap": 10.0,
    },
    # arXiv 2606.19236, 7B, and the script of hp-luo/STARE
    "stare": {**clip(0.2, 0.28, 10.0), **STARE},
    # arXiv 2602.15620 v4-v5 on top of JustRL
    "stapo": {**clip(0.2, 0.28, 10.0), **S2T},
    # our own: JustRL, S2T, and STARE among the tokens that S2T leaves
    "recommended": {**clip(0.2, 0.28, 10.0), **S2T, **STARE},
}
AVERAGE = {"grpo": "sequence_mean", "dr_grpo": "constant_length"}
ESTIMATOR = {"dr_grpo": "dr_grpo"}

every = pytest.mark.parametrize("name", sorted(PRESETS))


def settings(name: str) -> dict[str, object]:
    """``method.setting`` to value, those inside ``within`` too."""
    return {
        f"{leaf.name}.{one.name}": getattr(leaf.method, one.name)
        for leaf in walk(PRESETS[name].objective)
        for one in settings_of(type(leaf.method))
    }


def test_every_preset_has_its_published_values_written_here():
    assert PUBLISHED.keys() == PRESETS.keys()


@every
def test_its_values_are_the_published_ones(name):
    assert settings(name) == PUBLISHED[name]


@every
def test_it_averages_and_normalises_as_published(name):
    one = PRESETS[name]
    averages = [leaf.name for leaf in walk(one.objective) if "aggregate" in leaf.method.writes]
    assert averages == [AVERAGE.get(name, "token_mean")]
    assert one.estimator == ESTIMATOR.get(name, "grpo")


@every
def test_every_setting_has_a_source_and_no_source_is_stale(name):
    assert PRESETS[name].sources.keys() == settings(name).keys()
    assert all(source.strip() for source in PRESETS[name].sources.values())


@every
def test_a_number_in_a_source_is_the_number_of_the_preset(name):
    found = settings(name)
    for key, source in PRESETS[name].sources.items():
        last = source.rpartition(": ")[2].split(" ")[0]
        if last.replace(".", "", 1).isdigit():
            assert float(last) in (found[key], 100 * float(found[key]))


@every
def test_it_survives_yaml(name):
    objective = PRESETS[name].objective
    assert load_objective(yaml.safe_load(yaml.safe_dump(dump_objective(objective)))) == objective
    assert load_objective({"preset": name}) == objective


@every
def test_it_makes_a_run(name):
    assert load_run({"objective": {"preset": name}}).composition == PRESETS[name].objective


def test_the_recommended_one_boosts_among_the_tokens_that_are_left():
    (inside,) = (one for one in PRESETS["recommended"].objective.members if isinstance(one, Within))
    assert (inside.outer.name, inside.inner.name) == ("s2t", "stare")


def test_what_it_is_fits_on_a_line():
    assert all(one.about.endswith(".") and len(one.about) < 100 for one in PRESETS.values())


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownName) as caught:
        preset("stpo")
    assert str(caught.value) == "no preset is called 'stpo'. Did you mean 'stapo'?"
    assert preset("stapo") is PRESETS["stapo"]
