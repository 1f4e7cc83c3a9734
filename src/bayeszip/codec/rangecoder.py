"""A binary range coder in exact integers: one function codes a bit in either direction.

The coder narrows an interval [low, low + width) of numbers below 2⁴⁰ by each bit, in proportion to its probability,
and shifts a byte out (or in) whenever the width falls to 2³² or less. The file is the shortest string of bytes that,
followed by zeros for ever, lies in the last interval; of those, the smallest. There is only one, and the decoder
refuses any other.
"""

import numpy as np

from bayeszip.codec.compilation import compiled
from bayeszip.codec.syntax import NotCanonical, TrailingBytes

__all__ = ["DECODING", "POSITION", "PROBABILITY_BITS", "STATE", "RangeDecoder", "RangeEncoder", "code_bit", "code_bits"]

PROBABILITY_BITS = 16

#: places in a coder's state: the interval's low end (encoder) or the code's distance from it (decoder), its width,
#: the next byte of the buffer, where the buffer ends, and the direction
OFFSET, WIDTH, POSITION, END, DECODING = range(5)
STATE = 5

_FULL = 1 << 40
_NARROW = 1 << 32


@compiled
def code_bit(state: np.ndarray, buffer: np.ndarray, probability: int, bit: int) -> int:
    """Codes `bit`, which is 1 with `probability` / 2¹⁶ (from 1 to 2¹⁶ − 1); returns it, when decoding as well."""
    width = state[WIDTH]
    split = (width * probability) >> PROBABILITY_BITS
    if state[DECODING]:
        offset = state[OFFSET]
        if offset < split:
            bit, width = 1, split
        else:
            bit, width = 0, width - split
            state[OFFSET] = offset - split
        while width <= _NARROW:
            width <<= 8
            _shift_in(state, buffer)
    else:
        if bit:
            width = split
        else:
            width -= split
            state[OFFSET] += split
        while width <= _NARROW:
            width <<= 8
            _shift_out(state, buffer)
    state[WIDTH] = width
    return bit


@compiled
def _shift_in(state: np.ndarray, buffer: np.ndarray) -> None:
    """Takes the next byte; beyond the end there are zeros."""
    position = state[POSITION]
    state[OFFSET] = state[OFFSET] << 8 | (int(buffer[position]) if position < state[END] else 0)
    state[POSITION] = position + 1


@compiled
def _shift_out(state: np.ndarray, buffer: np.ndarray) -> None:
    """Writes the top byte of the low end; a carry runs back through the bytes written before."""
    low = state[OFFSET]
    if low >= _FULL:
        carry = state[POSITION] - 1
        while buffer[carry] == 255:
            buffer[carry] = 0
            carry -= 1
        buffer[carry] += 1
        low -= _FULL
    buffer[state[POSITION]] = low >> 32
    state[POSITION] += 1
    state[OFFSET] = (low & (_NARROW - 1)) << 8


@compiled
def code_bits(state: np.ndarray, buffer: np.ndarray, value: int, count: int) -> int:
    """Codes the `count` low bits of `value`, each as likely 0 as 1, the most significant first."""
    result = 0
    for shift in range(count - 1, -1, -1):
        result = result << 1 | code_bit(state, buffer, 1 << (PROBABILITY_BITS - 1), value >> shift & 1)
    return result


class RangeEncoder:
    """Kernels write into `buffer` through `state`; `reserve` makes room beforehand."""

    def __init__(self) -> None:
        self.buffer = np.zeros(4096, dtype=np.uint8)
        self.state = np.zeros(STATE, dtype=np.int64)
        self.state[WIDTH] = _FULL

    @property
    def position(self) -> int:
        return int(self.state[POSITION])

    def reserve(self, count: int) -> None:
        """Makes room for `count` more bytes, and the last few."""
        if self.position + count + 8 > self.buffer.size:
            grown = np.zeros(max(self.position + count + 8, self.buffer.size * 3 // 2), dtype=np.uint8)
            grown[: self.position] = self.buffer[: self.position]
            self.buffer = grown

    def bits(self, value: int, count: int) -> int:
        self.reserve(count)
        return int(code_bits(self.state, self.buffer, value, count))

    def finish(self) -> bytes:
        """The bytes: rounds the low end up to as many zero bytes as the interval allows, and leaves zeros out."""
        self.reserve(8)
        low, width = int(self.state[OFFSET]), int(self.state[WIDTH])
        for zeros in range(5, -1, -1):
            unit = 1 << 8 * zeros
            chosen = (low + unit - 1) // unit * unit
            if chosen < low + width:
                break
        self.state[OFFSET] = chosen
        for _ in range(5):
            _shift_out(self.state, self.buffer)
        return self.buffer[: self.position].tobytes().rstrip(b"\0")


class RangeDecoder:
    """Reads `data[start:end]`; kernels advance `state`."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        # A copy that could be written to, so that both directions have the same compiled loops.
        self.buffer = np.frombuffer(data, dtype=np.uint8)[start:end].copy()
        self.state = np.zeros(STATE, dtype=np.int64)
        self.state[WIDTH], self.state[END], self.state[DECODING] = _FULL, end - start, 1
        self.start = start
        for _ in range(5):
            _shift_in(self.state, self.buffer)

    @property
    def position(self) -> int:
        """How far the bytes are accounted for; the coder is five bytes ahead of what it has used."""
        return self.start + min(max(int(self.state[POSITION]) - 5, 0), int(self.state[END]))

    def reserve(self, count: int) -> None:
        """Reading needs no room."""

    def bits(self, value: int, count: int) -> int:
        return int(code_bits(self.state, self.buffer, value, count))

    def finish(self) -> None:
        """Refuses bytes that are not the ones `RangeEncoder.finish` gives."""
        offset, width = int(self.state[OFFSET]), int(self.state[WIDTH])
        end = int(self.state[END])
        unread = end - int(self.state[POSITION])
        if unread > 0:
            raise TrailingBytes(f"{unread} bytes follow the last tensor")
        if not end:
            return
        unit = 1 << 8 * min(-unread, 8)
        last = int(self.buffer[end - 1])
        if not last or offset >= unit or offset + (256 - last) * unit < width:
            raise NotCanonical("the coded weights don't end in the shortest way")
