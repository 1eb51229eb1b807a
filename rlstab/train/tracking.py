"""Tracking through accelerate: JSON lines always, wandb and TensorBoard on request."""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import is_tensorboard_available, is_wandb_available
from rich.console import Console
from rich.markup import escape

from rlstab.config.runs import RunConfig
from rlstab.console import Terminal
from rlstab.errors import ConfigError
from rlstab.train.journal import line

#: Where ``wandb login`` of older versions wrote the login of wandb's own server.
_HOST_BEFORE = "api.wandb.ai"


class JsonLinesTracker(GeneralTracker):
    """One JSON object per rollout in ``metrics.jsonl``, written at once. For the main process alone.

    Args:
        append: takes whole lines.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, append: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # accelerate gives it no types
        self._append = append

    @property
    def tracker(self) -> Any:
        """What lines are given to."""
        return self._append

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration is in ``config.yaml``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._append(line({"rollout": step, **values}))

    def finish(self) -> None:
        """The folder of the run closes its files."""


def require_installed(trackers: Sequence[str]) -> None:
    """Refuse trackers that are not there, which accelerate leaves out without a word.

    Raises:
        ConfigError: a package is missing.
    """
    known = {"wandb": (is_wandb_available, "wandb"), "tensorboard": (is_tensorboard_available, "-e '.[tensorboard]'")}
    for name in trackers:
        available, package = known[name]
        if not available():  # type: ignore[no-untyped-call]  # accelerate gives it no types
            raise ConfigError(
                f"tracking.trackers: {name} is not installed. Run `pip install {package}`, or remove it; metrics.jsonl "
                f"is always written."
            )


def start_trackers(
    accelerator: Accelerator,
    run: RunConfig,
    out: Path,
    append: Callable[[str], None] | None,
    console: Console | None = None,
) -> None:
    """Open the trackers of a run. wandb follows its own settings; without a login it is offline.

    Args:
        accelerator: that logs to them.
        run: whose they are.
        out: its folder.
        append: writes lines of ``metrics.jsonl``; None in all processes but the first.
        console: where to say how wandb is used; standard error if None.

    Raises:
        ConfigError: a tracker does not start.
    """
    options: dict[str, Any] = {"dir": str(out), "name": out.name}
    if append is not None:
        accelerator.log_with.append(JsonLinesTracker(append))
        if "wandb" in run.tracking.trackers:
            mode, why = wandb_mode(out)
            options |= {"mode": mode}
            (console or Terminal(stderr=True)).print(f"wandb: {escape(why)}", highlight=False, soft_wrap=True)
    settings = _flat(run.model_dump(mode="json"))
    try:
        accelerator.init_trackers(run.tracking.project, settings, init_kwargs={"wandb": options})
    except Exception as error:  # foreign code that reads files and calls servers
        if isinstance(error, OSError) and not run.tracking.trackers:
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"tracking.trackers: one of {', '.join(run.tracking.trackers)} does not start: {reason.rstrip('.')}. Mend "
            f"that, or remove it; for wandb, WANDB_MODE=offline needs no server."
        ) from error


def wandb_mode(out: Path) -> tuple[str, str]:
    """The mode in which wandb logs, and why: as its environment and settings files say, offline without a login.

    Args:
        out: folder of the run.
    """
    import wandb  # slow, and only for those who ask for it

    settings = wandb.setup().settings
    mode, server = str(settings.mode or "online"), str(settings.base_url)
    if mode != "online":
        return mode, f"{mode}, as it is configured"
    if settings.api_key or os.environ.get("WANDB_API_KEY"):
        return mode, f"online at {server}, by the configured API key"
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return mode, f"online at {server}, by the identity token"
    hosts = [urlsplit(server).netloc]
    if server == str(wandb.Settings.model_fields["base_url"].default):
        hosts.append(_HOST_BEFORE)
    if any(_in_netrc(host) for host in hosts):
        return mode, f"online at {server}, by the login in the netrc file"
    if os.environ.get("WANDB_MODE") == mode:
        return mode, f"online at {server}, as WANDB_MODE says, and no login was found"
    runs = out / "wandb" / "offline-run-*"
    return "offline", f"offline, for no login was found. Log in with `wandb login`, or upload later: wandb sync {runs}"


def _in_netrc(host: str) -> bool:
    """Whether the file that ``wandb login`` writes has a login for a host; damaged, it has none."""
    home = Path.home()
    places = [os.environ.get("NETRC") or "", str(home / ".netrc"), str(home / "_netrc")]
    try:
        return any(netrc.netrc(one).authenticators(host) for one in places if one and Path(one).is_file())
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False


def _flat(data: Any, place: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        return {path: value for key, one in data.items() for path, value in _flat(one, f"{place}{key}.").items()}
    if isinstance(data, list):
        return _flat({str(index): one for index, one in enumerate(data)}, place)
    return {place.rstrip("."): "null" if data is None else data}
