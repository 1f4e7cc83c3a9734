"""Bits, the most significant of a byte first: written one after the other, read back within bounds."""

import numpy as np

from bayeszip.codec.compilation import compiled, entry
from bayeszip.codec.syntax import Truncated

__all__ = ["BitReader", "BitWriter", "get_bits", "put_bits"]


@compiled
def put_bits(out: np.ndarray, position: int, value: int, width: int) -> int:
    """Sets `width` bits of `out` from bit `position` on to `value`; returns the position after them."""
    for shift in range(width - 1, -1, -1):
        if value >> shift & 1:
            out[position >> 3] |= 0x80 >> (position & 7)
        position += 1
    return position


@compiled
def get_bits(data: np.ndarray, position: int, width: int) -> int:
    """The `width` bits of `data` from bit `position` on; the caller has made sure that they exist."""
    value = 0
    for place in range(position, position + width):
        value = value << 1 | int(data[place >> 3]) >> (7 - (place & 7)) & 1
    return value


@entry
def _put_all(out: np.ndarray, position: int, values: np.ndarray, width: int) -> int:
    for value in values:
        position = put_bits(out, position, int(value), width)
    return position


@entry
def _get_all(data: np.ndarray, position: int, values: np.ndarray, width: int) -> None:
    for place in range(len(values)):
        values[place] = get_bits(data, position + place * width, width)


class BitWriter:
    """A growing row of bits. `reserve` makes room; kernels write into `buffer` and move `position`."""

    def __init__(self) -> None:
        self.buffer = np.zeros(1024, dtype=np.uint8)
        self.position = 0

    def reserve(self, bits: int) -> None:
        needed = (self.position + bits + 7) // 8
        if needed > self.buffer.size:
            grown = np.zeros(max(needed, 2 * self.buffer.size), dtype=np.uint8)
            grown[: self.buffer.size] = self.buffer
            self.buffer = grown

    def put(self, value: int, width: int) -> None:
        self.reserve(width)
        self.position = int(put_bits(self.buffer, self.position, value, width))

    def put_all(self, values: np.ndarray, width: int) -> None:
        self.reserve(values.size * width)
        self.position = int(_put_all(self.buffer, self.position, values, width))

    def to_bytes(self) -> bytes:
        """The bits so far; the last byte is filled with zeros."""
        return self.buffer[: (self.position + 7) // 8].tobytes()


class BitReader:
    """Reads bits from `data[start:end]`."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        self.data = np.frombuffer(data, dtype=np.uint8)
        self.position = 8 * start
        self.end = 8 * end

    def require(self, bits: int, what: str) -> None:
        """Refuses the file if it has fewer than `bits` bits left."""
        if bits > self.end - self.position:
            raise Truncated(f"{what} needs {bits} bits, {self.end - self.position} are left")

    def get(self, width: int, what: str) -> int:
        self.require(width, what)
        self.position += width
        return int(get_bits(self.data, self.position - width, width))

    def get_all(self, count: int, width: int, what: str) -> np.ndarray:
        """`count` values of up to eight bits each."""
        self.require(count * width, what)
        values = np.zeros(count, dtype=np.uint8)
        _get_all(self.data, self.position, values, width)
        self.position += count * width
        return values
