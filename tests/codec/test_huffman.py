"""Huffman codes: optimal, canonical, checked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeszip.codec.bits import BitReader, BitWriter
from bayeszip.codec.huffman import LONGEST, HuffmanCode, decode_symbol
from bayeszip.codec.syntax import InvalidCode, Truncated


def test_a_code_by_hand():
    code = HuffmanCode.of_counts(np.array([5, 1, 1, 3]))
    assert code.lengths.tolist() == [1, 3, 3, 2]
    words, widths = code.codewords()
    assert [f"{word:0{width}b}" for word, width in zip(words, widths, strict=True)] == ["0", "110", "111", "10"]


def test_one_symbol_costs_nothing():
    code = HuffmanCode.of_counts(np.array([0, 9, 0]))
    assert code.codewords()[1].tolist() == [0, 0, 0]
    assert decode_symbol(np.zeros(1, dtype=np.uint8), 3, 3, code.per_length, code.order) == (1, 3)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any))
def test_codes_are_optimal_and_come_back(counts):
    counts = np.array(counts)
    code = HuffmanCode.of_counts(counts)
    out = BitWriter()
    code.write(out)
    octets = out.to_bytes()
    assert HuffmanCode.read(BitReader(octets, 0, len(octets)), counts.size).lengths.tolist() == code.lengths.tolist()
    used = counts[counts > 0]
    if used.size > 1:
        entropy = float(-(used * np.log2(used / used.sum())).sum())
        spent = int((counts * code.lengths).sum())
        assert entropy - 1e-6 <= spent <= entropy + used.sum()


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(21, 30))
def test_symbols_come_back(symbols, alphabet):
    code = HuffmanCode.of_counts(np.bincount(symbols, minlength=alphabet))
    words, widths = code.codewords()
    out = BitWriter()
    for symbol in symbols:
        out.put(int(words[symbol]), int(widths[symbol]))
    data, position, decoded = np.frombuffer(out.to_bytes(), dtype=np.uint8), 0, []
    for _ in symbols:
        symbol, position = decode_symbol(data, position, out.position, code.per_length, code.order)
        decoded.append(symbol)
    assert decoded == symbols
    assert position == out.position


def test_lengths_are_limited():
    fibonacci = [1, 1]
    while len(fibonacci) < 50:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    code = HuffmanCode.of_counts(np.array(fibonacci))
    assert code.lengths.max() <= LONGEST


@pytest.mark.parametrize(
    ("lengths", "fault"),
    [([1, 1, 1], "over"), ([1, 2], "under"), ([2], "under"), ([0, 0], "lengths"), ([1, 32], "lengths")],
)
def test_codes_that_are_none_are_refused(lengths, fault):
    with pytest.raises(InvalidCode, match=fault):
        HuffmanCode(np.array(lengths, dtype=np.uint8))


def test_a_codeword_cut_short_is_noticed():
    code = HuffmanCode(np.array([1, 2, 2], dtype=np.uint8))
    assert decode_symbol(np.array([0x80], dtype=np.uint8), 0, 1, code.per_length, code.order)[0] == -1
    with pytest.raises(Truncated):
        HuffmanCode.read(BitReader(b"\x20", 0, 1), 3)
