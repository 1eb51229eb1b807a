"""Engines: where the weights of a run are, and how the gradients of its processes become one.

One process holds everything. ``ddp`` holds everything in each process and sums gradients by torch's
``DistributedDataParallel``. ``fsdp2`` holds weights, gradients and moments in shards, by torch's ``fully_shard``.
"""

from rlstab.train.engines.choice import build_engine, engine_name, loaded_on, require_launcher
from rlstab.train.engines.engine import Engine, Moments
from rlstab.train.engines.one_process import OneProcess

__all__ = ["Engine", "Moments", "OneProcess", "build_engine", "engine_name", "loaded_on", "require_launcher"]
