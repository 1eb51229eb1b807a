"""What went wrong first in a run, whoever wrote its log: ``rlstab diagnose``."""
