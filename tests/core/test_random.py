import torch

from rlstab.core.random import uniform
from tests.core.steps import batch_of, random_rows

N = 200_000


def drawn(seed):
    return uniform(seed, torch.arange(N) // 1000, torch.arange(N) % 1000)


def test_numbers_belong_to_tokens_and_not_to_places():
    rows = random_rows(0, [4, 1, 6, 0, 3])
    whole = batch_of(rows, [10, 11, 12, 13, 14])
    numbers = whole.uniform(5)
    for part in ([0, 1], [4, 2], [3]):
        batch = batch_of([rows[row] for row in part], [10 + row for row in part])
        expected = [numbers[whole.sequence == row] for row in part]
        assert torch.equal(batch.uniform(5), torch.cat(expected))


def test_numbers_look_uniform():
    numbers = drawn(0)
    assert numbers.dtype == torch.float64
    assert 0 <= numbers.min()
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 * (1 / 12 / N) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 5 * (1 / 180 / N) ** 0.5
    # chi-square of 100 bins has mean 99 and standard deviation 14
    observed = torch.histc(numbers, 100, 0, 1)
    assert ((observed - N / 100) ** 2 / (N / 100)).sum() < 99 + 5 * 14


def test_neighbours_are_independent():
    numbers = drawn(1).reshape(-1, 1000) - 0.5
    bound = 5 / 12 / N**0.5
    assert (numbers[:, 1:] * numbers[:, :-1]).mean().abs() < bound
    assert (numbers[1:] * numbers[:-1]).mean().abs() < bound


def test_seeds_and_identities_differ():
    assert drawn(0).unique().numel() == N
    for other in (1, 2, -1, 2**63, 2**40):
        assert (drawn(0) == drawn(other)).sum() == 0
        assert ((drawn(0) - 0.5) * (drawn(other) - 0.5)).mean().abs() < 5 / 12 / N**0.5
    swapped = uniform(0, torch.arange(N) % 1000, torch.arange(N) // 1000)
    assert (drawn(0) == swapped).sum() == 200  # where both numbers are the same


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    drawn(3)
    assert torch.equal(torch.get_rng_state(), before)


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
