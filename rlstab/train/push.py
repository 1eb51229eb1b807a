"""``rlstab push``: the model of a run to the hub, only when asked, and private unless one says otherwise."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from rlstab.errors import CheckpointError, ConfigError
from rlstab.hub import first_line
from rlstab.paths import is_file
from rlstab.train import card, checkpoint
from rlstab.train.manifest import CHECKPOINTS

#: What only a resumed run needs.
LEFT_OUT = (checkpoint.INDEX, "trainer.safetensors")


def push(source: str | Path, repo: str, *, public: bool = False) -> str:
    """Upload the newest checkpoint of a run, less the state of the optimizer; return where it is.

    Args:
        source: a run folder, or a checkpoint.
        repo: ``name`` or ``user/name`` of the model repository, which is made if it is not there.
        public: make a new repository public; one that is there stays as it is.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: nobody is logged in, or the hub refuses.
    """
    folder = _model(Path(source))
    if huggingface_hub.get_token() is None:
        raise ConfigError(
            "nobody is logged in to the hub. Run `hf auth login`, or set HF_TOKEN to a token that can write."
        )
    api = huggingface_hub.HfApi()
    try:
        found = api.create_repo(repo, private=not public, exist_ok=True).repo_id
        api.upload_folder(
            repo_id=found,
            folder_path=folder,
            ignore_patterns=list(LEFT_OUT),
            commit_message=f"Upload {folder.name} of {folder.parent.parent.absolute().name}, trained with rlstab",
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"'{repo}' cannot be written on {huggingface_hub.constants.ENDPOINT}: {first_line(error)}. Check the name, "
            f"the token and the network; what was uploaded so far is not lost."
        ) from error
    return f"{huggingface_hub.constants.ENDPOINT}/{found}"


def has_card(source: str | Path) -> bool:
    """Whether the model that :func:`push` takes has a card: an unfinished run has none."""
    return (_model(Path(source)) / card.NAME).is_file()


def _model(source: Path) -> Path:
    there = [source] if is_file(source / checkpoint.INDEX) else checkpoint.checkpoints(source / CHECKPOINTS)
    if not there:
        raise CheckpointError(f"{source} has no checkpoint. Give the folder of a run that has one, or a checkpoint.")
    try:
        checkpoint.verify(there[-1])
    except checkpoint.Damaged as why:
        raise CheckpointError(f"{there[-1]} is damaged ({why}). Give another checkpoint.") from why
    return there[-1]
