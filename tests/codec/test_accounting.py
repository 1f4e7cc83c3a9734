"""The paper's accounting against a count by hand."""

import numpy as np
import pytest

from bayeszip.codec.accounting import paper_size
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

VALUES = np.array([0.0, -1.0, 1.0, 2.0], dtype=np.float32)


def row(length, **symbols):
    found = np.zeros(length, dtype=np.uint8)
    for column, symbol in symbols.items():
        found[int(column[1:])] = symbol
    return found


def test_a_small_matrix_counted_by_hand():
    # Offsets of 2 bits say 0 to 3 skipped columns. By hand, with P for a padding zero:
    #   row 0: columns 0 and 9: offset 0; then 8 skipped, of which each padding takes 4: P P, offset 0     4 entries
    #   row 1: nothing                                                                                     0
    #   row 2: column 3 (offset 3), column 4 (offset 0), column 8 (offset 3)                               3
    #   row 3: column 4: four skipped, which 2 bits can't say: P, offset 0                                 2
    matrix = np.stack([row(10, c0=1, c9=2), row(10), row(10, c3=1, c4=1, c8=3), row(10, c4=1)])
    # The bias, one row: column 2 (offset 2).
    bias = row(4, c2=1)
    size = paper_size(CompressedModel({"w": QuantizedTensor(matrix, VALUES), "b": QuantizedTensor(bias, VALUES)}), 2)
    assert (size.rows, size.entries, size.padding) == (5, 10, 3)
    # Pointers 4, 4, 7, 9 need 4 bits each; the bias's, 1, needs one.
    assert size.pointer_bits == 4 * 4 + 1
    assert size.offset_bits == 10 * 2
    # A holds 0 three times, 1 five times, 2 and 3 once each: words of 2, 1, 3 and 3 bits.
    assert size.value_bits == 3 * 2 + 5 * 1 + 3 + 3
    # Their lengths, at most 3, in 2 bits each; four shared values of 32 bits.
    assert (size.code_bits, size.codebook_bits) == (4 * 2, 4 * 32)
    assert size.bytes == -(-(17 + 20 + 17 + 8 + 128) // 8)


def test_a_kernel_is_a_row_for_each_output_channel():
    kernel = np.zeros((2, 3, 2, 2), dtype=np.uint8)
    kernel[1, 2, 1, 1] = 1
    size = paper_size(CompressedModel({"w": QuantizedTensor(kernel, VALUES)}), 8)
    assert (size.rows, size.entries, size.pointer_bits, size.offset_bits) == (2, 1, 2, 8)
    # A code of a single word takes no bits.
    assert size.value_bits == 0


@pytest.mark.parametrize("codebook", [VALUES, np.zeros(1)])
def test_nothing_but_zeros_takes_its_codebook(codebook):
    size = paper_size(CompressedModel({"w": QuantizedTensor(np.zeros((3, 4), dtype=np.uint8), codebook)}), 5)
    assert (size.entries, size.bytes) == (0, 4 * codebook.size)


def test_codebooks_of_their_own_have_codes_of_their_own_and_raw_tensors_count_as_they_are():
    first = QuantizedTensor(np.array([[1, 2]]), VALUES)
    second = QuantizedTensor(np.array([[1, 1]]), 2 * VALUES)
    raw = RawTensor(np.ones(3, dtype=np.float32), "float32")
    size = paper_size(CompressedModel({"a": first, "b": second, "c": raw}), 5)
    assert size.codebook_bits == 2 * 4 * 32
    # Two words of one bit in the first; one word, for nothing, in the second.
    assert (size.value_bits, size.code_bits) == (2, 4 * 1 + 4 * 1)
    assert size.raw_bits == 96
