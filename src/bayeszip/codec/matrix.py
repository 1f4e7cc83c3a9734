"""A tensor seen as a matrix, and what can be told about it beforehand: live rows and columns, density, lag."""

from dataclasses import dataclass

import numpy as np

from bayeszip.codec.compilation import compiled

__all__ = ["LARGEST_MIXED", "MOST_LAG", "SPARSEST", "Survey", "View", "survey_of", "view_of"]

#: tensors with more weights than this are coded by the quick model
LARGEST_MIXED = 1 << 19
#: a lag is below this; a density's class is at most this
MOST_LAG = 64
SPARSEST = 31

_LEAST_SIDE = 16
_FLAT_COLUMNS = 4096


@dataclass(frozen=True)
class View:
    """A matrix over `size` weights in order, the last row perhaps incomplete.

    Args:
        kernel: neighbouring columns that belong to one filter kernel.
        lag: columns from a weight to the one above it in its kernel; 0: unknown, to be sought.
        flagged: whether rows and columns are flagged as live or dead.
        mixed: whether the thorough model codes it; else the quick one.
    """

    size: int
    rows: int
    columns: int
    kernel: int
    lag: int
    flagged: bool
    mixed: bool


def view_of(shape: tuple[int, ...]) -> View:
    """First dimension by all others; one row for a vector; large and narrow tensors in rows of 4096."""
    size = 1
    for dimension in shape:
        size *= dimension
    rows = shape[0] if len(shape) > 1 else 1
    columns = size // rows if rows else 0
    kernel = 1
    for dimension in shape[2:]:
        kernel *= dimension
    mixed = size <= LARGEST_MIXED
    if not mixed and min(rows, columns) < _LEAST_SIDE:
        return View(size, -(-size // _FLAT_COLUMNS), _FLAT_COLUMNS, 1, 0, flagged=True, mixed=False)
    lag = shape[-1] if len(shape) > 3 and 1 < shape[-1] < MOST_LAG else 0
    return View(size, rows, columns, max(kernel, 1), lag, flagged=rows > 1, mixed=mixed)


@dataclass(frozen=True, eq=False)
class Survey:
    """What is said about a matrix before its weights.

    Args:
        rows: 1 for each row that holds a weight (all 1 if not flagged).
        columns: the same for columns.
        density: class of the share of weights among live cells: about 2^(−density/2).
        lag: the distance in a row at which weights most often recur, as in images and kernels; 0: none.
    """

    rows: np.ndarray
    columns: np.ndarray
    density: int
    lag: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Survey):
            return NotImplemented
        return (
            (self.density, self.lag) == (other.density, other.lag)
            and np.array_equal(self.rows, other.rows)
            and np.array_equal(self.columns, other.columns)
        )


def survey_of(symbols: np.ndarray, view: View) -> Survey:
    """The survey of a matrix that holds a weight."""
    rows, columns = np.zeros(view.rows, dtype=np.uint8), np.zeros(view.columns, dtype=np.uint8)
    found = int(_mark(symbols, rows, columns))
    if not view.flagged:
        rows[:] = 1
        columns[:] = 1
    cells = int(np.count_nonzero(rows)) * int(np.count_nonzero(columns))
    density = min((cells * cells // (found * found)).bit_length() - 1, SPARSEST)
    lag = view.lag
    if view.mixed and view.flagged and not lag:
        recurring = np.zeros(min(MOST_LAG, max(view.columns // 2, 2)), dtype=np.int64)
        _recur(symbols, view.columns, recurring)
        lag = int(np.argmax(recurring))
    return Survey(rows, columns, density, lag)


@compiled
def _mark(symbols: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> int:
    """Marks the rows and columns that hold a weight; returns how many weights there are."""
    found = 0
    for row in range(rows.size):
        start = row * columns.size
        before = found
        for place in range(start, min(start + columns.size, symbols.size)):
            if symbols[place]:
                columns[place - start] = 1
                found += 1
        if found > before:
            rows[row] = 1
    return found


@compiled
def _recur(symbols: np.ndarray, columns: int, recurring: np.ndarray) -> None:
    """Counts, for every lag from 2, the pairs of weights at this distance in a row."""
    for place in range(symbols.size):
        if symbols[place]:
            column = place % columns
            for lag in range(2, min(recurring.size, column + 1)):
                if symbols[place - lag]:
                    recurring[lag] += 1
