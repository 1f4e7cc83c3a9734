"""The cheapest path: as good as trying all of them, and better than each weight by itself."""

import itertools

import numpy as np
import pytest

from bayeszip.codec import cheapest_path, paths
from bayeszip.codec.matrix import view_of
from bayeszip.codec.trellis import depends, next_state, number_of


def test_the_path_is_the_best_of_all(monkeypatch):
    """By brute force, over all indices near enough, at prices that don't depend on the path."""
    ratios = np.random.default_rng(3).normal(scale=2.0, size=6)
    bits = np.abs(np.arange(-6, 7)) + 1.0
    flat = np.broadcast_to(bits, (paths._CLASSES, 2, bits.size)).copy()
    monkeypatch.setattr(paths, "bits_of_indices", lambda *_: flat)
    found = cheapest_path(ratios, 0.3)
    costs = {}
    for indices in itertools.product(range(-3, 4), repeat=ratios.size):
        state, cost, numbers = 0, 0.0, []
        for ratio, index in zip(ratios, indices, strict=True):
            numbers.append(number_of(index, state & 1))
            cost += (ratio - numbers[-1]) ** 2 + 0.3 * bits[6 + index]
            state = next_state(state, index)
        costs[tuple(numbers)] = cost
    assert costs[tuple(found)] == pytest.approx(min(costs.values()))


@pytest.mark.parametrize("price", [0.0, 0.35])
def test_dependent_steps_are_nearer_at_equal_bits(price):
    """The quantizers at hand have twice the step; rounding to that moves a Gaussian by a third of a squared step."""
    ratios = np.random.default_rng(0).normal(scale=6.0, size=(100, 90))
    numbers = cheapest_path(ratios, price)
    assert depends(numbers.ravel(), view_of(numbers.shape))
    assert np.square(ratios - numbers).mean() < (0.29 if price else 0.27)


def test_zeros_stay_zero_and_large_tensors_are_settled_in_pieces(monkeypatch):
    ratios = np.random.default_rng(0).normal(scale=3.0, size=(60, 80))
    ratios[np.random.default_rng(1).random(ratios.shape) < 0.5] = 0
    whole = cheapest_path(ratios, 0.3)
    assert not whole[ratios == 0].any()
    monkeypatch.setattr(paths, "_SETTLED", 500)
    pieces = cheapest_path(ratios, 0.3)
    assert depends(pieces.ravel(), view_of(pieces.shape))
    assert np.square(pieces - ratios).sum() < 1.02 * np.square(whole - ratios).sum()


def test_nothing_is_worth_its_bits_where_bits_are_dear():
    assert not cheapest_path(np.random.default_rng(0).normal(size=(70, 60)), 1e6).any()
    assert not cheapest_path(np.zeros((70, 60)), 0.3).any()
