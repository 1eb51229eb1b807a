"""Whether the adapter knows the installed TRL: its release, the methods in use, and that nothing patched them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import version as installed
from typing import Any

import trl
from packaging.version import Version

from rlstab.adapters.releases import check_methods
from rlstab.errors import HostError

#: The release whose private parts the adapter was written against, and what the tests have beside it.
RELEASE = "1.16"
BESIDE: Mapping[str, str] = {"transformers": "5.23", "accelerate": "1.15"}
_CURE = f"Install the release that the adapter was tested with: pip install 'trl=={RELEASE}.*'"
#: Methods that the adapter overrides, calls or relies on line by line: the names of their first parameters, and the
#: checksum of their syntax as tested.
METHODS: Mapping[str, tuple[str, str]] = {
    "_prepare_inputs": ("self generation_batch", "b6f38f7a05aa"),
    "_compute_loss": ("self model inputs", "6b861df63f5a"),
    "_generate_and_score_completions": ("self inputs", "739def7da67c"),
    "_calculate_rewards": ("self inputs prompts completions completion_ids_list", "a30f2929443b"),
    "_get_per_token_logps_and_entropies": (
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss",
        "3a8a45615a71",
    ),
    "_load_optimizer_and_scheduler": ("self checkpoint", "f0236c69fcf3"),
    "training_step": ("self model inputs num_items_in_batch", "96c133253ca1"),
    "save_model": ("self output_dir _internal_call", "367583b4b2cf"),
    "_save_checkpoint": ("self model trial", "96c508fc0fca"),
    "_maybe_log_save_evaluate": ("self", "d8571f120c82"),
    "_finalize_training": ("self", "96bc675177f3"),
    "_run_epoch": ("self model epoch train_dataloader", "00466c2a085d"),  # the callbacks around the optimizer
}
#: What the adapter reads of a trainer that is made.
ATTRIBUTES = ("_buffered_inputs", "_step", "_metrics", "_logs", "_tokenizer", "_is_vlm")
#: Who may have defined a method of the trainer.
_HOMES = ("trl.", "transformers.")


def check_release(version: str = trl.__version__) -> None:
    """Refuse a TRL that the adapter does not know; warn where what it stands on is not as tested.

    Raises:
        HostError: it is another release than 1.16, somebody replaced the trainer or one of its methods, or a method has
            other parameters.
    """
    if Version(version).release[:2] != Version(RELEASE).release:
        raise HostError(f"TRL {version} is installed, and the adapter was tested with {RELEASE} alone. {_CURE}")
    trainer = trl.GRPOTrainer  # looked up now: a package may replace it at any time
    named = f"{trainer.__module__}.{trainer.__qualname__}"
    if named != "trl.trainer.grpo_trainer.GRPOTrainer" or "unsloth" in sys.modules:
        who = "Unsloth is imported and patches" if "unsloth" in sys.modules else f"{named} takes the place of"
        raise HostError(
            f"{who} TRL's GRPOTrainer, and the adapter builds on TRL's own. Do not import that package in this "
            f"process, or train without the adapter."
        )
    changed = check_methods(trainer, METHODS, release=f"TRL {version}", homes=_HOMES, cure=_CURE)
    if changed:
        warnings.warn(
            f"{', '.join(changed)} of TRL {version} or its transformers changed since the adapter was tested. What is "
            f"new there may be missing here. Compare one step with TRL's own loss, or install {tested()}.",
            stacklevel=3,
        )
    other = [name for name, known in BESIDE.items() if Version(installed(name)).release[:2] != Version(known).release]
    if other:
        beside = ", ".join(f"{name} {installed(name)}" for name in other)
        warnings.warn(f"the adapter was not tested with {beside}, but with {tested()}.", stacklevel=3)


def check_attributes(trainer: Any) -> None:
    """Refuse a trainer without something private that the adapter reads.

    Raises:
        HostError: names it.
    """
    missing = [name for name in ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        raise HostError(f"GRPOTrainer of TRL {trl.__version__} has no {missing[0]}, which the adapter reads. {_CURE}")


def tested() -> str:
    """The releases that the tests have."""
    return ", ".join(f"{name} {release}" for name, release in {"trl": RELEASE, **BESIDE}.items())
