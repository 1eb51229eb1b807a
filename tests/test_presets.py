"""Every value of a preset has a source, and is the value of that source."""

import re
from pathlib import Path

import pytest
import yaml

import rlstab
from rlstab.config import dump_run, load_run
from rlstab.config.document import Document
from rlstab.core.compose import walk
from rlstab.core.method_settings import settings_of
from rlstab.explain.notes import idle_in_run
from rlstab.presets import PRESETS

_CORRECTION = "importance_correction sequence None 8.0 None None None max_k3 None False all"
_STACK = "s2t 0.002 0.75 candidates, stream_weight 1.0, token_mean, goldilocks 256 0.5 0.2, deep_grpo 8 2.0 0.0 all"
#: Methods and stages with their settings in order, and the estimator: a second copy of the published values, so that
#: none changes unnoticed.
PUBLISHED = {
    "grpo": "clip_higher 0.2 0.2 None, kl 0.04 k3 None reference, sequence_mean, grpo",
    "dapo": "clip_higher 0.2 0.28 None, token_mean, grpo",
    "dr_grpo": "clip_higher 0.2 0.2 None, constant_length 3000, dr_grpo",
    "grpo_plus": "clip_higher 0.2 0.28 None, token_mean, truncated_mask kept, grpo",
    "justrl": "clip_higher 0.2 0.28 10.0, token_mean, grpo",
    "20_entropy": "clip_higher 0.2 0.28 None, token_mean, top_entropy 0.2 kept, grpo",
    "lp_reg": "lp_reg 0.01 0.02 1.0 paper 10.0, token_mean, grpo",
    "stare": "clip_higher 0.2 0.28 10.0, stare 0.3 O1 0.1 1.1 0.9 0.0 1.5 0.5, token_mean, grpo",
    "stapo": "clip_higher 0.2 0.28 10.0, s2t 0.002 0.75 candidates, token_mean, grpo",
    "clip_cov": "clip_cov 0.0002 1.0 5.0 1.0 1.0 0, clip_higher 1.0 1.0 None, token_mean, grpo",
    "kl_cov": "kl_cov 0.002 1.0, token_mean, grpo",
    "steer": "clip_higher 0.2 0.28 10.0, steer 1.0 0.8 exponential, token_mean, grpo",
    "fipo": "clip_higher 0.2 0.28 10.0, fipo 32.0 1.0 1.2 10.0 10.0, token_mean, grpo",
    "ar": "ar 0.2, clip_higher 0.2 0.24 10.0, kl 0.001 k3 10.0 reference, token_mean, grpo",
    "wapo": "clip_higher 1.0 9.0 None, wapo 8192, dr_grpo",
    "cispo": "cispo 5.0 None None None, token_mean, grpo",
    "gspo": "clip_higher 0.0003 0.0004 None, gspo, sequence_mean, grpo",
    "gmpo": "gmpo 0.4 0.4, sequence_mean, grpo",
    "holder_mean": "clip_higher 0.2 0.2 None, holder_mean 2.0 -2.0 500, sequence_mean, grpo",
    "sapo": "sapo 1.0 1.05, sequence_mean, grpo",
    "maspo": "maspo 1.0 0.3 0.03 0.03 10.0 0.1 10.0 None, token_mean, grpo",
    "ce_gppo": "ce_gppo 0.2 0.2 0.75 1.0 10.0, token_mean, grpo",
    "aspo": "aspo 0.2 0.4 0.2 3.0, token_mean, grpo",
    "vespo": "token_mean, vespo 2.0 3.0 3.0 2.0 old, grpo",
    "dppo": "constant_length 8192, dppo tv 0.15 0.15 10000.0 rollout away, dr_grpo",
    "cppo": "constant_length 16384, cppo 0.15 0.8 0.02 0.9 rollout, dr_grpo",
    "drpo": "constant_length 8192, drpo 12.5 rollout, dr_grpo",
    "m2po": "m2po 0.04, token_mean, grpo",
    "tis": f"clip_higher 0.2 0.28 10.0, {_CORRECTION.replace('sequence None 8.0', 'token None 2.0')}, token_mean, grpo",
    "icepop": "clip_higher 0.2 0.2 None, importance_correction token None None 0.5 5.0 None max_k3 None False all, "
    "sequence_mean, grpo",
    "vcpo": f"ess_scale 1.0 0.5 rollout, {_CORRECTION}, sequence_mean, opob",
    "opd": "opd 1.0 True, token_mean, grpo",
    "iw_opd": "iw_opd 0.5, token_mean, grpo",
    "rlsd": "clip_higher 0.2 0.2 None, kl 0.04 k3 None reference, rlsd 0.5 0.2 False, sequence_mean, grpo",
    "sdar": "clip_higher 0.2 0.2 None, kl 0.04 k3 None reference, sdar 0.1 5.0, sequence_mean, grpo",
    "recommended": "clip_higher 0.2 0.28 10.0, token_mean, s2t 0.002 0.75 candidates, "
    "stare 0.3 O1 0.1 1.1 0.9 0.0 1.5 0.5, grpo",
    "stack": f"clip_higher 0.2 0.28 None, {_STACK} None 10000 10, grpo",
    "stack_stale": f"clip_higher 0.2 0.28 None, ess_scale 1.0 0.5 rollout, {_CORRECTION}, {_STACK} None 10000 10, opob",
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_its_values_are_the_published_ones_and_each_has_a_source(name: str) -> None:
    recipe, said = PRESETS[name], []
    sources = dict(recipe.sources)
    for method in [*(leaf.method for leaf in walk(recipe.objective)), *recipe.stages]:
        values = {setting.name: getattr(method, setting.name) for setting in settings_of(type(method))}
        said.append(" ".join([method.name, *map(str, values.values())]))
        for key, value in values.items():
            source = sources.pop(f"{method.name}.{key}").rpartition(": ")[2].split(" ")[0]
            assert source
            if source.replace(".", "", 1).isdigit():
                assert float(source) in (value, 100 * float(value))
    assert ", ".join([*said, recipe.estimator]) == PUBLISHED[name]
    assert sources == {}
    run = load_run({"objective": {"preset": name}})
    assert run.composition == recipe.objective
    assert set(recipe.stages) <= set(run.pipeline)
    assert run.pipeline.estimator.name == recipe.estimator
    text = dump_run(run)
    assert "preset" not in text
    assert load_run(yaml.safe_load(text)) == run


def test_what_it_says_to_set_lets_it_act() -> None:
    """The ratio of these recipes is that to the sampler: the policy that the loss divides by has to be set."""
    to_the_sampler = {name for name, recipe in PRESETS.items() if "set old_logprobs: rollout" in recipe.about}
    assert to_the_sampler == {"cppo", "drpo", "m2po"}
    for name in to_the_sampler:
        said = dict(re.findall(r"(\w+): (\w+)", PRESETS[name].about.partition("; set ")[2]))
        run = load_run({"objective": {"preset": name}, "optimisation": {**said, "epochs": 2}})
        assert run.optimisation.old_logprobs == "rollout"
        assert idle_in_run(run.composition, run) == []


def test_no_file_of_settings_has_a_key_twice() -> None:
    """yaml.safe_load would keep the last one in silence."""
    files = sorted(Path(rlstab.__file__).parent.rglob("*.yaml"))
    assert len(files) > 15
    for file in files:
        Document.read(file)
