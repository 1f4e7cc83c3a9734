"""Probabilities from evidence, in integers: how often 0 and how often 1 was seen, as log-odds, mixed and squashed.

Evidence is a pair of counts in sixteenths; log-odds are in 1/256 of a natural unit; probabilities in 1/65536;
mixing weights in 1/2²⁰. The tables come from integer arithmetic alone, so they are the same on every machine.
"""

import numpy as np

from bayeszip.codec.compilation import compiled

__all__ = ["ONE_COUNT", "UNIT_WEIGHT", "learn", "log_count", "log_odds", "mix", "squash", "sway"]

ONE_COUNT = 16
UNIT_WEIGHT = 1 << 20

_FARTHEST = 3071  # log-odds beyond ±12 add nothing to 16-bit probabilities
_LOG_ENTRIES = 1 << 16


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
    """256 · ln x, rounded down, for x = 1 … 65535; 0 for 0."""
    powers = np.array(_exponentials(2840, 40), dtype=np.int64)
    table = np.searchsorted(powers, np.arange(_LOG_ENTRIES, dtype=np.int64) << 40, side="right") - 1
    table[0] = 0
    return table.astype(np.int16)


_SQUASH = _squash_table()
_LOG = _log_table()


@compiled
def log_count(count: int) -> int:
    """256 · ln `count`, for a count from 1 up."""
    scale = 0
    while count >= _LOG_ENTRIES:
        count >>= 4
        scale += 710  # 256 · ln 16, nearly
    return int(_LOG[count]) + scale


@compiled
def log_odds(evidence: np.ndarray, place: int, for_one: int, for_zero: int) -> int:
    """The log-odds of a 1 by the evidence at `place` and by what is assumed beforehand."""
    return log_count(int(evidence[place, 1]) + for_one) - log_count(int(evidence[place, 0]) + for_zero)


@compiled
def learn(evidence: np.ndarray, place: int, bit: int, most: int) -> None:
    """Counts `bit`; both counts are halved where one grows beyond `most`."""
    count = int(evidence[place, bit]) + ONE_COUNT
    if count > most:
        count >>= 1
        evidence[place, 1 - bit] >>= 1
    evidence[place, bit] = count


@compiled
def squash(odds: int) -> int:
    """The probability of a 1 in 1/65536 from its log-odds; from 4 to 65532."""
    return int(_SQUASH[min(max(odds, -_FARTHEST), _FARTHEST) + _FARTHEST])


@compiled
def mix(weights: np.ndarray, inputs: np.ndarray) -> int:
    """The weighted sum of log-odds, as a probability."""
    total = 1 << 19
    for place in range(inputs.size):
        total += int(weights[place]) * int(inputs[place])
    return squash(total >> 20)


@compiled
def sway(weights: np.ndarray, inputs: np.ndarray, bit: int, probability: int, rate: int) -> None:
    """Moves the weights along the gradient of the bits spent: by input × error × rate."""
    error = ((bit << 16) - probability) * rate
    for place in range(inputs.size):
        weights[place] += (int(inputs[place]) * error + (1 << 15)) >> 16
