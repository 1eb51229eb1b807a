"""Any data set of reasoning-gym, by name."""

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from types import ModuleType
from typing import Any

from rlstab.errors import OutOfRange, UnknownName, did_you_mean
from rlstab.extras import require
from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.prompt_template import PromptTemplate
from rlstab.tasks.scorers import GymScorer
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Example, Split

# reasoning-gym makes item i of a data set from the number `data set's seed + i`, and some libraries below it take 32
# bits at most. So a block of 64 items takes a whole range of 64 such numbers: those of training lie in the lower half
# of the 32 bits, those of evaluation in the upper half, and none is used twice.
BLOCK = 64
BLOCKS = 2**31 // BLOCK


class ReasoningGym:
    """Examples and scores of one reasoning-gym data set, generated without end.

    The score is the data set's own `score_answer`. Many give partial credit, some give a little (0.01) to any wrong
    answer, and a few raise on malformed answers.

    Train and eval draw from different random numbers; in a data set with few different problems, the same problem can
    still come up in both.

    Args:
        dataset: its name in reasoning-gym, such as `chain_sum`.
        options: its settings, such as `{"min_terms": 2}`.
        seed: chooses the sequence of examples.
        eval_size: how many examples an evaluation takes.
        prompt_template: the prompt, with `{question}` where the question belongs.
        answer_pattern: a regular expression whose group 1 is the answer; its last match counts, and a completion
            without a match scores 0. None: the completion, without surrounding blanks, is the answer.
        threshold: if set, a score of at least this becomes 1, and any other 0.
        time_limit: seconds that a completion may take to score; then it gets 0.
        workers: processes that score.
        execute_completions: allow a data set whose own scorer executes completions as Python. That happens in a
            sandbox, which needs Linux and a kernel that lets users make namespaces.

    Raises:
        MissingPackage: if reasoning-gym is not installed.
        UnknownName: if there is no such data set, or it has no such setting.
        OutOfRange: if a setting has a value that cannot be used, or the data set executes completions and that was not
            allowed.
        ScorerError: if the sandbox cannot be made.
    """

    keeps_special_tokens = False

    def __init__(
        self,
        dataset: str,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        eval_size: int = 256,
        prompt_template: str = "{question}",
        answer_pattern: str | None = None,
        threshold: float | None = None,
        time_limit: float = 5.0,
        workers: int = 2,
        execute_completions: bool = False,
    ) -> None:
        if eval_size < 1:
            raise OutOfRange(f"`eval_size` is {eval_size}. Set it to 1 or more.")
        self.name = dataset
        self.seed = seed
        self.size: dict[Split, int | None] = {"train": None, "eval": eval_size}
        self._template = PromptTemplate(prompt_template, "question")
        pattern = AnswerPattern(answer_pattern)
        self._factory = _factory()
        self._options = dict(options or {})
        self._check_names()
        self._first_block = int.from_bytes(hashlib.sha256(f"{dataset} {seed}".encode()).digest()[:8], "big")
        self._blocks: dict[Split, tuple[int, Any]] = {}
        try:
            self._make_block("train", 0)
        except Exception as error:  # a data set checks its settings with assertions, and may fail in any way
            raise OutOfRange(
                f"reasoning-gym refused the settings {self._options} of {dataset!r}: "
                f"{error or type(error).__name__}. Change `options`."
            ) from error
        executes = dataset in executing()
        if executes and not execute_completions:
            raise OutOfRange(
                f"The scorer of reasoning-gym's data set {dataset!r} executes completions as Python: what the model "
                "writes would run on this machine. Choose another data set, or set `execute_completions: true`, and "
                "they run in a sandbox. SECURITY.md says what it protects."
            )
        scorer = GymScorer(dataset, self._options, pattern, threshold)
        self.workers = Workers(scorer, workers, time_limit, sandboxed=executes)
        if executes:
            self.workers.start()

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is reasoning-gym's entry (question, answer, metadata)."""
        block, within = divmod(index, BLOCK)
        # only the last block of each split is kept: a run asks for one index after the other
        if split not in self._blocks or self._blocks[split][0] != block:
            self._blocks[split] = (block, self._make_block(split, block))
        with _global_random_from(f"{self.name} {self.seed} {split} {index}"):
            entry = self._blocks[split][1][within]
        return Example(self._template.fill(entry["question"]), entry)

    def score(self, example: Example, completion: str) -> float:
        """Return the data set's score of the answer in a completion.

        Raises:
            ScorerError: whatever the data set's scorer raises, or it takes too long.
        """
        return self.workers.score_one(example.answer, completion)

    def _make_block(self, split: Split, block: int) -> Any:
        start = (self._first_block + block) % BLOCKS + (BLOCKS if split == "eval" else 0)
        return self._factory.create_dataset(self.name, seed=start * BLOCK, size=BLOCK, **self._options)

    def _check_names(self) -> None:
        if self.name not in self._factory.DATASETS:
            raise UnknownName(
                f"reasoning-gym has no data set {self.name!r}. {did_you_mean(self.name, self._factory.DATASETS)}"
            )
        config = self._factory.DATASETS[self.name][1]
        known = {field.name for field in dataclasses.fields(config)} - {"seed", "size"}
        for name in self._options:
            if name in ("seed", "size"):
                raise UnknownName(
                    f"`options` of {self.name!r} sets {name!r}, which this task chooses itself. "
                    "Set the task's own `seed` or `eval_size` instead."
                )
            if name not in known:
                raise UnknownName(
                    f"reasoning-gym's data set {self.name!r} has no setting {name!r}. {did_you_mean(name, known)}"
                )


def executing() -> frozenset[str]:
    """The data sets of reasoning-gym whose scorers execute completions; `tests/tasks/test_executing.py` finds them."""
    text = resources.files("rlstab").joinpath("data/reasoning_gym.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text)["executes"])


@contextmanager
def _global_random_from(seed: str) -> Iterator[None]:
    """Fix Python's global random numbers for a while, because `list_functions` draws from them beside its own."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _factory() -> ModuleType:
    require("tasks", "The task reasoning_gym", "reasoning_gym")
    from reasoning_gym import factory

    found: ModuleType = factory
    return found
