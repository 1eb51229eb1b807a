"""Metrics that a trainer printed, in a file or in text that was copied from a terminal, a notebook or an issue.

Sources: ProgressCallback and PrinterCallback of transformers 5.23 (TRL, open-r1), which print no step, and numbers as
text since 5.0; swift/trainers/patcher.py of ms-swift at 3602360; openrlhf/trainer/ppo_trainer.py of OpenRLHF at
3c3be62; skyrl/train/utils/tracking.py of SkyRL at a956457; verl/utils/logger of verl 0.9.
"""

import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlstab.console import counted
from rlstab.logs.log import known, step_of, translated
from rlstab.logs.trackers import Steps
from rlstab.safe_read import as_number

#: Colours and other sequences that control a terminal.
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
#: A step on verl's console; copied from an issue, each metric may have a line.
_VERL = re.compile(r"(?<![\w/])step:(\d{1,18})\s+- (.*(?:\n *- .*)*)")
#: The metrics of a step as a dictionary of Python or JSON, in one line or, by pprint, in many.
_DICTIONARY = re.compile(r"\{\s*[\"'][^{}]*\}")
_ITEM = re.compile(r"[\"']([^\"']+)[\"']\s*:\s*(?:[\"']([^\"']*)[\"']|([^,}]+))")
#: The number of the step, in this many characters before a dictionary.
_STEP, _BEFORE = re.compile(r"(?:step|iteration|rollout)\W{0,3}(\d{1,9})[^\w{}][^}]*\Z", re.IGNORECASE), 160
#: A line of a loop of one's own, such as ``step 12 | loss: 0.1 | reward: 0.5`` or ``Step 12: Reward=0.5``.
_LINE = re.compile(r"(?:step|iteration|rollout)\W{0,3}(\d{1,9})\b([^\n{}]*[:=][^\n{}]*)", re.IGNORECASE)
_PAIR = re.compile(r"([A-Za-z][\w/.]*) *[:=] *([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)\b)", re.IGNORECASE)
#: A progress bar, and the end of a description before it, which that of transformers lacks; ms-swift's is Train.
_BAR = re.compile(r"%\|[^|\n]*\| *(\d{1,9})/(\d{1,9}) \[")
_DESCRIBED = re.compile(r"(?<!Train)(?<![\d\]]): *\d+\Z")
#: Steps between two records, among settings that a script has printed.
_INTERVAL = re.compile(r"logging_steps[\"']?\s*[=:]?\s*(\d{1,9})(?![.\d])")
#: A number as numpy or torch prints it: ``np.float64(0.2)``, ``tensor(0.2``.
_NUMBER = re.compile(r"[\w.]+\(([^()]*)\)?")
#: The progress bar gives the steps if it moved between at least this share of the records. Output that Python buffers
#: comes in blocks, and the bar is not buffered.
MOVED = 0.9
#: Trainers, by a metric that no other prints.
_WRITERS = {
    "trainer/epoch": "SkyRL",
    "actor_grad_norm": "OpenRLHF",
    "rollout/raw_reward": "slime",
    "epoch": "TRL",
}


@dataclass
class _Record:
    """Metrics, as text, that were printed at a position of the log; None if their step is not printed with them."""

    position: int
    step: int | None
    values: dict[str, str]


def printed(text: str, remarks: list[str]) -> tuple[str, Steps]:
    """What a console shows.

    Args:
        text: everything that was printed.
        remarks: receives a note if the steps had to be counted.

    Returns:
        the trainer; steps and their values, in order.
    """
    text = _ESCAPE.sub("", text)
    records = sorted(_records(text), key=lambda record: record.position) or list(_pairs(text))
    unnumbered = [record for record in records if record.step is None]
    if any(known(record.values) for record in unnumbered):
        _number(unnumbered, text, remarks)
    names = {name for record in records for name in record.values}
    writer = next((writer for name, writer in _WRITERS.items() if name in names), "")
    writer = writer or ("verl" if _VERL.search(text) else "a console")
    return writer, [(record.step, dict(record.values)) for record in records if record.step is not None]


def _records(text: str) -> Iterator[_Record]:
    for match in _VERL.finditer(text):
        items = (item.strip().rpartition(":") for item in match[2].split(" - "))
        yield _Record(match.start(), int(match[1]), {name: _plain(value) for name, _, value in items})
    for match in _DICTIONARY.finditer(text):
        pairs = _ITEM.findall(match[0].replace("\n", ""))  # a terminal breaks long lines anywhere
        values = {name: _plain(quoted or bare) for name, quoted, bare in pairs}
        if known(values) or translated(dict.fromkeys(values, 0.0)).scores:
            stated = _STEP.search(text[max(0, match.start() - _BEFORE) : match.start()])
            step = step_of(values)
            yield _Record(match.start(), int(stated[1]) if step is None and stated else step, values)


def _pairs(text: str) -> Iterator[_Record]:
    for match in _LINE.finditer(text):
        values = {name.lower(): value for name, value in _PAIR.findall(match[2])}
        if known(values):
            yield _Record(match.start(), int(match[1]), values)


def _plain(value: str) -> str:
    wrapped = _NUMBER.fullmatch(value.strip())
    return wrapped[1] if wrapped else value


def _number(records: Sequence[_Record], text: str, remarks: list[str]) -> None:
    """Number the records of transformers: by the progress bar before each, or by counting them."""
    trained = [record for record in records if known(record.values)]
    bars = [
        (match.start(), int(match[1]), int(match[2]))
        for match in _BAR.finditer(text)
        if not _DESCRIBED.search(text[max(0, match.start() - _BEFORE) : match.start()])
    ]
    starts = [start for start, _, _ in bars]
    before = [bars[index - 1] for record in trained if (index := bisect(starts, record.position))]
    ((total, _),) = Counter(total for *_, total in before or bars).most_common(1) or [(0, 0)]
    steps = [step for _, step, other in before if other == total]
    if len(steps) < len(trained) or sum(map(int.__ne__, steps, steps[1:])) < MOVED * (len(steps) - 1):
        steps = _counted(trained, text, [step for _, step, other in bars if other == total], remarks)
    for record, step in zip(trained, steps, strict=True):
        record.step = step
    for earlier, record in pairwise(records):  # an evaluation comes after the step
        if record.step is None:
            record.step = earlier.step


def _counted(trained: Sequence[_Record], text: str, reached: Sequence[int], remarks: list[str]) -> list[int]:
    """Steps by the order of the records; a run that was resumed goes back to the epoch from which it continued."""
    if stated := _INTERVAL.search(text):
        interval, source = int(stated[1]), "by logging_steps"
    elif reached:
        interval, source = max(1, round(max(reached) / len(trained))), "by the progress bar"
    else:
        interval, source = 1, "since logging_steps is unknown"
    remarks.append(f"its lines have no step: each counts as {counted(interval, 'step')}, {source}")
    epochs = [as_number(record.values.get("epoch", "nan")) or 0.0 for record in trained]
    steps: list[int] = []
    for index, epoch in enumerate(epochs):
        resumed = index and epoch < epochs[index - 1]
        earlier = (step for step, other in zip(steps, epochs, strict=False) if other >= epoch)
        steps.append((next(earlier, 0) if resumed else 0) or (steps[-1] if steps else 0) + interval)
    return steps
