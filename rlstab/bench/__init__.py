"""Comparative runs: methods x settings x seeds from one file, in worker processes, resumable after a kill."""
