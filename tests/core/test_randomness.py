"""Random numbers as functions of (seed, purpose, sample number): their distributions, and what they must not depend on."""

import numpy as np
import pytest
import torch
from scipy import stats

from utils.core import randomness

NUMBERS = torch.arange(4000)


def splitmix64(state: int, count: int) -> list[int]:
    """The published algorithm on Python's integers: outputs of the sequence that starts at `state`."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def test_mixing_gives_the_published_splitmix64_sequence():
    gamma = randomness._GAMMA
    counters = torch.arange(1, 6, dtype=torch.int64)
    ours = randomness._mix(1234567 + counters * gamma)
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(1234567, 5) == expected  # the values that Rosetta Code lists for seed 1234567
    assert [value % 2**64 for value in ours.tolist()] == expected


def test_a_sample_draws_the_splitmix64_sequence_of_its_key():
    purpose_seed = randomness.derive_seed(7, "x")
    for number in (0, 1, 10**12):
        # One output of SplitMix64 is the mixing of state + gamma, so that state - gamma isolates the mixing.
        mixed = splitmix64((number + purpose_seed - 0x9E3779B97F4A7C15) % 2**64, 1)[0]
        key = splitmix64((mixed * 0x9E3779B97F4A7C15 - 0x9E3779B97F4A7C15) % 2**64, 1)[0]
        bits = randomness.random_bits(7, "x", torch.tensor([number]), 4)[0]
        assert [value % 2**64 for value in bits.tolist()] == splitmix64(key, 4)


def test_known_answers():
    """A change of any of these values breaks the resuming of older runs."""
    numbers = torch.tensor([0, 1, 10**12])
    assert randomness.derive_seed(0, "noise") == 3016148274326734436
    assert randomness.derive_seed(0, "dropout", 3, 1) == 8988804002618946716
    bits = randomness.random_bits(7, "x", numbers, 1)[:, 0]
    assert bits.tolist() == [1726587802541350879, -7994049856410377205, -9182927311072059117]
    uniform = randomness.uniform(7, "x", numbers)[:, 0]
    assert uniform.tolist() == [0.09359848499298096, 0.5666416883468628, 0.502192497253418]
    assert randomness.integers(7, "x", numbers, 1000).tolist() == [439, 205, 249]
    normal = randomness.normal(7, "x", numbers, (1,))[:, 0]
    np.testing.assert_allclose(normal, [-1.6824992895126343, -1.0459012985229492, -1.1431351900100708], rtol=1e-5)
    order = randomness.permute(7, "x", torch.zeros(10, dtype=torch.int64), torch.arange(10), 10)
    assert order.tolist() == [2, 3, 0, 6, 5, 1, 9, 4, 7, 8]


def test_uniform_is_uniform():
    values = randomness.uniform(0, "u", NUMBERS, 5).numpy()
    assert values.dtype == np.float32 and values.min() >= 0 and values.max() < 1
    for column in values.T:  # across samples
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    assert stats.kstest(randomness.uniform(0, "u", torch.tensor([5]), 20000)[0], "uniform").pvalue > 1e-3  # within one


def test_normal_is_standard_normal():
    values = randomness.normal(0, "n", NUMBERS, (3, 5))
    assert values.shape == (4000, 3, 5) and values.dtype == torch.float32
    flat = values.flatten().double().numpy()
    assert stats.kstest(flat, "norm").pvalue > 1e-3
    error = len(flat) ** -0.5
    assert abs(flat.mean()) < 4 * error
    assert abs((flat**2).mean() - 1) < 4 * 2**0.5 * error
    assert abs((flat**4).mean() - 3) < 4 * 96**0.5 * error
    assert np.abs(flat).max() > 3.5  # tails are there


def test_numbers_of_one_sample_and_of_neighbors_are_uncorrelated():
    values = randomness.normal(0, "n", NUMBERS, (16,)).double().numpy()  # both halves of the Box-Muller pairs
    table = np.concatenate([values[:-1], values[1:]], axis=1)
    correlation = np.corrcoef(table, rowvar=False) - np.eye(32)
    assert np.abs(correlation).max() < 5.5 / len(NUMBERS) ** 0.5
    squares = np.corrcoef(table**2, rowvar=False) - np.eye(32)
    assert np.abs(squares).max() < 5.5 / len(NUMBERS) ** 0.5


@pytest.mark.parametrize("other", [(1, "n"), (0, "m")])
def test_seeds_and_purposes_are_independent(other):
    first = randomness.normal(0, "n", NUMBERS, (4,)).double().numpy()
    second = randomness.normal(*other, NUMBERS, (4,)).double().numpy()
    for shift in range(3):  # nor one a delayed copy of the other
        pair = np.corrcoef(first[shift:].ravel(), second[: len(second) - shift].ravel())[0, 1]
        assert abs(pair) < 5 / first.size**0.5


@pytest.mark.parametrize(
    ("draw", "rounding"),
    [
        (lambda numbers: randomness.uniform(3, "p", numbers, 3), 0),
        (lambda numbers: randomness.integers(3, "p", numbers, 77), 0),
        (lambda numbers: randomness.normal(3, "p", numbers, (2, 3)), 1e-6),  # logarithm and cosine of a vector and of its tail
        (lambda numbers: randomness.permute(3, "p", numbers // 100, numbers % 100, 100), 0),
    ],
)
def test_values_do_not_depend_on_order_batching_or_torch_state(draw, rounding):
    together = draw(torch.arange(300))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    parts = torch.cat([draw(part) for part in torch.arange(300).split(7)])
    torch.testing.assert_close(draw(shuffled), together[shuffled], rtol=rounding, atol=rounding)
    torch.testing.assert_close(parts, together, rtol=rounding, atol=rounding)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 1797, 4097])
def test_permute_is_a_bijection(length):
    for epoch in (0, 1, 10**9):
        indices = randomness.permute(0, "order", torch.full((length,), epoch), torch.arange(length), length)
        assert sorted(indices.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [3, 5, 10])
def test_permute_sends_every_position_everywhere_equally_often(length):
    epochs = torch.arange(6000).repeat_interleave(length)
    positions = torch.arange(length).repeat(6000)
    indices = randomness.permute(0, "o", epochs, positions, length)
    counts = np.bincount((positions * length + indices).numpy(), minlength=length**2)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_permute_refuses_an_empty_range():
    with pytest.raises(ValueError, match="positive"):
        randomness.permute(0, "o", torch.zeros(1).long(), torch.zeros(1).long(), 0)
