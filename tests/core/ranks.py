"""Every composition over real processes: rank r makes its share of each step and saves what it saw."""

import torch
import torch.distributed as dist

from rlstab.core.comm import TorchComm
from tests.core.compositions import COMPOSITIONS
from tests.core.steps import random_rows, run_parts

LENGTHS = [3, 5, 0, 7, 4, 6, 1, 8]
#: For each cut, the parts of each rank; the number of ranks is the number of processes.
CUTS = {
    "uneven": ([[0, 1], [2], [3, 4, 5]], [[6, 7]]),
    "rank without parts": ([[7, 1, 3], [0, 2, 4, 5, 6]], []),
    "rank without tokens": ([[0, 1, 3, 4], [5, 6, 7]], [[2]]),
    "three ranks": ([[0], [5, 3]], [[1, 2, 7]], [[4, 6]]),
    "three ranks, one empty": ([[7, 0], [1]], [], [[2, 3], [4], [5, 6]]),
}
SEEDS = (11, 12)
EMPTY = "no token anywhere"


def two_steps(objective, cut, comm=None):
    """Two optimizer steps, the second from the state of the first: what this rank found in each."""
    state, found = None, []
    for seed in SEEDS:
        plan, loss, slopes, report = run_parts(objective, random_rows(seed, LENGTHS), cut, state, comm)
        state = plan.state
        found.append({"loss": loss, "slopes": slopes, "report": report, "state": state, "kept": plan.kept})
    return found


def worker(rank, folder, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{world}", rank=rank, world_size=world)
    found = {
        (name, cut): two_steps(objective, parts[rank], TorchComm())
        for name, objective in COMPOSITIONS.items()
        for cut, parts in CUTS.items()
        if len(parts) == world
    }
    found[EMPTY] = [
        run_parts(objective, [[] for _ in range(world)], [[rank]], comm=TorchComm())[0].state
        for objective in COMPOSITIONS.values()
    ]
    torch.save(found, f"{folder}/{world}-{rank}.pt")
    dist.destroy_process_group()
