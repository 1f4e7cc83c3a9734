"""Raw tensors, bit for bit: bytes of each element from the most significant on, by contexts; noise as it is.

Floating-point bits are turned left by one, so that the first byte of a float32 or bfloat16 is its exponent and the
sign comes last. A byte is eight decisions, mixed from what stood in the same place of the element before, one row
before, and where the last two elements point to, and from the bytes of the element so far.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled
from bayeszip.codec.evidence import UNIT_WEIGHT, learn, log_odds, mix, sway
from bayeszip.codec.rangecoder import code_bit, code_bits

__all__ = ["LEAST_NOISE", "RawMemory", "code_raw", "from_planes", "noise_of", "planes_of"]

_FLOATS = {"float32", "float16", "bfloat16", "float64"}
_WEIGHTS = (14000, 14000, 14000, 14000, 14000)
_RATE, _MOST, _PRIOR = 24, 1 << 14, 6
_INPUTS = len(_WEIGHTS)
#: of a byte's place: none; the bytes before it, above it and a row back; where the last two elements point, or astray
_CONTEXTS = 1 + 3 * 256 + 257
#: tensors with fewer elements than this have no noise
LEAST_NOISE = 512
_BLOCK = 1 << 16


class RawMemory(NamedTuple):
    """What is carried between tensors with elements of one size: evidence and mixing weights for each byte's place."""

    evidence: np.ndarray
    weights: np.ndarray

    @classmethod
    def fresh(cls, itemsize: int) -> "RawMemory":
        weights = np.array(_WEIGHTS, dtype=np.int64) * (UNIT_WEIGHT >> 16)
        return cls(
            evidence=np.zeros((itemsize * _CONTEXTS * 256, 2), dtype=np.uint16),
            weights=np.repeat(weights[None], itemsize, axis=0),
        )


def planes_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of a tensor's elements: a row for each element, the most significant byte first."""
    size = values.dtype.itemsize
    planes = np.empty((values.size, size), dtype=np.uint8)
    flat = values.reshape(-1)
    for first in range(0, values.size, _BLOCK):
        bits = np.frombuffer(flat[first : first + _BLOCK].tobytes(), dtype=f"<u{size}")
        if dtype in _FLOATS:
            bits = bits << 1 | bits >> 8 * size - 1
        planes[first : first + _BLOCK] = bits.astype(f">u{size}").view(np.uint8).reshape(-1, size)
    return planes


def from_planes(planes: np.ndarray, dtype: str, held: np.dtype) -> np.ndarray:
    """Undoes `planes_of`, in place."""
    size = held.itemsize
    for first in range(0, planes.shape[0], _BLOCK):
        block = planes[first : first + _BLOCK]
        bits = block.reshape(-1).view(f">u{size}").astype(f"<u{size}")
        if dtype in _FLOATS:
            bits = bits >> 1 | bits << 8 * size - 1
        block[:] = bits.view(np.uint8).reshape(-1, size)
    return planes.reshape(-1).view(held)


def noise_of(planes: np.ndarray) -> int:
    """Which byte places (bit k: place k) look like noise: their χ² against even odds is what noise has, or tiny."""
    count = planes.shape[0]
    noise = 0
    if count >= LEAST_NOISE:
        for place in range(planes.shape[1]):
            squares = sum(int(found) ** 2 for found in _histogram(planes, place))
            excess = 256 * squares - count * count  # χ² · count
            if 187 * count < excess < max(323 * count, count * count // 64):
                noise |= 1 << place
    return noise


@compiled
def _histogram(planes: np.ndarray, place: int) -> np.ndarray:
    found = np.zeros(256, dtype=np.int64)
    for element in range(planes.shape[0]):
        found[planes[element, place]] += 1
    return found


@compiled
def code_raw(
    state: np.ndarray,
    buffer: np.ndarray,
    planes: np.ndarray,
    first: int,
    last: int,
    row: int,
    noise: int,
    evidence: np.ndarray,
    weights: np.ndarray,
) -> None:
    """Codes the elements `first` to `last`; `row` elements make a row."""
    size = planes.shape[1]
    contexts, inputs = np.zeros(_INPUTS, dtype=np.int64), np.zeros(_INPUTS, dtype=np.int64)
    for element in range(first, last):
        onward = 1  # whether the element goes on as the last two point
        for place in range(size):
            if noise >> place & 1:
                planes[element, place] = code_bits(state, buffer, int(planes[element, place]), 8)
                continue
            before = int(planes[element - 1, place]) if element >= 1 else 0
            distant = int(planes[element - row, place]) if element >= row else 0
            pointed = _pointed(planes, element, place)
            higher = int(planes[element, place - 1]) if place else 0
            contexts[0] = place * _CONTEXTS
            contexts[1] = contexts[0] + 1 + before
            contexts[2] = contexts[0] + 257 + higher
            contexts[3] = contexts[0] + 513 + distant
            contexts[4] = contexts[0] + 769 + (pointed if onward else 256)
            byte = _code_byte(state, buffer, int(planes[element, place]), contexts, inputs, evidence, weights[place])
            planes[element, place] = byte
            if byte != pointed:
                onward = 0


@compiled
def _pointed(planes: np.ndarray, element: int, place: int) -> int:
    """The byte of twice the last element less the one before it, as whole numbers."""
    if element < 2:
        return 0
    borrow = 0
    for lower in range(planes.shape[1] - 1, place - 1, -1):
        total = 2 * int(planes[element - 1, lower]) - int(planes[element - 2, lower]) + borrow
        borrow = total >> 8
    return total & 255


@compiled
def _code_byte(
    state: np.ndarray,
    buffer: np.ndarray,
    byte: int,
    contexts: np.ndarray,
    inputs: np.ndarray,
    evidence: np.ndarray,
    weights: np.ndarray,
) -> int:
    node = 1
    for level in range(7, -1, -1):
        for index in range(_INPUTS):
            inputs[index] = log_odds(evidence, contexts[index] * 256 + node, _PRIOR, _PRIOR)
        probability = mix(weights, inputs)
        bit = code_bit(state, buffer, probability, byte >> level & 1)
        sway(weights, inputs, bit, probability, _RATE)
        for index in range(_INPUTS):
            learn(evidence, contexts[index] * 256 + node, bit, _MOST)
        node = 2 * node + bit
    return node - 256
