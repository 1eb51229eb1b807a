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
from rlstab import ClipHigher, LpReg, S2TMask, compose
from rlstab.adapters.doctor import doctor
from rlstab.cli import main
from rlstab.core.batch import BASICS
from rlstab.errors import MissingSignal, UnknownName
from rlstab.explain.tables import reads
from rlstab.hosts import Host, adapted
from rlstab.signals import SIGNAL_NAMES
from tests.examples import EXAMPLES

#: Of the repository.
ROOT = Path(rlstab.__file__).parents[1]


def test_every_method_says_which_log_probs_it_reads() -> None:
    """The law `declared` holds it to what it says; here, that none that ships was left at the default."""
    both = {name for name, several in EXAMPLES.items() for one in several if one.needs >= BASICS}
    assert both == {"ess_scale", "mismatch"}
    assert reads(S2TMask()) == ["logprobs", "entropies"]
    assert reads(ClipHigher()) == []
    assert reads(LpReg())[-1] == "live log_kept_mass"
    assert compose(S2TMask(), ClipHigher()).needs & BASICS == {"logprobs"}
    assert rlstab.observe(S2TMask()).needs & BASICS == {"logprobs"}
    assert rlstab.within(S2TMask(), rlstab.AR()).needs & BASICS == {"logprobs", "old_logprobs"}


def test_the_page_on_trl_names_methods_that_cost_no_forward() -> None:
    page = (ROOT / "docs" / "hosts" / "trl.md").read_text(encoding="utf-8")
    found = re.search(r"reads nothing of the evidence \((.*?) and others", page)
    assert found is not None
    for name in re.findall(r"`(\w+)`", found[1]):
        for method in EXAMPLES[name]:
            assert not method.needs & BASICS
            assert not method.needs & SIGNAL_NAMES


def checked(capsys: pytest.CaptureFixture[str], path: Path, text: str, host: str = "trl") -> tuple[int, str, str]:
    path.write_text(text)
    code = main(["check", str(path), "--host", host])
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), " ".join(err.split())


def test_check_prints_what_trl_makes_of_an_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "objective.yaml"
    code, out, _ = checked(capsys, path, "objective: [clip_higher, s2t, lp_reg, {name: kl, coefficient: 0.01}]")
    assert code == 0
    for text in (
        "TRL 1.16, through rlstab.adapters.trl",
        "s2t │ logprobs, entropies │ yes │ all of it",
        "clip_higher │ the ratio alone │ no │ all of it",
        "ref_logprobs: set GRPOConfig.beta above 0, which loads the reference model",
        "max_logprobs: write head='rlstab'",
        "sees: the whole optimizer step, before its first backward pass",
        "one more forward without gradient per micro-batch, for lp_reg, s2t;",
        "TRL can train it",
    ):
        assert text in out
    _, out, _ = checked(capsys, path, "objective: [clip_higher]")
    assert "evidence: no forward of its own" in out


def test_check_refuses_what_trl_cannot_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = checked(capsys, tmp_path / "f.yaml", "objective: [clip_higher, block_mean]")
    assert code == 2
    assert "block_ids: missing" in out
    assert err.startswith("MissingSignal: 'block_mean' reads 'block_ids', which TRL 1.16 does not provide.")
    assert err.endswith("or give the trainer signals={'block_ids': function}, (B, T) values from its batch.")


def test_check_prints_what_verl_makes_of_an_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    path = tmp_path / "objective.yaml"
    text = "objective: [clip_higher, s2t, lp_reg, {name: kl, coefficient: 0.01}, mismatch]"
    code, out, _ = checked(capsys, path, text, "verl")
    assert code == 0
    for one in (
        "verl 0.9.1, through rlstab.adapters.verl",
        "s2t │ logprobs, entropies │ yes │ all of it",
        "ref_logprobs: set actor_rollout_ref.actor.use_kl_loss=true, which loads the reference model",
        "rollout_logprobs: set actor_rollout_ref.rollout.calculate_log_probs=true",
        "max_logprobs: leave actor_rollout_ref.model.use_fused_kernels at false: fused kernels form no logits",
        "one more forward without gradient per micro-batch, for lp_reg, s2t",
        "verl can train it",
    ):
        assert one in out, one
    assert "none where" not in out
    code, out, err = checked(capsys, path, "objective: [clip_higher, block_mean]", "verl")
    assert code == 2
    assert "block_ids: missing; use a host that provides it" in out
    assert err.startswith("MissingSignal: 'block_mean' reads 'block_ids', which verl 0.9.1 does not provide.")


def test_verl_imports_the_adapter_by_an_entry_point_that_exists() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"]["verl.plugins"]
    assert list(declared) == ["rlstab"]
    assert (ROOT / f"{declared['rlstab'].replace('.', '/')}.py").exists()


def test_a_host_is_refused_what_it_does_not_give() -> None:
    OTHER.require(compose(ClipHigher()))
    with pytest.raises(MissingSignal, match=r"'s2t' reads 'entropies', which Other 2 does not provide"):
        OTHER.require(compose(ClipHigher(), S2TMask()))


def test_an_unknown_host_is_told() -> None:
    with pytest.raises(UnknownName, match=r"no adapter is called 'trll'. Did you mean 'trl'\?"):
        adapted("trll")


# -- doctor ------------------------------------------------------------------------------------------------------------

OTHER = Host("other", "Other", "other_adapter", frozenset(), package="other-host", release="2")


def installed(monkeypatch: pytest.MonkeyPatch, check_host: Any) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr("rlstab.adapters.doctor.version", lambda name: "2.5" if name == OTHER.package else real(name))
    module = types.ModuleType(OTHER.adapter)
    module.check_host, module.tested = check_host, lambda: "Other 2.5"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, OTHER.adapter, module)


def test_doctor_names_what_is_not_installed() -> None:
    lines, well = doctor([OTHER])
    assert lines[-1].endswith("pip install -e '.[other]'")
    assert well
    assert lines[0].startswith(f"rlstab {importlib.metadata.version('rlstab')}: Python 3.")


def test_doctor_tries_each_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, lambda: None)
    assert doctor([OTHER])[0][-1] == "Other 2.5: other_adapter is live; tested with Other 2.5."

    def broken() -> None:
        raise RuntimeError("somebody replaced it")

    installed(monkeypatch, broken)
    lines, well = doctor([OTHER])
    assert lines[-1] == "Other 2.5: other_adapter does not work: RuntimeError: somebody replaced it"
    assert not well


def test_doctor_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert code == 0
    assert "TRL" in out
