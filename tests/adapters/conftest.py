import os

if os.environ.get("RLSTAB_REQUIRE_TRL"):  # where TRL has to be there, a skipped test would hide that it is not
    import trl  # noqa: F401
