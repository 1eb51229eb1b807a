"""Peak memory of one forward and backward, in its own process: `python -m benchmarks.memory '{...}'`.

The kernel's high-water mark of resident memory is set back just before, so nothing that came earlier counts. What
Python's own tools see is not what torch takes.
"""

import json
import sys
from pathlib import Path

import torch

from benchmarks.heads import HEADS, Law, Problem, inputs, step, weights_of

MIB = 1 << 20


def resident(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}; memory is measured on Linux only.")


def peak(head: str, problem: Problem, live: float, *, frozen: bool = False) -> dict[str, float]:
    """MiB beyond the inputs at the highest moment, of these the returned gradients, and the rest."""
    law, tiny = HEADS[head].load(), Problem(8, problem.width, 64, problem.dtype)
    return peak_of(law, law, tiny, problem, live, frozen=frozen)


def peak_of(
    first: Law, law: Law, tiny: Problem, problem: Problem, live: float, *, frozen: bool = False
) -> dict[str, float]:
    """The same of any law; ``first`` runs before, on a tiny problem."""
    for _ in range(2):  # whatever is made once, and a library's own buffers
        step(first, inputs(tiny), weights_of(tiny, 1.0))
    given, weights = inputs(problem, frozen=frozen), weights_of(problem, live)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    outcome = step(law, given, weights)
    top = resident("VmHWM") - before
    gradients = sum(gradient.numel() * gradient.element_size() for gradient in outcome.gradients)
    return {"peak_mib": top / MIB, "gradients_mib": gradients / MIB, "workspace_mib": (top - gradients) / MIB}


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    problem = Problem(asked["tokens"], asked["width"], asked["vocab"], getattr(torch, asked["dtype"]))
    print(json.dumps(peak(asked["head"], problem, asked["live"], frozen=asked["frozen"])))


if __name__ == "__main__":
    main()
