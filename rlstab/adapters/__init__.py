"""rlstab's objectives inside other trainers. Each adapter is imported by name, and needs the package of its trainer.

An adapter sees the whole optimizer step before its first backward pass, or refuses methods that need it. If the loss of
a trainer cannot be changed, :mod:`rlstab.adapters.data` changes what the loss reads, and needs no package.
"""
