"""Raw tensors, bit for bit: bytes of each element from the most significant on, by contexts; noise as it is.

Floating-point bits are turned left by one, so that the first byte of a float32 or bfloat16 is its exponent and the
sign comes last. A byte is eight decisions, mixed from what stood in the same place of the element before, one row
before, and where the last two elements point to, and from the bytes of the element so far.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled, entry
from bayeszip.codec.evidence import UNIT_WEIGHT, decide, weigh
from bayeszip.codec.rangecoder import Span, code_bits

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
    """What is carried between tensors with elements of one size: evidence and mixing weights for each byte's place.

    `places` and `inputs` are those of the decision at hand, `contexts` those of its byte.
    """

    zeros: np.ndarray
    ones: np.ndarray
    weights: np.ndarray
    contexts: np.ndarray
    places: np.ndarray
    inputs: np.ndarray

    @classmethod
    def fresh(cls, itemsize: int) -> "RawMemory":
        weights = np.array(_WEIGHTS, dtype=np.int64) * (UNIT_WEIGHT >> 16)
        zeros, ones = np.zeros((2, itemsize * _CONTEXTS * 256), dtype=np.uint16)
        contexts, places, inputs = np.zeros((3, _INPUTS), dtype=np.int64)
        return cls(zeros, ones, np.repeat(weights[None], itemsize, axis=0), contexts, places, inputs)


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
            squares = sum(int(found) ** 2 for found in _histogram(planes[:, place]))
            excess = 256 * squares - count * count  # χ² · count
            if 187 * count < excess < max(323 * count, count * count // 64):
                noise |= 1 << place
    return noise


def _histogram(octets: np.ndarray) -> np.ndarray:
    """How often each octet occurs; piece by piece, since numpy counts in wide integers."""
    pieces = (octets[first : first + _BLOCK] for first in range(0, octets.size, _BLOCK))
    return sum((np.bincount(piece, minlength=256) for piece in pieces), start=np.zeros(256, dtype=np.int64))


@entry
def code_raw(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    octets: np.ndarray,
    size: int,
    first: int,
    last: int,
    row: int,
    noise: int,
    memory: RawMemory,
) -> Span:
    """Codes the elements `first` to `last`, each of `size` octets; `row` elements make a row."""
    contexts = memory.contexts
    for element in range(first, last):
        onward = 1  # whether the element goes on as the last two point
        for place in range(size):
            at = element * size + place
            if noise >> place & 1:
                byte, span = code_bits(span, buffer, end, int(octets[at]), 8)
                octets[at] = byte
                continue
            pointed = _pointed(octets, size, element, place)
            contexts[0] = place * _CONTEXTS
            contexts[1] = contexts[0] + 1 + (octets[at - size] if element >= 1 else 0)
            contexts[2] = contexts[0] + 257 + (octets[at - 1] if place else 0)
            contexts[3] = contexts[0] + 513 + (octets[at - row * size] if element >= row else 0)
            contexts[4] = contexts[0] + 769 + (pointed if onward else 256)
            byte, span = _code_byte(span, buffer, end, int(octets[at]), memory, memory.weights[place])
            octets[at] = byte
            if byte != pointed:
                onward = 0
    return span


@compiled
def _pointed(octets: np.ndarray, size: int, element: int, place: int) -> int:
    """The byte of twice the last element less the one before it, as whole numbers."""
    if element < 2:
        return 0
    borrow = total = 0
    for lower in range((element - 1) * size + size - 1, (element - 1) * size + place - 1, -1):
        total = 2 * octets[lower] - octets[lower - size] + borrow
        borrow = total >> 8
    return total & 255


@compiled
def _code_byte(
    span: Span, buffer: np.ndarray, end: int | None, byte: int, memory: RawMemory, weights: np.ndarray
) -> tuple[int, Span]:
    contexts, places, inputs = memory.contexts, memory.places, memory.inputs
    node = 1
    for level in range(7, -1, -1):
        for index in range(_INPUTS):
            places[index] = contexts[index] * 256 + node
        odds = weigh(memory.zeros, memory.ones, places, inputs, weights, _INPUTS, _PRIOR)
        bit, span = decide(span, buffer, end, byte >> level & 1, odds, memory.zeros, memory.ones, places, inputs,
                           weights, _INPUTS, _RATE, _MOST)  # fmt: skip
        node = 2 * node + bit
    return node - 256, span
