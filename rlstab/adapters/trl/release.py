"""Whether the adapter knows the installed TRL: the trainer and its release, and the attributes that it reads."""

from __future__ import annotations

import sys
from typing import Any

import trl

from rlstab.adapters import releases
from rlstab.adapters.evidence import ids_of_tokens
from rlstab.errors import HostError
from rlstab.hosts import facts


def check_release(version: str = trl.__version__) -> None:
    """Refuse a TRL that the adapter does not know; warn if what it builds on has changed since it was tested.

    Raises:
        HostError: it has another release, another package replaced the trainer or one of its methods, or a method has
            other parameters.
    """
    trainer = trl.GRPOTrainer  # looked up now: a package may replace it at any time
    named = f"{trainer.__module__}.{trainer.__qualname__}"
    if named != "trl.trainer.grpo_trainer.GRPOTrainer" or "unsloth" in sys.modules:
        package = "Unsloth is imported and patches" if "unsloth" in sys.modules else f"{named} replaces"
        raise HostError(
            f"{package} TRL's GRPOTrainer, and the adapter builds on TRL's own. Do not import that package in this "
            f"process, or train without the adapter."
        )
    releases.check_release("trl", version)


def check_attributes(trainer: Any) -> None:
    """Refuse a trainer without a private attribute that the adapter reads.

    Raises:
        HostError: names it.
    """
    missing = [name for name in facts("trl")["attributes"] if not hasattr(trainer, name)]
    if missing:
        raise HostError(
            f"GRPOTrainer of TRL {trl.__version__} has no {missing[0]}, which the adapter reads. "
            f"{releases.how_to_install('trl')}"
        )


def ends_of(trainer: Any) -> set[int]:
    """Ids of tokens that end a response; before TRL 1.16 only the EOS of the tokenizer."""
    tokenizer = trainer._tokenizer
    return ids_of_tokens(getattr(trainer, "eos_token_ids", tokenizer.eos_token_id), tokenizer.pad_token_id)
