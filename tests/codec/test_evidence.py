"""The integers behind the probabilities, against the functions they stand for."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bayeszip.codec.evidence import UNIT_WEIGHT, learn, log_count, log_odds, mix, squash, sway


@given(st.integers(1, 2**40))
def test_logarithm(count):
    assert abs(log_count(count) - 256 * math.log(count)) <= 3


@given(st.integers(-4000, 4000))
def test_squash_is_the_logistic_function(odds):
    exact = 65536 / (1 + math.exp(-odds / 256))
    assert abs(squash(odds) - min(max(exact, 4), 65532)) <= 1
    assert squash(odds) + squash(-odds) == 65536


def test_evidence_grows_and_is_halved():
    evidence = np.zeros((1, 2), dtype=np.int32)
    for bit in (1, 1, 0):
        learn(evidence, 0, bit, 40)
    assert evidence.tolist() == [[16, 32]]
    assert log_odds(evidence, 0, 0, 0) == log_count(32) - log_count(16)
    learn(evidence, 0, 1, 40)
    assert evidence.tolist() == [[8, 24]]


def test_weights_follow_the_input_that_was_right():
    weights = np.full(2, UNIT_WEIGHT // 4, dtype=np.int64)
    inputs = np.array([500, -500], dtype=np.int64)
    before = mix(weights, inputs)
    assert before == 32768
    sway(weights, inputs, 1, before, 30)
    assert weights[0] > UNIT_WEIGHT // 4 > weights[1]
    assert mix(weights, inputs) > before
