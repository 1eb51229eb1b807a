"""Where a host has to be there, its tests may not be skipped: without it the run fails at once."""

import importlib
import os

for host in ("trl", "verl", "skyrl", "tinker", "axolotl"):
    if os.environ.get(f"RLSTAB_REQUIRE_{host.upper()}"):
        importlib.import_module(host)
