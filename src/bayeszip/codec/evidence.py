"""Probabilities from evidence, in integers: how often 0 and how often 1 was seen, as log-odds, mixed and squashed.

Evidence is a pair of counts in sixteenths; log-odds are in 1/256 of a natural unit; probabilities in 1/65536;
mixing weights in 1/2²⁰. The tables come from integer arithmetic alone, so they are the same on every machine.
"""

import numpy as np

from bayeszip.codec.compilation import compiled, tabulated
from bayeszip.codec.rangecoder import Span, code_bit

__all__ = ["ONE_COUNT", "UNIT_WEIGHT", "decide", "log_count", "squash", "weigh"]

ONE_COUNT = 16
UNIT_WEIGHT = 1 << 20

_FARTHEST = 3071  # log-odds beyond ±12 add nothing to 16-bit probabilities
_LOG_ENTRIES = 1 << 16
LOG_OF_16 = 710  # nearly
#: `LOG` holds the logarithms of numbers below this, and after a division by 16 those of all that evidence counts
LOG_DIRECT = _LOG_ENTRIES + 64


def _exponentials(count: int, bits: int) -> list[int]:
    """exp(v / 256) · 2^bits for v = 0 … count − 1, rounded down, by the series of exp(1/256) in 120 binary places."""
    one = 1 << 120
    step, term, order = 0, one, 0
    while term:
        step += term
        order += 1
        term //= 256 * order
    powers, power = [], one
    for _ in range(count):
        powers.append(power >> 120 - bits)
        power = power * step >> 120
    return powers


def _squash_table() -> np.ndarray:
    """2¹⁶ / (1 + exp(−v / 256)), rounded, at most 65532 and at least 4, for v = −3071 … 3071."""
    one = 1 << 40
    upper = [min(((e << 16) + (e + one) // 2) // (e + one), 65532) for e in _exponentials(3072, 40)]
    return np.array([(1 << 16) - p for p in upper[:0:-1]] + upper, dtype=np.int64)


def _log_table() -> np.ndarray:
    """256 · ln x, rounded down, for x = 1 … 65535; 0 for 0; and a little beyond, as `log_count` says."""
    powers = np.array(_exponentials(2840, 40), dtype=np.int64)
    table = np.searchsorted(powers, np.arange(_LOG_ENTRIES, dtype=np.int64) << 40, side="right") - 1
    table[0] = 0
    beyond = table[np.arange(_LOG_ENTRIES, LOG_DIRECT) >> 4] + LOG_OF_16
    return np.concatenate([table, beyond]).astype(np.int16)


SQUASH = tabulated(_squash_table())
LOG = tabulated(_log_table())


@compiled
def log_count(count: int) -> int:
    """256 · ln `count`, for a count from 1 up."""
    scale = 0
    while count >= _LOG_ENTRIES:
        count >>= 4
        scale += LOG_OF_16
    return LOG[count] + scale


@compiled
def squash(odds: int) -> int:
    """The probability of a 1 in 1/65536 from its log-odds; from 4 to 65532."""
    if odds > _FARTHEST:
        return SQUASH[2 * _FARTHEST]
    return SQUASH[odds + _FARTHEST] if odds > -_FARTHEST else SQUASH[0]


@compiled
def weigh(
    zeros: np.ndarray,
    ones: np.ndarray,
    places: np.ndarray,
    inputs: np.ndarray,
    weights: np.ndarray,
    count: int,
    prior: int,
) -> int:
    """Sets `count` inputs to the log-odds of a 1 by the evidence at their places, and returns their weighted sum.

    `prior` is assumed for either bit beforehand.
    """
    odds = 0
    for index in range(count):
        place = places[index]
        one, zero = ones[place] + prior, zeros[place] + prior
        value = (LOG[one] if one < LOG_DIRECT else LOG[one >> 4] + LOG_OF_16) - (
            LOG[zero] if zero < LOG_DIRECT else LOG[zero >> 4] + LOG_OF_16
        )
        inputs[index] = value
        odds += weights[index] * value
    return odds


@compiled
def decide(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    bit: int,
    odds: int,
    zeros: np.ndarray,
    ones: np.ndarray,
    places: np.ndarray,
    inputs: np.ndarray,
    weights: np.ndarray,
    count: int,
    rate: int,
    most: int,
) -> tuple[int, Span]:
    """Codes a bit by `odds`, the weighted sum of `count` inputs, and learns from it.

    Weights move along the gradient of the bits spent: by input × error × rate. The evidence at `places` counts the bit;
    both of its counts are halved where one grows beyond `most`.
    """
    probability = squash((odds + (1 << 19)) >> 20)
    bit, span = code_bit(span, buffer, end, probability, bit)
    error = ((bit << 16) - probability) * rate
    if bit:
        _learn(ones, zeros, places, inputs, weights, count, error, most)
    else:
        _learn(zeros, ones, places, inputs, weights, count, error, most)
    return bit, span


@compiled
def _learn(
    seen: np.ndarray,
    others: np.ndarray,
    places: np.ndarray,
    inputs: np.ndarray,
    weights: np.ndarray,
    count: int,
    error: int,
    most: int,
) -> None:
    for index in range(count):
        weights[index] += (inputs[index] * error + (1 << 15)) >> 16
        place = places[index]
        more = seen[place] + ONE_COUNT
        if more > most:
            more >>= 1
            others[place] >>= 1
        seen[place] = more
