"""What a composition means before anything runs: in words, as a table, and as a new run file."""

from rlstab.explain.catalogue import listing
from rlstab.explain.check import check, check_host
from rlstab.explain.explanation import explain, explain_preset, show

__all__ = ["check", "check_host", "explain", "explain_preset", "listing", "show"]
