"""What an installation has: the packages of each extra, asked for before they are imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from rlstab.errors import MissingPackage

#: Extra to the names by which its packages are imported. Not wandb, of `train`: a run that does not track by it does
#: without.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("transformers", "accelerate", "einops", "safetensors", "filelock"),
    "report": ("scipy", "matplotlib", "plotly", "jinja2"),
}


#: What single settings need, by extra, with the packages as they are imported.
OF_SETTINGS: Mapping[str, str] = {"lora": "peft", "datasets": "datasets"}


def require_package(extra: str, who: str) -> None:
    """The same for an extra of one package, which a setting needs.

    Raises:
        MissingPackage: with the command that installs it.
    """
    if find_spec(OF_SETTINGS[extra]) is None:
        raise MissingPackage(
            f'{who} needs the package {OF_SETTINGS[extra]}, which is not installed. Run: pip install "rlstab[{extra}]"'
        )


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed, by the names under which they are imported."""
    return [one for one in EXTRAS[extra] if find_spec(one) is None]


def require(extra: str, who: str) -> None:
    """Look for the packages of an extra, and import none.

    Args:
        extra: key of :data:`EXTRAS`.
        who: what needs them, as the subject of the error.

    Raises:
        MissingPackage: names what is missing, and the command that installs it.
    """
    lacking = missing(extra)
    if lacking:
        raise MissingPackage(
            f"{who} needs the extra `{extra}`: {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not "
            f'installed. Run: pip install "rlstab[{extra}]"'
        )
