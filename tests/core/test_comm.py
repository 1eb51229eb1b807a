"""The collectives of a plan, in this process: a group of one is the identity, like no group at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlstab.core.comm import Comm, LocalComm, TorchComm


@pytest.fixture(params=["local", "gloo"])
def comm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Comm]:
    if request.param == "local":
        yield LocalComm()
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield TorchComm()
    dist.destroy_process_group()


@pytest.mark.parametrize("values", [torch.tensor([1.0, -2.5]).double(), torch.zeros(0).double()], ids=["two", "none"])
def test_a_group_of_one_changes_nothing(comm: Comm, values: torch.Tensor) -> None:
    before = values.clone()
    assert torch.equal(comm.sum(values), before)
    assert torch.equal(comm.gather(values), before)
    assert torch.equal(values, before)
