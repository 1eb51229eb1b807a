"""What an installation has: the packages of each extra, looked for before they are imported.

The package is on no index: :func:`how_to_install` is the one place that says how to get an extra.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from rlstab.errors import ConfigError, MissingPackage

#: The names by which the packages of an extra are imported. Not wandb, of `train`: only a run that tracks by it needs
#: it. Of `verl`, what its launch imports first.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("transformers", "accelerate", "einops", "safetensors", "filelock"),
    "report": ("scipy", "plotly", "jinja2", "safetensors"),
    "tasks": ("reasoning_gym", "math_verify"),
    "lora": ("peft",),
    "datasets": ("datasets",),
    "tensorboard": ("tensorboard",),
    "slurm": ("submitit",),
    "testing": ("pytest",),
    "trl": ("trl",),
    "verl": ("verl", "transfer_queue", "cachetools"),
}


def how_to_install(*extras: str) -> str:
    """The sentence that says how to install extras."""
    pins = "-verl" if "verl" in extras else ""
    extra = f"'.[{','.join(extras)}]'"
    return f"In the folder of your clone of rlstab, run: pip install -c constraints{pins}.txt -e {extra}"


def missing(extra: str, *packages: str) -> list[str]:
    """Those of some packages of an extra (all by default) that are not installed, by the names of their imports."""
    return [name for name in packages or EXTRAS[extra] if find_spec(name) is None]


def require(extra: str, who: str, *packages: str) -> None:
    """Look for packages of an extra, and import none.

    Args:
        extra: key of :data:`EXTRAS`.
        who: what needs them, as the subject of the error.
        packages: those that are needed, by the names of their imports; all of the extra by default.

    Raises:
        MissingPackage: names what is missing, and the command that installs it.
    """
    absent = missing(extra, *packages)
    if absent:
        raise MissingPackage(
            f"{who} needs the extra `{extra}`: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not "
            f"installed. {how_to_install(extra)}"
        )


def require_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that are not there, which accelerate would leave out without a word.

    Raises:
        ConfigError: a package is missing.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"tracking.trackers: {name} is not installed. Run `pip install {name}`, or remove it here."
            )
