"""The exact quantile of a whole optimizer step, q = 0.8 with linear interpolation, against other exact ways to it.

    python -m benchmarks quantile --n 2**18,2**22,2**24+1,2**25 --json

`torch.quantile` sorts, and raises above 2^24 values; `sort`, `kthvalue` and `numpy.partition` need all values in one
process; `rlstab` selects by radix what a step settles, and sums at most 32 KB three times over ranks where there are
several. Values are float32, exponential, as entropies are. `kthvalue` is asked twice, for the two neighbours of the
quantile. All agree to the last bit of float32 before anything is timed.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.protocol import SEED, Case, Run, interleave, listed, measured, parser
from rlstab import Pool
from rlstab.core.comm import LocalComm
from rlstab.core.stats import settle

Q = 0.8
#: Where torch.quantile refuses.
LIMIT = 1 << 24


def between(low: float, high: float, size: int) -> float:
    """Linear interpolation at position q (n - 1), in float64."""
    position = Q * (size - 1)
    return low + (high - low) * (position - math.floor(position))


def by_sort(values: Tensor) -> float:
    below = math.floor(Q * (values.numel() - 1))
    low, high = values.sort().values[below : below + 2].tolist()
    return between(low, high, values.numel())


def by_kthvalue(values: Tensor) -> float:
    below = math.floor(Q * (values.numel() - 1))
    low, high = (float(values.kthvalue(below + rank).values) for rank in (1, 2))
    return between(low, high, values.numel())


def by_numpy(values: Tensor) -> float:
    below = math.floor(Q * (values.numel() - 1))
    parted = np.partition(values.numpy(), [below, below + 1])
    return between(float(parted[below]), float(parted[below + 1]), values.numel())


def by_rlstab(values: Tensor) -> float:
    threshold = settle([{"entropy": Pool.quantile(values, Q)}], LocalComm())["entropy"]
    assert threshold.value is not None
    return threshold.value


def by_torch(values: Tensor) -> float:
    return float(torch.quantile(values, Q))


WAYS: dict[str, Callable[[Tensor], float]] = {
    "rlstab": by_rlstab,
    "torch.quantile": by_torch,
    "sort": by_sort,
    "kthvalue": by_kthvalue,
    "numpy.partition": by_numpy,
}


def number(text: str) -> int:
    """``262144``, ``2**18`` or ``2**24+1``."""
    return sum(int(base) ** int(power or 1) for base, _, power in (term.partition("**") for term in text.split("+")))


def agreed(values: Tensor) -> dict[str, str]:
    """Who gives no answer, and what it says; all others give the same float32.

    Raises:
        AssertionError: two of them do not.
    """
    refused, reference = {}, np.float32(by_rlstab(values))
    for name, way in WAYS.items():
        try:
            quantile = np.float32(way(values))
        except RuntimeError as error:
            refused[name] = str(error)
            continue
        # torch.quantile interpolates in float32
        assert abs(quantile - reference) <= np.spacing(reference) * (name == "torch.quantile"), (
            name,
            quantile,
            reference,
        )
    return refused


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--n", default="2**18,2**22,2**24+1,2**25", help="numbers of values")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    run = Run("quantile", options.json)
    run.say()
    drawn = Table("values", "case", title=f"exact {Q} quantile, float32")
    for title in ("CPU ms", "x rlstab"):
        drawn.add_column(title, justify="right")
    for size in map(number, listed(options.n)):
        values = torch.empty(size).exponential_(generator=torch.Generator().manual_seed(SEED))
        refused = agreed(values)
        cases = {
            name: Case(lambda _, way=way, values=values: way(values))
            for name, way in WAYS.items()
            if name not in refused
        }
        times, units = interleave(cases, options.repeat)
        timed = measured(times, units)
        for name in WAYS:
            if name in refused:
                run.add(name, shape=[size], dtype="float32", error=refused[name])
                drawn.add_row(f"{size:,}", name, "raises", f"[dim]{refused[name][:40]}")
                continue
            ratio = timed["rlstab"]["ratio_to"].get(name, 1.0)
            run.add(name, shape=[size], dtype="float32", q=Q, **timed[name])
            drawn.add_row(f"{size:,}", name, f"{1000 * timed[name]['cpu_s']:.2f}", f"{ratio:.1f}")
        drawn.add_section()
    run.console.print(drawn)


if __name__ == "__main__":
    main()
