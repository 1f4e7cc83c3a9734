"""The paper's accounting, to the letter: what its text (section "Model Compression", app. B) makes of a network.

Dead units are gone from the model already ("Model Pruning"). Of what is left, each weight tensor is a matrix of its
first dimension by all others, a bias one row, and is stored as three lists: IR, where each row's entries end; IC', the
columns skipped before each entry, in a fixed number of bits, with a zero in A wherever a gap does not fit; A, the
entries, in one Huffman code for each codebook. Nothing is transposed, no columns are left out, shared values are
float32. Beside the lists count the lengths of the code's words and the shared values, but no names, shapes or graph.

The paper is silent on the width of a pointer in IR: here it is the least that holds the last of its matrix.
"""

from dataclasses import dataclass

import numpy as np

from bayeszip.codec.huffman import HuffmanCode
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

__all__ = ["PaperSize", "paper_size"]


@dataclass(frozen=True)
class PaperSize:
    """Bits of each part, and how many rows and entries there are; padding zeros are entries too."""

    rows: int
    entries: int
    padding: int
    pointer_bits: int
    offset_bits: int
    value_bits: int
    code_bits: int
    codebook_bits: int
    #: Tensors that are not quantized, as they are.
    raw_bits: int

    @property
    def bytes(self) -> int:
        bits = self.pointer_bits + self.offset_bits + self.value_bits + self.code_bits
        return -(-(bits + self.codebook_bits + self.raw_bits) // 8)


def paper_size(model: CompressedModel, offset_bits: int) -> PaperSize:
    """Count `model` with column offsets of `offset_bits`: the paper has 5 for LeNet-300-100 and 8 for LeNet-5."""
    counts: dict[bytes, np.ndarray] = {}
    rows = entries = padding = pointer_bits = raw_bits = 0
    for tensor in model.tensors.values():
        if isinstance(tensor, RawTensor):
            raw_bits += 8 * tensor.values.nbytes
            continue
        matrix = _matrix(tensor)
        pads = _padding(matrix, offset_bits)
        stored = tensor.nonzero + pads
        found = np.bincount(matrix.reshape(-1), minlength=tensor.codebook.size)
        found[0] = pads
        book = tensor.codebook.tobytes()
        counts[book] = counts[book] + found if book in counts else found
        rows, entries, padding = rows + len(matrix), entries + stored, padding + pads
        pointer_bits += len(matrix) * stored.bit_length()
    codes = {book: HuffmanCode.of_counts(found) for book, found in counts.items() if found.any()}
    return PaperSize(
        rows=rows,
        entries=entries,
        padding=padding,
        pointer_bits=pointer_bits,
        offset_bits=entries * offset_bits,
        value_bits=sum(int((counts[book] * code.codewords()[1]).sum()) for book, code in codes.items()),
        code_bits=sum(code.lengths.size * int(code.lengths.max()).bit_length() for code in codes.values()),
        codebook_bits=sum(32 * found.size for found in counts.values()),
        raw_bits=raw_bits,
    )


def _matrix(tensor: QuantizedTensor) -> np.ndarray:
    symbols = tensor.symbols
    return symbols.reshape(len(symbols) if symbols.ndim > 1 else 1, -1)


def _padding(matrix: np.ndarray, offset_bits: int) -> int:
    """How many zeros stand in A because more columns are skipped than an offset can say."""
    row, column = np.nonzero(matrix)
    before = np.concatenate([[-1], column[:-1]]) if column.size else column
    first = np.concatenate([[True], row[1:] != row[:-1]]) if row.size else row.astype(bool)
    skipped = column - np.where(first, -1, before) - 1
    return int((skipped >> offset_bits).sum())
