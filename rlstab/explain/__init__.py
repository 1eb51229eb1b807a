"""What a composition means before anything runs: in words, as a table, and as a new run file."""
