"""Noise is a function of a seed, a position and a token, and is like chance in everything else.

So drafter and target draw with the same numbers, and a text can be written again from its seed.
Chi-squared tests here fail below p-values of 1e-6; seeds are fixed, as in test_sampling.py.
"""

import math

import numpy as np
import pytest
import torch

from runtime.sampling import Noise
from tools.lossless import chi_squared

ODDS, NUM = 1e-6, 2000
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4])


def choice(seed, position, weights=WEIGHTS):
    return Noise(seed).choose(weights, None, position)


def p_value_of_cells(counts):
    """All cells are equally likely."""
    return chi_squared(counts.flatten(), [counts.sum() / counts.size] * counts.size).p_value


def test_noise_is_the_same_on_every_machine():
    """Numbers that were written down: integers made them, so no library's rounding is in them."""
    noise, ids = Noise(2**40 + 3), np.array([0, 1, 5, 4095, 151_935])
    uniform = [noise.uniform(i, Noise.DRAW) for i in (0, 1, 10**6)]
    assert uniform == [0.8430334697799026, 0.950916731721287, 0.906802072233214]
    expected = [0.12432617056943548, 0.031718621876562374, 0.8893015230928047]
    expected += [1.9026856951852928, 0.01415323391600717]
    assert noise.exponentials(7, ids) == pytest.approx(expected, rel=1e-12)
    weights = torch.arange(1, 201).float()
    chosen = [noise.choose(weights, None, i) for i in range(8)]
    assert chosen == [136, 143, 88, 179, 78, 74, 145, 123]
    ids = torch.arange(199, -1, -1)  # neither order nor scale counts
    assert [noise.choose(weights.flip(0) * 1e-20, ids, i) for i in range(8)] == chosen


PAIRS = {
    "positions": lambda i: (choice(3, 2 * i), choice(3, 2 * i + 1)),
    "positions from seed to seed": lambda i: (choice(i, 7), choice(i, 8)),
    "seeds 2**32 apart": lambda i: (choice(i, 5), choice(i + 2**32, 5)),
    "seed and position": lambda i: (choice(i + 2000, 900), choice(900, i + 2000)),
}


@pytest.mark.parametrize("neighbours", PAIRS)
def test_choices_are_distributed_as_the_weights_and_neighbours_are_independent(neighbours):
    """Pairs of choices are counted."""
    counts = np.zeros((4, 4))
    for i in range(NUM):
        counts[PAIRS[neighbours](i)] += 1
    expected = NUM * torch.outer(WEIGHTS, WEIGHTS)
    assert chi_squared(counts.flatten(), expected.flatten().tolist()).p_value > ODDS


def test_noise_of_any_two_tokens_is_independent():
    """60 pairs: ids that differ in one bit, neighbours, and any two. Odds of a false alarm 6e-5."""
    random, num, count = np.random.default_rng(0), 60, 8000
    ones = random.integers(0, 2**17, num)
    any_two = random.integers(0, 2**17, num - 34)
    ids = np.concatenate([ones, ones[:17] ^ (1 << np.arange(17)), ones[17:34] + 1, any_two])
    tokens = [np.exp(-Noise(2).exponentials(position, ids)) * 8 for position in range(count)]
    eighths = np.stack(tokens).astype(int).reshape(count, 2, num)
    for one, other in eighths.transpose(2, 1, 0):
        assert p_value_of_cells(np.bincount(one * 8 + other, minlength=64)) > ODDS


def test_uniform_numbers_are_uniform_and_their_uses_independent():
    counts = np.zeros((4, 4))
    for i in range(NUM):
        counts[tuple(int(Noise(9).uniform(i, use) * 4) for use in (Noise.DRAW, Noise.ACCEPT))] += 1
    assert p_value_of_cells(counts) > ODDS
    numbers = [Noise(0).uniform(i, Noise.DRAW) for i in range(100)]
    assert all(0 <= u < 1 for u in numbers)
    assert sum((u * 2**24) % 1 != 0 for u in numbers) > 90  # more bits than float32 has


def test_every_bit_of_a_seed_counts():
    seeds = [0, -1, 2**64 - 1, *(1 << bit for bit in range(64)), -(1 << 63)]
    assert len({Noise(seed).uniform(0, Noise.DRAW) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("vocab", [10, 5000])
def test_weights_that_are_no_numbers_are_an_error(vocab):
    for values in ([math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]):
        weights = torch.tensor(values[1]).repeat(vocab)
        weights[3] = values[0]
        with pytest.raises(ValueError, match="no probabilities to draw from"):
            choice(0, 0, weights)
