"""Where a host is required, its tests must not be skipped: without the host the run fails at once."""

import importlib
import os

for host in ("trl", "verl", "skyrl", "tinker", "axolotl", "prime_rl"):
    if os.environ.get(f"RLSTAB_REQUIRE_{host.upper()}"):
        importlib.import_module(host)
