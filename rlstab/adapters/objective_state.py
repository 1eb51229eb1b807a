"""The state of the objective among the files of a host's checkpoint."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save_file

from rlstab.config import objective_hash
from rlstab.core.objective import State, TokenObjective
from rlstab.core.saved_state import dump_state, load_state
from rlstab.errors import CheckpointError
from rlstab.safe_read import parse_json, read_bytes

#: Files in a checkpoint of the host; the second exists if a state holds tensors.
RECORD, TENSORS = "rlstab.json", "rlstab.safetensors"


def keep_state(folder: str | Path, objective: TokenObjective, state: State) -> None:
    """Write the state into a checkpoint."""
    record, tensors = dump_state({key: state[key] for key in objective.init_state()})
    Path(folder).mkdir(parents=True, exist_ok=True)  # a sharded host may write later, and another rank first
    if tensors:
        save_file({name: values.cpu() for name, values in tensors.items()}, Path(folder) / TENSORS)
    Path(folder, RECORD).write_text(json.dumps({"objective": objective_hash(objective), **record}, indent=1))


def restore_state(folder: str | Path, objective: TokenObjective) -> State:
    """The state from a checkpoint.

    Raises:
        CheckpointError: the checkpoint has no state, a damaged one, or that of another objective.
    """
    path = Path(folder) / RECORD
    cure = "Resume with the objective of that run, or load the weights of this checkpoint as the model of a new one."
    if not path.exists():
        raise CheckpointError(f"{folder} has no {RECORD}: another trainer wrote it. {cure}")
    try:
        record = parse_json(read_bytes(path))
        tensors = load(read_bytes(Path(folder) / TENSORS)) if record["tensors"] else {}
        expected, stored = objective_hash(objective), record["objective"]
        state = load_state(record, tensors)
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Resume from the checkpoint before it.") from error
    if stored != expected:
        raise CheckpointError(f"{folder} belongs to the objective {stored}, and the trainer has {expected}. {cure}")
    return state
