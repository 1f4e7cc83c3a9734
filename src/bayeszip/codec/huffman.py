"""Canonical Huffman codes: built from counts, sent as lengths, checked before use."""

import heapq
from dataclasses import dataclass

import numpy as np

from bayeszip.codec.bits import BitReader, BitWriter
from bayeszip.codec.compilation import compiled
from bayeszip.codec.syntax import InvalidCode

__all__ = ["LONGEST", "HuffmanCode", "decode_symbol"]

LONGEST = 31


@dataclass(frozen=True, eq=False)
class HuffmanCode:
    """A prefix code, from the code lengths of its symbols (0: the symbol doesn't occur).

    A code of one symbol has that symbol's length 1, but spends no bits on it.
    """

    lengths: np.ndarray

    def __post_init__(self) -> None:
        used = self.lengths[self.lengths > 0].astype(np.int64)
        if self.lengths.max(initial=0) > LONGEST or not used.size:
            raise InvalidCode(f"a code has lengths from 1 to {LONGEST}")
        space = int((1 << (LONGEST - used)).sum())
        single = used.size == 1 and used[0] == 1
        if space != 1 << LONGEST and not single:
            state = "over" if space > 1 << LONGEST else "under"
            raise InvalidCode(f"a prefix code is {state}-subscribed")

    @classmethod
    def of_counts(cls, counts: np.ndarray) -> "HuffmanCode":
        """The shortest code for symbols that occur `counts` times; counts are halved until no length is too long."""
        lengths = _lengths(counts)
        while lengths.max() > LONGEST:
            counts = (counts + 1) // 2
            lengths = _lengths(counts)
        return cls(lengths)

    @property
    def order(self) -> np.ndarray:
        """The symbols that occur, by length and then by number."""
        order = np.argsort(self.lengths, kind="stable")
        return order[self.lengths[order] > 0].astype(np.int64)

    @property
    def per_length(self) -> np.ndarray:
        """How many codewords there are of each length from 0 to `LONGEST`; of length 0 if there is one symbol."""
        counts = np.bincount(self.lengths, minlength=LONGEST + 1).astype(np.int64)
        counts[0] = 0
        if counts.sum() == 1:
            counts[0], counts[1] = 1, 0
        return counts

    def codewords(self) -> tuple[np.ndarray, np.ndarray]:
        """For every symbol its codeword and the bits it takes."""
        words = np.zeros(self.lengths.size, dtype=np.int64)
        widths = self.lengths.astype(np.int64)
        if np.count_nonzero(widths) == 1:
            return words, np.zeros_like(widths)
        word = previous = 0
        for symbol in self.order:
            word <<= int(widths[symbol]) - previous
            previous = int(widths[symbol])
            words[symbol] = word
            word += 1
        return words, widths

    def write(self, out: BitWriter) -> None:
        """Three bits, the width of a length less one; then the lengths."""
        width = int(self.lengths.max()).bit_length()
        out.put(width - 1, 3)
        out.put_all(self.lengths, width)

    @classmethod
    def read(cls, source: BitReader, symbols: int) -> "HuffmanCode":
        width = source.get(3, "the width of code lengths") + 1
        return cls(source.get_all(symbols, width, "the lengths of a prefix code"))


def _lengths(counts: np.ndarray) -> np.ndarray:
    """Huffman's lengths; ties go to the smaller symbol, so that the same counts always give the same code."""
    lengths = np.zeros(counts.size, dtype=np.uint8)
    leaves = [(int(counts[symbol]), int(symbol)) for symbol in np.flatnonzero(counts)]
    if len(leaves) == 1:
        lengths[leaves[0][1]] = 1
        return lengths
    parents: dict[int, int] = {}
    heap, fresh = sorted(leaves), counts.size
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        parents[first[1]] = parents[second[1]] = fresh
        heapq.heappush(heap, (first[0] + second[0], fresh))
        fresh += 1
    depths = {fresh - 1: 0}
    for node in range(fresh - 2, counts.size - 1, -1):
        depths[node] = depths[parents[node]] + 1
    for _, symbol in leaves:
        lengths[symbol] = depths[parents[symbol]] + 1
    return lengths


@compiled
def decode_symbol(
    data: np.ndarray, position: int, end: int, per_length: np.ndarray, order: np.ndarray
) -> tuple[int, int]:
    """The symbol at bit `position` and the position after it; symbol −1 if the bits end first.

    `first` is the first codeword of the length so far, `index` its place in `order`.
    """
    if per_length[0]:
        return int(order[0]), position
    word = first = index = 0
    for length in range(1, len(per_length)):
        if position >= end:
            return -1, position
        word = word << 1 | int(data[position >> 3]) >> (7 - (position & 7)) & 1
        position += 1
        first <<= 1
        count = int(per_length[length])
        if word - first < count:
            return int(order[index + word - first]), position
        index += count
        first += count
    return -1, position
