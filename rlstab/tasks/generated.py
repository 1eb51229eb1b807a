"""The base of generated tasks: unlimited problems by seed and index, one in eight of them held out."""

import random
import zlib

from rlstab.core.method_settings import check_choices
from rlstab.errors import OutOfRange
from rlstab.tasks.task import Example, Split

#: One problem in this many belongs to the eval split.
EVAL_SHARE = 8

#: Problems that are drawn for an example before a split counts as empty.
DRAWS = 10_000


class Generated:
    """Problems that are drawn, and scored in this process by an exact checker.

    One problem in eight belongs to the eval split, which depends on the problem and not on the seed: training never
    shows an eval problem.

    Attributes:
        seed: chooses the sequence of problems.
    """

    name: str
    keeps_special_tokens = True  # the answer ends with `$`, which is the EOS token of the shipped model
    workers = None
    seed: int

    def __post_init__(self) -> None:
        self.size: dict[Split, int | None] = {"train": None, "eval": None}

    def draw(self, rng: random.Random) -> tuple[Example, str]:
        """A problem, and the text that decides whether it is held out."""
        raise NotImplementedError

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split.

        Raises:
            OutOfRange: the settings leave too few different problems.
        """
        check_choices(Generated.example, split=split)
        # a string seed is hashed with SHA-512: the same on every machine, and unrelated for neighbouring indices
        rng = random.Random(f"{self.name} {self.seed} {split} {index}")
        for _ in range(DRAWS):
            example, key = self.draw(rng)
            if (zlib.crc32(key.encode()) % EVAL_SHARE == 0) == (split == "eval"):
                return example
        raise OutOfRange(
            f"{self} has no problem for the {split} split: there are too few different ones. Allow more or larger "
            f"numbers."
        )

    def require(self, **ranges: tuple[float, float]) -> None:
        """Raise OutOfRange for a setting that is neither None nor within its range, ends included."""
        for name, (lowest, highest) in ranges.items():
            value = getattr(self, name)
            if value is not None and not lowest <= value <= highest:
                raise OutOfRange(f"{self} takes as `{name}` {lowest} to {highest}. Set it within that range.")
