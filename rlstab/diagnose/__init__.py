"""What went wrong first in a run, in a log of any trainer: ``rlstab diagnose``."""
