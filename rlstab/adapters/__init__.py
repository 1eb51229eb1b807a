"""rlstab's objectives inside the trainers of others. Each adapter is imported by its own name, and needs its package.

An adapter sees the whole optimizer step before its first backward pass, or it refuses what needs that. Where the loss
of a trainer cannot be changed, :mod:`rlstab.adapters.data` changes what it reads, and needs no package.
"""
