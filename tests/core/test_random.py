import torch

from rlstab.core.random import uniform


def test_numbers_are_those_of_splitmix64():
    bits = (1 << 64) - 1

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & bits
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & bits
        return x ^ (x >> 31)

    def number(seed, *identity):
        golden, state = 0x9E3779B97F4A7C15, seed & bits
        for part in identity:
            state = mix(state + golden & bits) + part & bits
        return (mix(state + golden & bits) >> 11) * 2.0**-53

    for seed in (0, 1, -1, 2**63 - 1, 2**63, 2**64 + 5):
        for identity in ((0,), (3, 8), (-7, 2**62)):
            drawn = uniform(seed, *(torch.tensor([part]) for part in identity))
            assert drawn.tolist() == [number(seed, *identity)]
