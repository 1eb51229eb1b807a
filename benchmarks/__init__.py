"""Performance measured by one protocol: see benchmarks/README.md."""
