"""The packages of each extra, and whether they are installed, checked before any import.

rlstab is not on a package index; only :func:`how_to_install` says how to install an extra.
"""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from rlstab.errors import ConfigError, MissingPackage

#: The import names of the packages of each extra. `train` is listed without wandb, which only runs that use it need,
#: and `verl` with what its launch imports first.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("transformers", "accelerate", "einops", "safetensors", "filelock"),
    "report": ("scipy", "plotly", "jinja2", "safetensors"),
    "paper": ("matplotlib",),
    "tasks": ("reasoning_gym", "math_verify"),
    "lora": ("peft",),
    "datasets": ("datasets",),
    "tensorboard": ("tensorboard",),
    "slurm": ("submitit",),
    "testing": ("pytest",),
    "trl": ("trl",),
    "axolotl": ("axolotl",),
    "verl": ("verl", "transfer_queue", "cachetools"),
    "skyrl": ("skyrl", "ray", "jaxtyping", "loguru", "omegaconf"),
    "tinker": ("tinker",),
}


#: Extras whose packages pin other releases than constraints.txt.
PINNED = ("axolotl", "skyrl")


def how_to_install(*extras: str) -> str:
    """The sentence that says how to install extras."""
    pins = "" if {*extras} & {*PINNED} else f"-c constraints{'-verl' if 'verl' in extras else ''}.txt "
    extra = f"'.[{','.join(extras)}]'"
    return f"In the folder of your clone of rlstab, run: pip install {pins}-e {extra}"


def missing(extra: str, *packages: str) -> list[str]:
    """The import names of packages of an extra that are not installed, of all its packages by default."""
    return [name for name in packages or EXTRAS[extra] if find_spec(name) is None]


def require(extra: str, who: str, *packages: str) -> None:
    """Require packages of an extra without importing them.

    Args:
        extra: key of :data:`EXTRAS`.
        who: needs them, as the subject of the error.
        packages: their import names; all of the extra by default.

    Raises:
        MissingPackage: names the missing packages, and the command that installs them.
    """
    absent = missing(extra, *packages)
    if absent:
        raise MissingPackage(
            f"{who} needs the extra `{extra}`: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not "
            f"installed. {how_to_install(extra)}"
        )


def require_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that are not installed, which accelerate would silently leave out.

    Raises:
        ConfigError: a package is missing.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"tracking.trackers: {name} is not installed. Run `pip install {name}`, or remove it here."
            )
