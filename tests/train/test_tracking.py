"""Trackers: what is not installed is said, and wandb follows its own rules."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rlstab.errors import ConfigError
from rlstab.train import loop, tracking
from tests.train.kills import small
from tests.train.runs import go

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user without settings and login, in an empty folder."""
    for name in ("API_KEY", "MODE", "BASE_URL", "IDENTITY_TOKEN_FILE", "DISABLED"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home / "config"))
    monkeypatch.chdir(home)
    wandb.teardown()  # it reads the environment once
    yield home
    wandb.teardown()


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "-e '.[tensorboard]'"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, f"is_{name}_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        go(small(tmp_path / "run", tracking__trackers=[name]))
    assert str(caught.value) == (
        f"tracking.trackers: {name} is not installed. Run `pip install {package}`, or remove it; metrics.jsonl is "
        f"always written."
    )
    assert not (tmp_path / "run").exists()


def said(out: Path) -> tuple[str, str]:
    wandb.teardown()
    return tracking.wandb_mode(out)


def test_wandb_is_offline_without_a_login(tmp_path: Path) -> None:
    mode, why = said(tmp_path)
    assert mode == "offline"
    assert why == (
        f"offline, for no login was found. Log in with `wandb login`, or upload later: wandb sync "
        f"{tmp_path / 'wandb' / 'offline-run-*'}"
    )


@pytest.mark.parametrize("mode", ["offline", "disabled", "online"])
def test_wandb_mode_is_followed(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert said(tmp_path)[0] == mode


def test_a_settings_file_is_followed(nobody: Path, tmp_path: Path) -> None:
    (nobody / "wandb").mkdir()
    (nobody / "wandb" / "settings").write_text("[default]\nmode = disabled\n")
    assert said(tmp_path) == ("disabled", "disabled, as it is configured")


def test_an_api_key_is_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    mode, why = said(tmp_path)
    assert (mode, why.rpartition(", ")[2]) == ("online", "by the configured API key")


@pytest.mark.parametrize("host", ["own server", "api.wandb.ai", "another"])
@pytest.mark.parametrize("place", [".netrc", "_netrc", "elsewhere"])
def test_what_wandb_login_wrote_is_a_login(
    host: str, place: str, nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"own server": "wandb.example.org", "another": "example.org"}.get(host, host)
    (nobody / place).write_text(f"machine {machine}\n  login user\n  password {'0' * 40}\n")
    if place == "elsewhere":
        monkeypatch.setenv("NETRC", str(nobody / place))
    if host == "own server":
        monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert said(tmp_path)[0] == ("offline" if host == "another" else "online")


def test_a_login_for_another_server_is_none(nobody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nobody / ".netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert said(tmp_path)[0] == "offline"
    (nobody / ".netrc").write_text("machine\n")
    assert said(tmp_path)[0] == "offline"


def test_a_run_says_how_wandb_is_used(tmp_path: Path) -> None:
    said = io.StringIO()
    loop.train(small(tmp_path / "run", tracking__trackers=["wandb"]), console=Console(file=said, width=200))
    assert "wandb: offline, for no login was found." in said.getvalue()
    assert list((tmp_path / "run").rglob("offline-run-*"))


def test_a_tracker_that_does_not_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", fails)
    with pytest.raises(ConfigError, match=r"one of wandb does not start: No API key configured\. Use `wandb login`"):
        go(small(tmp_path / "run", tracking__trackers=["wandb"]))
