"""What an adapter says of itself: one table of facts for `check --host`, `explain`, `doctor` and the trainer."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

import rlstab
from rlstab import ClipHigher, ImportanceCorrection, KLPenalty, LpReg, S2TMask, TokenObjective, compose
from rlstab.adapters.doctor import doctor
from rlstab.adapters.settings import check_reference, kl_settings, require_one_correction
from rlstab.cli import main
from rlstab.core.batch import BASICS
from rlstab.errors import ConfigError, MissingSignal, UnknownName
from rlstab.explain.tables import reads
from rlstab.hosts import Host, adapted
from rlstab.signals import SIGNAL_NAMES
from tests.examples import EXAMPLES

#: Of the repository.
ROOT = Path(rlstab.__file__).parents[1]


def test_every_method_says_which_log_probs_it_reads() -> None:
    """The law `declared` holds it to what it says; here, that none that ships was left at the default."""
    both = {name for name, several in EXAMPLES.items() if any(method.needs >= BASICS for method in several)}
    assert both == {"ess_scale", "mismatch"}
    assert reads(S2TMask()) == ["logprobs", "entropies"]
    assert reads(ClipHigher()) == []
    assert reads(LpReg())[-1] == "live log_kept_mass"
    assert compose(S2TMask(), ClipHigher()).needs & BASICS == {"logprobs"}
    assert rlstab.observe(S2TMask()).needs & BASICS == {"logprobs"}
    assert rlstab.within(S2TMask(), rlstab.AR()).needs & BASICS == {"logprobs", "old_logprobs"}


def test_only_a_penalty_towards_the_reference_needs_its_model() -> None:
    def check(objective: TokenObjective, loaded: str, value: float) -> None:
        words = {"switch": "beta=0", "on": "", "coefficient": "beta"}
        check_reference(objective, loaded=loaded, value=value, idle=0.0, **words)

    to_reference = KLPenalty(coefficient=0.3, estimator="k3_unbiased")
    for anchor in ("rollout", "old"):
        other = KLPenalty(coefficient=0.002, estimator="k2", anchor=anchor)
        check(compose(other), "", 0.0)
        with pytest.raises(ConfigError, match="no method of the objective reads the reference"):
            check(compose(other), "beta = 0.002", 0.002)
        both = compose(other, to_reference)
        check(both, "beta = 0.3", 0.3)
        with pytest.raises(ConfigError, match=r"beta = 0\.002 has no effect"):
            check(both, "beta = 0.002", 0.002)
        assert kl_settings(both, "estimator") == ["k3_unbiased"]
        require_one_correction(both, "its correction", "off")
        with pytest.raises(ConfigError, match="'importance_correction' corrects"):
            require_one_correction(compose(other, ImportanceCorrection()), "its correction", "off")


def test_the_page_on_trl_names_methods_that_cost_no_forward() -> None:
    page = (ROOT / "docs" / "hosts" / "trl.md").read_text(encoding="utf-8")
    named = re.search(r"reads nothing of the evidence \((.*?) and others", page)
    assert named is not None
    for method in (method for name in re.findall(r"`(\w+)`", named[1]) for method in EXAMPLES[name]):
        assert not method.needs & (BASICS | SIGNAL_NAMES)


STACK = "clip_higher, s2t, lp_reg, {name: kl, coefficient: 0.01}"
COSTS = "one more forward without gradient per micro-batch, for lp_reg, s2t"
#: By host and objective: what is said, or of a refusal what its error names.
SAID = [
    ("trl", STACK, ["TRL 1.16", "s2t │ logprobs, entropies │ yes │ all of it", "GRPOConfig.beta", COSTS]),
    ("trl", STACK, ["clip_higher │ the ratio alone │ no │ all of it", "head='rlstab'", "TRL can train it"]),
    ("trl", "clip_higher", ["evidence: no forward of its own"]),
    ("trl", "{preset: stack}", ["branch", "TRL can train it"]),
    ("trl", "clip_higher, block_mean", "MissingSignal: 'block_mean' reads 'block_ids', .*signals={'block_ids'"),
    ("verl", f"{STACK}, mismatch", ["verl 0.9.1", "use_kl_loss=true", "calculate_log_probs=true", COSTS]),
    ("verl", STACK, ["s2t │ logprobs, entropies │ yes │ all of it", "use_fused_kernels at false", "verl can train it"]),
    ("verl", "clip_higher, block_mean", "MissingSignal: 'block_mean' reads 'block_ids'"),
    ("data", "clip_higher, s2t", ["the data level", "s2t │ logprobs, entropies │ yes │ all of it"]),
    ("data", "clip_higher, {name: kl, coefficient: 0.1}", "ConfigError: 'kl' asks for a penalty"),
]


@pytest.mark.parametrize(("host", "objective", "words"), SAID)
def test_check_says_what_a_host_makes_of_an_objective(
    host: str,
    objective: str,
    words: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    path = tmp_path / "objective.yaml"
    path.write_text(f"objective: [{objective}]")
    code = main(["check", str(path), "--host", host])
    out, err = (" ".join(text.split()) for text in capsys.readouterr())
    if isinstance(words, str):
        assert code == 2
        assert re.match(words, err)
    else:
        assert code == 0
        assert [word for word in words if word not in out] == []


def test_verl_imports_the_adapter_by_an_entry_point_that_exists() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"]["verl.plugins"]
    assert list(declared) == ["rlstab"]
    assert (ROOT / f"{declared['rlstab'].replace('.', '/')}.py").exists()


OTHER = Host("other", "Other", "other_adapter", frozenset(), package="other-host", release="2")


def test_a_host_is_refused_what_it_does_not_give() -> None:
    OTHER.require(compose(ClipHigher()))
    with pytest.raises(MissingSignal, match=r"'s2t' reads 'entropies', which Other 2 does not provide"):
        OTHER.require(compose(ClipHigher(), S2TMask()))
    with pytest.raises(UnknownName, match=r"Did you mean 'trl'\?"):
        adapted("trll")


def test_doctor_tries_each_adapter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines, well = doctor([OTHER])
    assert lines[-1].endswith("pip install -e '.[other]'")
    assert well
    real = importlib.metadata.version
    monkeypatch.setattr("rlstab.adapters.doctor.version", lambda name: "2.5" if name == OTHER.package else real(name))

    def broken() -> None:
        raise RuntimeError("somebody replaced it")

    for check_host, said in ((lambda: None, "is live; tested with Other 2.5."), (broken, "RuntimeError: somebody")):
        module = types.ModuleType(OTHER.adapter)
        module.check_host, module.tested = check_host, lambda: "Other 2.5"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, OTHER.adapter, module)
        lines, well = doctor([OTHER])
        assert lines[-1].startswith("Other 2.5: other_adapter ")
        assert said in lines[-1]
        assert well == ("live" in said)
    assert main(["doctor"]) == 0
    assert "TRL" in capsys.readouterr().out
