"""What a plan asks of other ranks: collectives and bytes of one optimizer step, against tokens and methods.

    python -m benchmarks collectives

They are counted, not timed, so the figures hold on any machine. Bytes are what one rank hands over.
"""

import argparse
import warnings

from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.modules import Step, chosen
from rlstab import make_plan
from rlstab.errors import FitWarning

#: Rows and tokens of each.
SHAPES = ((16, 256), (64, 1024), (64, 4096))


class Counting:
    """A rank among others, which have nothing: counts what it is asked for."""

    def __init__(self) -> None:
        self.calls, self.sent = 0, 0

    def sum(self, values: Tensor) -> Tensor:
        """Return ``values``."""
        self.calls, self.sent = self.calls + 1, self.sent + 8 * values.numel()
        return values.clone()

    gather = sum


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--modules", default="1,5,10,all", help="how many methods")
    given = arguments.parse_args()
    warnings.simplefilter("ignore", FitWarning)
    table = Table("methods", "tokens", "collectives", "kB")
    for name, objective in chosen(given.modules.split(","), print).items():
        for rows, length in SHAPES:
            comm = Counting()
            made = Step(rows, length)
            make_plan(objective, [made.pack(objective)], comm=comm)
            table.add_row(name, f"{rows * length:,}", str(comm.calls), f"{comm.sent / 1000:,.0f}")
    Console().print(table)
