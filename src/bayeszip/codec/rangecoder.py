"""A binary range coder in exact integers: one function codes a bit in either direction.

The coder narrows an interval [low, low + width) of numbers below 2⁴⁰ by each bit, in proportion to its probability,
and shifts a byte out (or in) whenever the width falls to 2³² or less. The file is the shortest string of bytes that,
followed by zeros for ever, lies in the last interval; of those, the smallest. There is only one, and the decoder
refuses any other.
"""

import math

import numpy as np

from bayeszip.codec.compilation import compiled
from bayeszip.codec.syntax import NotCanonical, TrailingBytes

__all__ = ["PROBABILITY_BITS", "RangeDecoder", "RangeEncoder", "Span", "code_bit", "code_bits"]

PROBABILITY_BITS = 16

#: where a coder is: the interval's low end (encoder) or the code's distance from it (decoder), its width, and the next
#: byte of the buffer. Loops hand it on by value, so that compiled ones keep it in registers.
Span = tuple[int, int, int]

_FULL = 1 << 40
_NARROW = 1 << 32


@compiled
def code_bit(span: Span, buffer: np.ndarray, end: int | None, probability: int, bit: int) -> tuple[int, Span]:
    """Codes `bit`, which is 1 with `probability` / 2¹⁶ (from 1 to 2¹⁶ − 1); returns it, when decoding as well.

    `end` is where the bytes of a decoder end; None: bytes are written. Loops are compiled for either apart.
    """
    offset, width, position = span
    split = (width * probability) >> PROBABILITY_BITS
    if end is None:
        if bit:
            width = split
        else:
            width -= split
            offset += split
        while width <= _NARROW:
            width <<= 8
            offset, position = _shift_out(offset, position, buffer)
    else:
        if offset < split:
            bit, width = 1, split
        else:
            bit, width = 0, width - split
            offset -= split
        while width <= _NARROW:
            width <<= 8
            offset = offset << 8 | (int(buffer[position]) if position < end else 0)  # beyond the end there are zeros
            position += 1
    return bit, (offset, width, position)


@compiled
def _shift_out(low: int, position: int, buffer: np.ndarray) -> tuple[int, int]:
    """Writes the top byte of the low end; a carry runs back through the bytes written before."""
    if low >= _FULL:
        carry = position - 1
        while buffer[carry] == 255:
            buffer[carry] = 0
            carry -= 1
        buffer[carry] += 1
        low -= _FULL
    buffer[position] = low >> 32
    return (low & (_NARROW - 1)) << 8, position + 1


@compiled
def code_bits(span: Span, buffer: np.ndarray, end: int | None, value: int, count: int) -> tuple[int, Span]:
    """Codes the `count` low bits of `value`, each as likely 0 as 1, the most significant first."""
    result = 0
    for shift in range(count - 1, -1, -1):
        bit, span = code_bit(span, buffer, end, 1 << (PROBABILITY_BITS - 1), value >> shift & 1)
        result = result << 1 | bit
    return result, span


class RangeEncoder:
    """Loops write into `buffer` from `span` on; `reserve` makes room beforehand."""

    end = None

    def __init__(self) -> None:
        self.buffer = np.zeros(4096, dtype=np.uint8)
        self.span: Span = (0, _FULL, 0)

    @property
    def position(self) -> int:
        return self.span[2]

    @property
    def spent(self) -> float:
        """The bits of all that was coded so far; `finish` writes them in whole bytes."""
        return 8 * self.position + math.log2(_FULL / self.span[1])

    def reserve(self, count: int) -> None:
        """Makes room for `count` more bytes, and the last few."""
        if self.position + count + 8 > self.buffer.size:
            grown = np.zeros(max(self.position + count + 8, self.buffer.size * 3 // 2), dtype=np.uint8)
            grown[: self.position] = self.buffer[: self.position]
            self.buffer = grown

    def bits(self, value: int, count: int) -> int:
        self.reserve(count)
        value, self.span = code_bits(self.span, self.buffer, self.end, value, count)
        return value

    def finish(self) -> bytes:
        """The bytes: rounds the low end up to as many zero bytes as the interval allows, and leaves zeros out."""
        self.reserve(8)
        low, width, position = self.span
        for zeros in range(5, -1, -1):
            unit = 1 << 8 * zeros
            chosen = (low + unit - 1) // unit * unit
            if chosen < low + width:
                break
        for _ in range(5):
            chosen, position = _shift_out(chosen, position, self.buffer)
        return self.buffer[:position].tobytes().rstrip(b"\0")


class RangeDecoder:
    """Reads `data[start:end]`; loops advance `span`."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        # A copy that could be written to, so that both directions have arrays of one type.
        self.buffer = np.frombuffer(data, dtype=np.uint8)[start:end].copy()
        self.span: Span = (int.from_bytes(data[start : min(end, start + 5)].ljust(5, b"\0"), "big"), _FULL, 5)
        self.start, self.end = start, end - start

    @property
    def position(self) -> int:
        """How far the bytes are accounted for; the coder is five bytes ahead of what it has used."""
        return self.start + min(max(self.span[2] - 5, 0), self.end)

    def reserve(self, count: int) -> None:
        """Reading needs no room."""

    def bits(self, value: int, count: int) -> int:
        value, self.span = code_bits(self.span, self.buffer, self.end, value, count)
        return value

    def finish(self) -> None:
        """Refuses bytes that are not the ones `RangeEncoder.finish` gives."""
        offset, width, position = self.span
        unread = self.end - position
        if unread > 0:
            raise TrailingBytes(f"{unread} bytes follow the last tensor")
        if not self.end:
            return
        unit = 1 << 8 * min(-unread, 8)
        last = int(self.buffer[self.end - 1])
        if not last or offset >= unit or offset + (256 - last) * unit < width:
            raise NotCanonical("the coded weights don't end in the shortest way")
