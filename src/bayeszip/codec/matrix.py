"""A tensor seen as a matrix, and what can be told about it beforehand: live rows and columns, density, lag."""

from dataclasses import dataclass

import numpy as np

from bayeszip.codec.compilation import compiled

__all__ = ["MOST_LAG", "SPARSEST", "Survey", "View", "count_rows", "survey_of", "translate", "view_of"]

#: the quick model codes tensors with more cells than this, or with more weights, by their density's class
_MOST_CELLS, _MOST_WEIGHTS = 1 << 19, 1 << 17
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
    """

    size: int
    rows: int
    columns: int
    kernel: int
    lag: int
    flagged: bool

    def mixed(self, density: int) -> bool:
        """Whether the thorough model codes a matrix of this density's class; else the quick one."""
        return self.size <= _MOST_CELLS and self.size >> (density + 1) // 2 <= _MOST_WEIGHTS

    def seeks_lag(self, density: int) -> bool:
        """Whether a lag is to be sought, and said."""
        return self.mixed(density) and self.flagged and not self.lag


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
    if size > _MOST_CELLS and min(rows, columns) < _LEAST_SIDE:
        return View(size, -(-size // _FLAT_COLUMNS), _FLAT_COLUMNS, 1, 0, flagged=True)
    lag = shape[-1] if len(shape) > 3 and 1 < shape[-1] < MOST_LAG else 0
    return View(size, rows, columns, max(kernel, 1), lag, flagged=rows > 1)


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
    if view.seeks_lag(density):
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


@compiled
def count_rows(symbols: np.ndarray, rows: int) -> np.ndarray:
    """The weights in each row of a full matrix."""
    counts = np.zeros(rows, dtype=np.int64)
    columns = symbols.size // rows
    for row in range(rows):
        for place in range(row * columns, row * columns + columns):
            if symbols[place]:
                counts[row] += 1
    return counts


@compiled
def translate(symbols: np.ndarray, table: np.ndarray) -> None:
    """Replaces every symbol by its entry in `table`, in place."""
    for place in range(symbols.size):
        symbols[place] = table[symbols[place]]
