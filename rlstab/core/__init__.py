"""The interface and the one place where terms become a loss. Needs torch and nothing else."""
