"""Whether rlstab gives the numbers that published code gives: loss, gradient, selection, on the same tensors.

``data/`` holds the tensors (``inputs.json``) and what the code of the authors or of a training framework made of them,
with repository, version and function; ``python -m benchmarks published`` runs it again. Nothing of that code is here.

S2T has no published code, so nothing is asserted about it here; its independent oracle is in ``tests/oracles``.
"""
