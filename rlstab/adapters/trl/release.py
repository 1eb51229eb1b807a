"""Whether the installed TRL is one that the adapter knows: its version, its private methods, and nobody's patch."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping

import trl
from packaging.version import Version
from transformers import Trainer
from trl import GRPOTrainer

from rlstab.adapters.releases import changed_bodies, check_methods
from rlstab.errors import HostError

#: The first release whose methods the adapter was written against.
OLDEST = "1.16"
#: Private methods that the adapter overrides or calls, with the names of their first parameters.
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "_prepare_inputs": ("self", "generation_batch"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": (
        *("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        *("compute_entropy", "compute_aux_loss"),
    ),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
}
#: What the adapter takes over or relies on line by line, with checksums of its syntax in releases that were tested.
TESTED: Mapping[str, frozenset[str]] = {
    "_prepare_inputs": frozenset({"b6f38f7a05aa"}),
    "_compute_loss": frozenset({"6b861df63f5a"}),
    "training_step": frozenset({"96c133253ca1"}),
}
#: Who may have defined a method of the trainer.
_HOMES = ("trl.", "transformers.")


def check_release(trainer: type[GRPOTrainer] | None = None, version: str = trl.__version__) -> None:
    """Refuse a TRL that the adapter does not know.

    Raises:
        HostError: it is older than 1.16, somebody replaced the trainer or one of its methods, or a method has other
            parameters.
    """
    if Version(version) < Version(OLDEST):
        raise HostError(
            f"TRL {version} is installed, and the adapter needs {OLDEST} or later. Run: pip install 'trl>={OLDEST}'"
        )
    trainer = trl.GRPOTrainer if trainer is None else trainer  # looked up now: a package may replace it at any time
    named = f"{trainer.__module__}.{trainer.__qualname__}"
    if named != "trl.trainer.grpo_trainer.GRPOTrainer" or "unsloth" in sys.modules:
        who = "Unsloth is imported and patches" if "unsloth" in sys.modules else f"{named} takes the place of"
        raise HostError(
            f"{who} TRL's GRPOTrainer, and the adapter builds on TRL's own. Do not import that package in this "
            f"process, or train without the adapter."
        )
    check_methods(trainer, SIGNATURES, release=f"TRL {version}", homes=_HOMES, cure=_CURE)
    home = inspect.unwrap(Trainer._inner_training_loop).__module__
    if not home.startswith(_HOMES):
        raise HostError(f"the training loop of transformers was replaced by {home}. Do not import that package here.")
    changed = changed_bodies(trainer, TESTED)
    if changed:
        warnings.warn(
            f"TRL {version} changed {', '.join(changed)} since the releases that the adapter was tested with. What is "
            f"new there may be missing here. Compare one step with TRL's own loss, or install trl=={OLDEST}.",
            stacklevel=3,
        )


_CURE = f"Install a release that the adapter was tested with: pip install 'trl=={OLDEST}.*'"
