"""Compressed sparse rows, the paper's layout (app. B): row counts, column offsets of few bits, and the values.

A tensor is a matrix of its first dimension by all others (one row, if it has a single dimension), or that matrix
transposed. Rows and columns without any weight may be left out, at the price of a bit for each row or column.
An entry is an offset and a symbol. The offset counts the columns skipped; where more are skipped than `width` bits can
say, a padding entry, symbol 0, stands in the last column that they reach.
"""

from dataclasses import dataclass

import numpy as np

from bayeszip.codec.bits import BitReader, BitWriter, get_bits, put_bits
from bayeszip.codec.compilation import entry
from bayeszip.codec.evidence import log_count
from bayeszip.codec.huffman import HuffmanCode, decode_symbol
from bayeszip.codec.syntax import CorruptPayload, InvalidField

__all__ = [
    "WIDEST",
    "Layout",
    "SymbolRows",
    "choose_layout",
    "read_entries",
    "read_layout",
    "write_entries",
    "write_layout",
]

WIDEST = 16
_WIDTH_BITS, _COUNT_BITS = 5, 6


@dataclass(frozen=True, eq=False)
class SymbolRows:
    """Symbols in one dimension, seen as a matrix: row r, column c is the element r·row_step + c·column_step."""

    symbols: np.ndarray
    rows: int
    columns: int
    row_step: int
    column_step: int

    @classmethod
    def of(cls, symbols: np.ndarray, shape: tuple[int, ...], transposed: bool) -> "SymbolRows":
        rows = shape[0] if len(shape) > 1 else 1
        columns = symbols.size // rows
        if transposed:
            return cls(symbols, columns, rows, 1, columns)
        return cls(symbols, rows, columns, columns, 1)


@dataclass(frozen=True, eq=False)
class Layout:
    """How one tensor is laid out. `entries` and `padding` follow from the tensor; so do `rows` and `columns`,
    which tell (1 or 0) whether a row or column stays, where dropping is on."""

    transposed: bool
    drop_rows: bool
    drop_columns: bool
    width: int
    count_width: int
    rows: np.ndarray
    columns: np.ndarray
    entries: int = 0
    padding: int = 0


def choose_layout(symbols: np.ndarray, shape: tuple[int, ...], width: int | None = None) -> Layout:
    """The layout that takes the fewest bits, values counted by their entropy; `width` fixes the offsets'."""
    candidates = [
        candidate
        for transposed in (False, True)
        for candidate in _candidates(SymbolRows.of(symbols, shape, transposed), transposed, width)
    ]
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _candidates(tensor: SymbolRows, transposed: bool, fixed_width: int | None) -> list[tuple[int, Layout]]:
    rows, columns = np.zeros(tensor.rows, dtype=np.uint8), np.zeros(tensor.columns, dtype=np.uint8)
    _mark(tensor.symbols, tensor.row_step, tensor.column_step, rows, columns)
    nonzero = int(np.count_nonzero(tensor.symbols))
    found = []
    for drop_columns in (False, True) if tensor.rows > 1 else (False,):
        kept = columns if drop_columns else np.ones_like(columns)
        padding, longest, before = np.zeros((3, WIDEST + 1), dtype=np.int64)
        _survey(tensor.symbols, tensor.row_step, tensor.column_step, rows, kept, padding, longest, before)
        for drop_rows in (False, True) if tensor.columns > 1 else (False,):
            stay = rows if drop_rows else np.ones_like(rows)
            for width in range(WIDEST + 1) if fixed_width is None else (fixed_width,):
                pads = int(padding[width])
                count_width = (int(longest[width]) - drop_rows).bit_length()
                bits = drop_rows * rows.size + drop_columns * columns.size + int(stay.sum()) * count_width
                bits += (nonzero + pads) * width + _padding_bits(nonzero, pads)
                layout = Layout(
                    transposed, drop_rows, drop_columns, width, count_width, stay, kept, nonzero + pads, pads
                )
                found.append((bits, layout))
    return found


def _padding_bits(nonzero: int, pads: int) -> int:
    """What padding adds to the code of the values: its entropy among them, but at least the bits Huffman's code needs,
    which are one for each padding, and one more for each value where padding is the commoner."""

    def spread(count: int) -> int:
        return count * int(log_count(count)) if count else 0

    natural = spread(nonzero + pads) - spread(pads) - spread(nonzero)
    return max(natural * 1000 // 177_446, pads + min(nonzero, pads))  # 256 · ln 2 = 177.446


@entry
def _mark(symbols: np.ndarray, row_step: int, column_step: int, rows: np.ndarray, columns: np.ndarray) -> None:
    """Marks the rows and columns that hold a weight."""
    for row in range(len(rows)):
        for column in range(len(columns)):
            if symbols[row * row_step + column * column_step]:
                rows[row] = 1
                columns[column] = 1


@entry
def _survey(
    symbols: np.ndarray,
    row_step: int,
    column_step: int,
    rows: np.ndarray,
    columns: np.ndarray,
    padding: np.ndarray,
    longest: np.ndarray,
    before: np.ndarray,
) -> None:
    """For every width the padding entries needed, `before` the last row too, and the entries of the longest row."""
    for row in range(len(rows)):
        if not rows[row]:
            continue
        for width in range(len(padding)):
            before[width] = padding[width]
        entries = skipped = 0
        for column in range(len(columns)):
            if not columns[column]:
                continue
            if symbols[row * row_step + column * column_step]:
                for width in range(len(padding)):
                    padding[width] += skipped >> width
                entries += 1
                skipped = 0
            else:
                skipped += 1
        for width in range(len(padding)):
            longest[width] = max(longest[width], padding[width] - before[width] + entries)


def write_layout(out: BitWriter, layout: Layout) -> None:
    """Whether the matrix is transposed, rows and columns dropped (which), the widths of an offset and of a count."""
    out.put(layout.transposed, 1)
    out.put(layout.drop_rows, 1)
    out.put(layout.drop_columns, 1)
    out.put(layout.width, _WIDTH_BITS)
    out.put(layout.count_width, _COUNT_BITS)
    if layout.drop_rows:
        out.put_all(layout.rows, 1)
    if layout.drop_columns:
        out.put_all(layout.columns, 1)


def read_layout(source: BitReader, size: int, shape: tuple[int, ...]) -> Layout:
    transposed, drop_rows, drop_columns = (bool(source.get(1, "a tensor's layout")) for _ in range(3))
    width = source.get(_WIDTH_BITS, "the width of an offset")
    count_width = source.get(_COUNT_BITS, "the width of a row's count")
    if width > WIDEST or count_width > 40:
        raise InvalidField(f"offsets of {width} bits or counts of {count_width} bits don't exist")
    height = shape[0] if len(shape) > 1 else 1
    rows, columns = (size // height, height) if transposed else (height, size // height)
    stay = source.get_all(rows, 1, "the rows that stay") if drop_rows else np.ones(rows, dtype=np.uint8)
    kept = source.get_all(columns, 1, "the columns that stay") if drop_columns else np.ones(columns, dtype=np.uint8)
    return Layout(transposed, drop_rows, drop_columns, width, count_width, stay, kept)


def write_entries(out: BitWriter, tensor: SymbolRows, layout: Layout, code: HuffmanCode) -> None:
    """The counts of the rows, all offsets, all symbols."""
    words, widths = code.codewords()
    stay = int(layout.rows.sum())
    offsets = out.position + stay * layout.count_width
    values = offsets + layout.entries * layout.width
    longest = int(widths.max())
    out.reserve(stay * layout.count_width + layout.entries * (layout.width + longest))
    cursors = np.array([out.position, offsets, values], dtype=np.int64)
    _write_rows(
        tensor.symbols,
        tensor.row_step,
        tensor.column_step,
        layout.rows,
        layout.columns,
        out.buffer,
        cursors,
        layout.width,
        layout.count_width,
        int(layout.drop_rows),
        words,
        widths,
    )
    out.position = int(cursors[2])


@entry
def _write_rows(
    symbols: np.ndarray,
    row_step: int,
    column_step: int,
    rows: np.ndarray,
    columns: np.ndarray,
    out: np.ndarray,
    cursors: np.ndarray,
    width: int,
    count_width: int,
    least: int,
    words: np.ndarray,
    widths: np.ndarray,
) -> None:
    counts, offsets, values = int(cursors[0]), int(cursors[1]), int(cursors[2])
    for row in range(len(rows)):
        if not rows[row]:
            continue
        entries = skipped = 0
        for column in range(len(columns)):
            if not columns[column]:
                continue
            symbol = int(symbols[row * row_step + column * column_step])
            if not symbol:
                skipped += 1
                continue
            while skipped >> width:
                offsets = put_bits(out, offsets, (1 << width) - 1, width)
                values = put_bits(out, values, int(words[0]), int(widths[0]))
                skipped -= 1 << width
                entries += 1
            offsets = put_bits(out, offsets, skipped, width)
            values = put_bits(out, values, int(words[symbol]), int(widths[symbol]))
            entries += 1
            skipped = 0
        counts = put_bits(out, counts, entries - least, count_width)
    cursors[0], cursors[1], cursors[2] = counts, offsets, values


def read_entries(source: BitReader, tensor: SymbolRows, layout: Layout, code: HuffmanCode) -> tuple[int, int]:
    """Fills the tensor's symbols, all 0 so far; returns where the offsets and where the values began, in bits."""
    stay = int(layout.rows.sum())
    source.require(stay * layout.count_width, "the counts of the rows")
    least = int(layout.drop_rows)
    entries = int(_sum_counts(source.data, source.position, stay, layout.count_width)) + stay * least
    offsets = source.position + stay * layout.count_width
    values = offsets + entries * layout.width
    if entries > tensor.symbols.size:
        raise CorruptPayload(f"{entries} entries are declared for {tensor.symbols.size} weights")
    source.require(values - source.position, "the offsets of the entries")
    cursors = np.array([source.position, offsets, values, source.end], dtype=np.int64)
    intact = _read_rows(
        tensor.symbols,
        tensor.row_step,
        tensor.column_step,
        layout.rows,
        layout.columns,
        source.data,
        cursors,
        layout.width,
        layout.count_width,
        least,
        code.per_length,
        code.order,
    )
    if not intact:
        raise CorruptPayload("the entries of a tensor leave its rows or end too early")
    source.position = int(cursors[2])
    return offsets, values


@entry
def _sum_counts(data: np.ndarray, position: int, count: int, width: int) -> int:
    total = 0
    for place in range(count):
        total += get_bits(data, position + place * width, width)
    return total


@entry
def _read_rows(
    symbols: np.ndarray,
    row_step: int,
    column_step: int,
    rows: np.ndarray,
    columns: np.ndarray,
    data: np.ndarray,
    cursors: np.ndarray,
    width: int,
    count_width: int,
    least: int,
    per_length: np.ndarray,
    order: np.ndarray,
) -> bool:
    counts, offsets, values, end = int(cursors[0]), int(cursors[1]), int(cursors[2]), int(cursors[3])
    for row in range(len(rows)):
        if not rows[row]:
            continue
        entries = get_bits(data, counts, count_width) + least
        counts += count_width
        column = -1
        for _ in range(entries):
            steps = get_bits(data, offsets, width) + 1
            offsets += width
            while steps:
                column += 1
                if column >= len(columns):
                    return False
                steps -= int(columns[column])
            symbol, values = decode_symbol(data, values, end, per_length, order)
            if symbol < 0:
                return False
            symbols[row * row_step + column * column_step] = symbol
    cursors[2] = values
    return True
