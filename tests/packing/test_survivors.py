"""Rows along paths: the error of what layers compute is smaller than each weight's own choice leaves it."""

import numpy as np

from bayeszip.codec.matrix import view_of
from bayeszip.codec.trellis import next_state, number_of, states_along
from bayeszip.packing.pushing import _bits_along, _upper
from bayeszip.packing.survivors import TOGETHER, Survivors, walk_row


def walked(weights: np.ndarray, moments: np.ndarray, price: float = 0.0) -> np.ndarray:
    chosen, states = np.zeros((2, weights.size), dtype=np.int64)
    bits = _bits_along(np.rint(weights).astype(np.int64), None)
    live = np.ones(weights.size, dtype=np.uint8)
    walk_row(weights.copy(), _upper(moments).reshape(-1), live, price, bits.reshape(-1), 0, chosen, states,
             Survivors.fresh())  # fmt: skip
    return chosen


def test_a_row_is_on_a_path_and_states_are_those_of_the_coder():
    random = np.random.default_rng(0)
    weights = random.normal(scale=3.0, size=2 * TOGETHER + 30)
    inputs = random.normal(size=(4000, weights.size)) @ (np.eye(weights.size) + 0.05)
    chosen = walked(weights, inputs.T @ inputs / 4000)
    assert states_along(chosen, view_of(chosen.shape)) is not None


def test_errors_are_made_good_by_later_columns():
    """With inputs that go together, what comes out moves far less than by the path that looks at weights alone."""
    random = np.random.default_rng(0)
    weights = random.normal(scale=3.0, size=150)
    inputs = random.normal(size=(3000, 150)) + 2 * random.normal(size=(3000, 1))
    moments = inputs.T @ inputs / 3000

    def moved(numbers: np.ndarray) -> float:
        return float((numbers - weights) @ moments @ (numbers - weights))

    assert moved(walked(weights, moments)) < 0.6 * moved(walked(weights, np.eye(150)))


def test_without_moments_it_is_the_cheapest_of_all_paths():
    weights = np.random.default_rng(2).normal(scale=2.0, size=5)
    found = walked(weights, np.eye(5))
    best = np.inf
    for code in range(7**5):
        state, cost = 0, 0.0
        for weight in weights:
            code, index = divmod(code, 7)
            cost += (weight - number_of(index - 3, state & 1)) ** 2
            state = next_state(state, index - 3)
        best = min(best, cost)
    assert np.square(weights - found).sum() <= best + 1e-9
