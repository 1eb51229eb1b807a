"""Reads the files of other trainers: which trainer wrote a file, and the optimizer steps of its responses."""

from collections.abc import Iterator
from pathlib import Path

from rlstab.console import counted
from rlstab.dump_files import token_files
from rlstab.errors import ReportError, reason
from rlstab.files import is_dir, is_file
from rlstab.record import nemo_rl, prime_rl, slime
from rlstab.record.columns import Response
from rlstab.record.step import Damaged, Header, Step, joined, rank_of, together
from rlstab.safe_read import open_file, read_object


def read_foreign(path: Path, notes: list[str]) -> list[Step]:
    """The optimizer steps in the files of another trainer.

    Args:
        path: a file, or a folder of files: ``token_exports`` of prime-rl, ``train_data_stepN.jsonl`` of NeMo-RL, what
            ``--save-debug-train-data`` of slime or miles writes (``.pt``).
        notes: a list to which notes on what was left out are added.

    Raises:
        ReportError: it is a rollout dump of verl, which has no tokens.
    """
    files = token_files(path) if is_dir(path) else [path]
    responses: list[Response] = []
    for file in files:
        damaged: list[str] = []
        read, unit = (slime.responses_in, "response") if file.suffix == ".pt" else (_lines, "line")
        try:
            for number, response in enumerate(read(file), 1):
                if isinstance(response, Response):
                    responses.append(response)
                else:
                    damaged.append(f"{unit} {number}: {response}")
        except (Damaged, OSError) as error:
            notes.append(f"{file.name} is left out: {reason(error)[:200]}.")
        if damaged:
            notes.append(f"{file.name}: left out {counted(len(damaged), unit)} that cannot be read ({damaged[0]}).")
    for folder in sorted({file.parent for file in files}):
        if folder.name.startswith("step_") and not is_file(folder / "STABLE"):
            notes.append(f"{folder.name} was not finished: it has no file STABLE.")
    orders = 1 + max((response.order for response in responses), default=0)
    if orders > 1:
        notes.append("Log-probs are those at the start of a rollout: ratios in its later optimizer steps are unknown.")
    ranks: dict[tuple[int, str, int], list[Response]] = {}
    for response in responses:
        key = response.rollout * orders + response.order, response.host, response.rank
        ranks.setdefault(key, []).append(response)
    steps: dict[int, list[Step]] = {}
    for (number, host, _), members in sorted(ranks.items(), key=lambda item: item[0]):
        tensors = together([response.tensors for response in members])
        if not bool(tensors["rewards"].isfinite().any()):
            del tensors["rewards"]
        parts, tensors["parts"] = tensors["parts"].unique(return_inverse=True)
        loss = prime_rl.LOSS if host == prime_rl.DEFAULT else None
        of_step = steps.setdefault(number, [])
        of_step.append(rank_of(Header(host=host, step=number, rank=len(of_step), parts=len(parts), loss=loss), tensors))
    return [joined(of_step) for _, of_step in sorted(steps.items())]


def _lines(file: Path) -> Iterator[Response | Damaged]:
    """The responses in a file of JSON lines; for a line that cannot be used, the reason."""
    with open_file(file) as lines:
        for line in lines:
            record = read_object(line)
            if {"input", "output", "score"} <= record.keys():
                raise ReportError(
                    f"{file}: a rollout dump of verl has texts and scores but neither tokens nor log-probs, which a "
                    f"look needs. Let the adapter for verl write dumps."
                )
            try:
                prime = "loss_mask" in record  # NeMo-RL has token_loss_mask
                yield prime_rl.response_of(record) if prime else nemo_rl.response_of(record, file.stem)
            except Damaged as error:
                yield error
