"""Whether rlstab gives the numbers that published code gives: loss, gradient, selection, on the same tensors.

``data/`` holds the tensors (``inputs.json``) and what the code of the authors or of a training framework made of them,
with repository, version and function; ``python -m benchmarks published`` made them and can make them again. Nothing of
that code is here.

Where we differ on purpose, ``test_deviations.py`` shows by how much and checks that the method's card names it.

S2T has no published code, so nothing is asserted about it here; its independent oracle is in ``tests/oracles``.
"""
