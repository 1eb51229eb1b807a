import torch

from rlstab.core.random import uniform
from tests.core.steps import batch_of, random_rows


def test_numbers_belong_to_tokens_and_not_to_places():
    rows = random_rows(0, [4, 1, 6, 0, 3])
    whole = batch_of(rows, [10, 11, 12, 13, 14])
    numbers = whole.uniform(5)
    for part in ([0, 1], [4, 2], [3]):
        batch = batch_of([rows[row] for row in part], [10 + row for row in part])
        expected = [numbers[whole.sequence == row] for row in part]
        assert torch.equal(batch.uniform(5), torch.cat(expected))
        ids = batch.spread(batch.sequence_ids)
        assert torch.equal(batch.uniform(-3), uniform(-3, ids, batch.position))


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
