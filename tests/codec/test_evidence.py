"""The integers behind the probabilities, against the functions they stand for."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bayeszip.codec.evidence import UNIT_WEIGHT, decide, log_count, squash, weigh
from bayeszip.codec.rangecoder import RangeEncoder


@given(st.integers(1, 2**40))
def test_logarithm(count):
    assert abs(log_count(count) - 256 * math.log(count)) <= 3


@given(st.integers(-4000, 4000))
def test_squash_is_the_logistic_function(odds):
    exact = 65536 / (1 + math.exp(-odds / 256))
    assert abs(squash(odds) - min(max(exact, 4), 65532)) <= 1
    assert squash(odds) + squash(-odds) == 65536


def learned(bits: list[int], weights: list[int], most: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Zeros, ones, inputs and weights after bits were coded in one context for each weight, all of them the same."""
    zeros, ones, place = (np.zeros(1, dtype=np.int64) for _ in range(3))
    places, inputs = (np.zeros(len(weights), dtype=np.int64) for _ in range(2))
    moved = np.array(weights, dtype=np.int64)
    encoder = RangeEncoder()
    for bit in bits:
        odds = weigh(zeros, ones, places, inputs, moved, len(weights), 8)
        coded, encoder.span = decide(encoder.span, encoder.buffer, None, bit, odds, zeros, ones, place, inputs, moved,
                                     1, 30, most)  # fmt: skip
        assert coded == bit
    return zeros.tolist(), ones.tolist(), inputs.tolist(), moved.tolist()


def test_evidence_grows_and_is_halved():
    assert learned([1, 1, 0], [0], 40)[:2] == ([16], [32])
    assert learned([1, 1, 0, 1], [0], 40)[:2] == ([8], [24])


def test_inputs_are_log_odds_and_add_up():
    zeros, ones, weights, inputs = [16, 0], [32, 2**20], [3, 5], [0, 0]
    odds = weigh(zeros, ones, [0, 1], inputs, weights, 2, 8)
    assert inputs == [log_count(40) - log_count(24), log_count(2**20 + 8) - log_count(8)]
    assert odds == 3 * inputs[0] + 5 * inputs[1]


def test_weights_follow_the_input_that_was_right():
    right, wrong = learned([1, 1], [UNIT_WEIGHT // 4], 1 << 20), learned([1, 0], [UNIT_WEIGHT // 4], 1 << 20)
    assert right[3][0] > UNIT_WEIGHT // 4 > wrong[3][0]
