"""FSDP2 on CPU processes: accelerate shards only on accelerators, and here takes a CPU for one."""

from typing import Any

#: What ``accelerate launch --use_fsdp --fsdp_version 2`` sets.
VARIABLES = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def shard_on_cpus() -> None:
    """From now on accelerate takes processes on CPUs for FSDP where its variables ask for FSDP."""
    from accelerate import state
    from accelerate.utils import DistributedType

    before = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        before(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            self._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = init
