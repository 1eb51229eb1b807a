"""verl's real worker on CPU processes: verl trains only on accelerators, and here takes a CPU for one."""

import os
from typing import Any

import torch

from tests.adapters import jobs

# before verl is imported: its registry has engines only for CUDA, and FSDP2 runs anywhere
os.environ.update({**jobs.QUIET, "VERL_ENGINE_DEVICE": "cuda", "WG_BACKEND": "ray", "PYTHONWARNINGS": "ignore"})

from verl.plugin.platform import PlatformRegistry, set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class _Device:
    """``torch.cpu``, where what it lacks of ``torch.cuda`` counts nothing."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        return {"mem_get_info": lambda *_: (0, 0), "get_device_name": lambda *_: "cpu"}.get(name, lambda *_, **__: 0)


def _nothing(self: Any, *args: Any) -> None: ...


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]  # to mypy, verl is not there
    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _Device())
    set_device = synchronize = manual_seed = manual_seed_all = empty_cache = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"


set_platform(PlatformCPU())
