"""What an adapter says about itself: one table of facts for `check --host`, `explain`, `doctor` and the trainer."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rlstab import ClipHigher, ImportanceCorrection, KLPenalty, S2TMask, TokenObjective, compose
from rlstab.adapters.doctor import doctor
from rlstab.adapters.objective_state import RECORD, keep_state, restore_state
from rlstab.adapters.releases import check_methods, checksum
from rlstab.adapters.setting_conflicts import misfits, require_one_correction
from rlstab.cli import main
from rlstab.errors import CheckpointError, ConfigError, HostError, MissingSignal, UnknownName
from rlstab.hosts import Host, adapted, kl_settings, trl_settings, verl_settings
from tests.adapters.jobs import ROOT
from tests.core.methods import PassRate


def test_only_a_penalty_towards_the_reference_needs_its_model() -> None:
    def wrong(objective: TokenObjective, **given: Any) -> list[str]:
        settings = trl_settings(objective) if "beta" in given else verl_settings(objective)
        return [sentence for sentence, _ in misfits(given.get, {}, {name: settings[name] for name in given}).values()]

    to_reference = KLPenalty(coefficient=0.3, estimator="k3_unbiased")
    for anchor in ("rollout", "old"):
        other = KLPenalty(coefficient=0.002, estimator="k2", anchor=anchor)
        both = compose(other, to_reference)
        for fits in ({"beta": 0.0}, {"use_kl_loss": False, "kl_loss_coef": 0.001}):
            assert wrong(compose(other), **fits) == []
            assert len(wrong(both, **fits)) == len(fits)
        for fits in ({"beta": 0.3}, {"use_kl_loss": True, "kl_loss_coef": 0.3}):
            assert wrong(both, **fits) == []
            told = wrong(compose(other), **fits)
            assert len(told) == len(fits)
            assert "no method of the objective reads the reference" in told[0]
        assert kl_settings(both, "estimator") == ["k3_unbiased"]
        require_one_correction(both, "its correction", "off")
        with pytest.raises(ConfigError, match="'importance_correction' and its correction exclude each other"):
            require_one_correction(compose(other, ImportanceCorrection()), "its correction", "off")


REPLACED = ("trl", "axolotl", "verl", "skyrl", "tinker", "prime_rl")  #: hosts whose loss is replaced
STACK = "clip_higher, s2t, lp_reg, {name: kl, coefficient: 0.01}"
COSTS = "one more forward pass without gradient per micro-batch, for lp_reg, s2t"
#: By host and objective: what is said, or of a refusal what its error names.
SAID = [
    (
        *("trl", STACK),
        ["TRL 1.16", "s2t │ logprobs, entropies │ yes │ all of it", "GRPOConfig.beta", COSTS, "head='rlstab'"],
    ),
    ("trl", "clip_higher", ["clip_higher │ only the ratio │ no │ all of it", "evidence: no separate forward pass"]),
    ("trl", "{preset: stack}", ["branch", "TRL can train it"]),
    ("trl", "clip_higher, block_mean", "MissingSignal: 'block_mean' reads 'block_ids', .*signals={'block_ids'"),
    ("verl", f"{STACK}, mismatch", ["verl 0.9.1", "use_kl_loss=true", "calculate_log_probs=true", "at false", COSTS]),
    ("verl", "clip_higher, block_mean", "MissingSignal: 'block_mean' reads 'block_ids'"),
    ("skyrl", "clip_higher, s2t", ["SkyRL 0.4.0", "s2t │ logprobs, entropies │ yes │ all of it"]),
    ("skyrl", "clip_higher, truncated_mask", "MissingSignal: 'truncated_mask' reads 'truncated'"),
    ("tinker", "clip_higher, s2t", ["Tinker 0.25", "evidence: "]),
    ("prime_rl", "clip_higher, {name: kl, coefficient: 0.01}, token_mean", ["prime-rl 0.8.0", "sees: one response"]),
    ("prime_rl", "clip_higher, random_mask", "ConfigError: 'random_mask' drops tokens from the divisor"),
    ("prime_rl", "clip_higher, kl_cov", "ConfigError: 'kl_cov' decides by the whole optimizer step"),
    ("axolotl", STACK, ["axolotl 0.21", "trl.beta", "write rlstab: {head: rlstab}", COSTS]),
    ("data", "clip_higher, s2t", ["the data level", "s2t │ logprobs, entropies │ yes │ all of it"]),
    *(
        (host, "distill", "MissingSignal: 'distill' reads the live 'teacher_divergence', .*use rlstab's trainer")
        for host in REPLACED
    ),
    ("data", "distill", "ConfigError: 'distill' asks for a penalty"),
    ("data", "clip_higher, {name: kl, coefficient: 0.1}", "ConfigError: 'kl' asks for a penalty"),
]


@pytest.mark.parametrize(("host", "objective", "words"), SAID)
def test_check_of_a_host(host: str, objective: str, words: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
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


OTHER = Host("other", "Other", frozenset(), release="2")


def test_a_host_is_refused_what_it_does_not_give() -> None:
    OTHER.require(compose(ClipHigher()))
    with pytest.raises(MissingSignal, match=r"'s2t' reads 'entropies', which Other 2 does not provide"):
        OTHER.require(compose(ClipHigher(), S2TMask()))
    with pytest.raises(UnknownName, match=r"Did you mean 'trl'\?"):
        adapted("trll")


class Theirs:
    """A host's class with one method that an adapter builds on."""

    def step(self, batch: Any) -> int:
        return 1


def test_a_method_that_is_not_as_tested_is_refused_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = {"step": ("self batch", checksum(Theirs.step))}

    def check(home: str = "tests.") -> list[str]:
        return check_methods(Theirs, tested, release="Other 2", homes=(home,), cure="Install Other 1.")

    assert check() == []
    with pytest.raises(HostError, match=r"Theirs.step was replaced by tests.adapters.test_hosts. Do not import"):
        check("other.")
    monkeypatch.setattr(Theirs, "step", lambda self, batch, more=None: 2)
    assert check() == ["step"]
    monkeypatch.setattr(Theirs, "step", lambda batch: 1)
    with pytest.raises(HostError, match=r"takes \(batch\), expected \(self, batch\). Install Other 1."):
        check()
    monkeypatch.delattr(Theirs, "step")
    with pytest.raises(HostError, match="Theirs of Other 2 has no step"):
        check()


def test_a_state_with_tensors_is_kept(tmp_path: Path) -> None:
    """A checkpoint holds them as safetensors next to the plain state."""
    objective = compose(PassRate())
    keep_state(tmp_path, objective, objective.init_state())
    assert repr(restore_state(tmp_path, objective)) == repr(objective.init_state())
    with pytest.raises(CheckpointError, match="belongs to the objective"):
        restore_state(tmp_path, compose(ClipHigher()))
    for text, why in (('{"objective": "x"}', "is damaged"), (None, "another trainer wrote it")):
        (tmp_path / RECORD).unlink() if text is None else (tmp_path / RECORD).write_text(text)
        with pytest.raises(CheckpointError, match=why):
            restore_state(tmp_path, objective)


def test_doctor_tries_each_adapter(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines, well = doctor([OTHER])
    assert lines[-1].endswith("pip install -c constraints.txt -e '.[other]'")
    assert well
    real = importlib.metadata.version
    monkeypatch.setattr("rlstab.adapters.doctor.version", lambda name: "2.5" if name == OTHER.key else real(name))

    monkeypatch.setattr("rlstab.adapters.releases.tested", lambda key: "Other 2.5")
    error = RuntimeError("somebody replaced it")
    for failure, said in ((None, "is live; tested with Other 2.5."), (error, "RuntimeError: somebody")):
        module = MagicMock(check_host=MagicMock(side_effect=failure))
        monkeypatch.setitem(sys.modules, OTHER.adapter, module)
        lines, well = doctor([OTHER])
        assert lines[-1].startswith(f"Other 2.5: {OTHER.adapter} ")
        assert said in lines[-1]
        assert well == ("live" in said)
    assert main(["doctor"]) == 0
    assert "TRL" in capsys.readouterr().out
