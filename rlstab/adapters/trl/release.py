"""Whether the adapter knows the installed TRL: the trainer and its release, and the attributes that it reads."""

import sys
from typing import Any

import trl
from trl import GRPOTrainer

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
    check_unpatched()
    releases.check_release("trl", version)


def check_unpatched() -> None:
    """Refuse a trainer that is not TRL's own, whether it was replaced before the adapter was imported or later.

    Unsloth's overrides ``compute_loss`` and never calls ``_compute_loss``, so that an objective would have no effect.

    Raises:
        HostError: names the package or the class.
    """
    unsloth = not sys.modules.keys().isdisjoint(("unsloth", "unsloth_zoo"))
    for trainer in (GRPOTrainer, trl.GRPOTrainer):
        name = f"{trainer.__module__}.{trainer.__qualname__}"
        if unsloth or name != "trl.trainer.grpo_trainer.GRPOTrainer":
            raise HostError(
                f"{'Unsloth is imported and patches' if unsloth else f'{name} replaces'} TRL's GRPOTrainer. The "
                f"adapter builds on TRL's own; in another an objective may have no effect. Do not import that package "
                f"in this process, or train without the adapter."
            )


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


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer of a trainer, which ``GRPOTrainer`` takes out of a processor."""
    return getattr(trainer, "_tokenizer", trainer.processing_class)


def ends_of(trainer: Any) -> set[int]:
    """Ids of tokens that end a response; before TRL 1.16 only the EOS of the tokenizer."""
    tokenizer = tokenizer_of(trainer)
    return ids_of_tokens(getattr(trainer, "eos_token_ids", tokenizer.eos_token_id), tokenizer.pad_token_id)
