"""Sparse rows: layouts by hand, and back again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bayeszip.codec.bits import BitReader, BitWriter
from bayeszip.codec.csr import SymbolRows, choose_layout, read_entries, read_layout, write_entries, write_layout
from bayeszip.codec.huffman import HuffmanCode
from bayeszip.codec.syntax import CorruptPayload, InvalidField, Truncated

CODE = HuffmanCode(np.array([1, 2, 2], dtype=np.uint8))  # 0, 10, 11


def written(symbols: np.ndarray, width: int | None) -> BitWriter:
    flat = symbols.reshape(-1)
    layout = choose_layout(flat, symbols.shape, width)
    out = BitWriter()
    write_layout(out, layout)
    write_entries(out, SymbolRows.of(flat, symbols.shape, layout.transposed), layout, CODE)
    return out


def read(octets: bytes, shape: tuple[int, ...]) -> np.ndarray:
    return read_from(BitReader(octets, 0, len(octets)), shape)


def read_from(source: BitReader, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    layout = read_layout(source, size, shape)
    symbols = np.zeros(size, dtype=np.uint8)
    read_entries(source, SymbolRows.of(symbols, shape, layout.transposed), layout, CODE)
    return symbols.reshape(shape)


def test_a_padding_entry_by_hand():
    symbols = np.array([[0, 0, 0, 0, 0, 2, 1]], dtype=np.uint8)
    out = written(symbols, width=2)
    bits = "".join(f"{octet:08b}" for octet in out.to_bytes())[: out.position]
    layout = "0" + "0" + "0" + "00010" + "000010"  # not transposed, nothing dropped, offsets and counts of two bits
    counts = "11"
    offsets = "11" + "01" + "00"  # four columns to the padding, one more skipped, none
    values = "0" + "11" + "10"
    assert bits == layout + counts + offsets + values


@given(
    hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=9), elements=st.integers(0, 2)).filter(
        np.any
    ),
    st.one_of(st.none(), st.integers(1, 8)),
)
def test_any_tensor_comes_back(symbols, width):
    assert np.array_equal(read(written(symbols, width).to_bytes(), symbols.shape), symbols)


def test_the_best_layout_is_found():
    columns = np.zeros((64, 64), dtype=np.uint8)
    columns[:, 5] = 1
    layout = choose_layout(columns.reshape(-1), columns.shape)
    assert (layout.entries, layout.padding) == (64, 0)
    assert written(columns, None).position < 64 * 4
    dense = np.ones((16, 16), dtype=np.uint8)
    assert choose_layout(dense.reshape(-1), dense.shape).width == 0


@pytest.mark.parametrize(
    ("bits", "error"),
    [
        ("000" + "11111" + "000001" + "0" * 40, InvalidField),  # offsets of 31 bits
        ("010" + "00001" + "000001", Truncated),  # rows that stay are missing
        ("000" + "00001" + "100000" + "1" * 64, CorruptPayload),  # more entries than weights
        ("000" + "00010" + "000001" + "11" + "11" + "11" + "0000", CorruptPayload),  # leaves its row
        ("000" + "00001" + "000001" + "11" + "00" + "1", CorruptPayload),  # values end too early
    ],
)
def test_faulty_layouts_have_named_errors(bits, error):
    out = BitWriter()
    for bit in bits:
        out.put(int(bit), 1)
    octets = out.to_bytes()
    source = BitReader(octets, 0, len(octets))
    source.end = len(bits)
    with pytest.raises(error):
        read_from(source, (2, 3))
