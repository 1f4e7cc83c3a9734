"""A tensor seen as a matrix, and what can be told about it beforehand: live rows and columns, density, lag."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["MOST_LAG", "SPARSEST", "Survey", "View", "count_rows", "survey_of", "translate", "view_of"]

#: the quick model codes tensors with more cells than this, or with more weights, by their density's class
_MOST_CELLS, _MOST_WEIGHTS = 1 << 19, 1 << 17
#: a lag is below this; a density's class is at most this
MOST_LAG = 64
SPARSEST = 31

_LEAST_SIDE = 16
_FLAT_COLUMNS = 4096
_BLOCK = 1 << 18


@dataclass(frozen=True)
class View:
    """A matrix over `size` weights in order, the last row perhaps incomplete.

    Args:
        kernel: neighboring columns that belong to one filter kernel.
        lag: columns from a weight to the one above it in its kernel; 0: unknown, to be sought.
        flagged: whether rows and columns are flagged as live or dead.
        quick: whether the thorough model is left out of the question.
    """

    size: int
    rows: int
    columns: int
    kernel: int
    lag: int
    flagged: bool
    quick: bool = False

    def mixed(self, density: int) -> bool:
        """Whether the thorough model codes a matrix of this density's class; else the quick one."""
        few = self.size <= _MOST_CELLS and self.size >> (density + 1) // 2 <= _MOST_WEIGHTS
        return few and not self.quick

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


def _mark(symbols: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> int:
    """Marks the rows and columns that hold a weight; returns how many weights there are."""
    found = 0
    for first, weights in _blocks(symbols, rows.size, columns.size):
        rows[first : first + len(weights)] = weights.any(axis=1)
        columns |= weights.any(axis=0)
        found += int(np.count_nonzero(weights))
    whole = symbols.size // columns.size * columns.size
    short = symbols[whole:] != 0
    if short.any():
        rows[-1] = 1
        columns[: short.size] |= short
    return found + int(np.count_nonzero(short))


def _blocks(symbols: np.ndarray, rows: int, columns: int) -> Iterator[tuple[int, np.ndarray]]:
    """Where the full rows of a matrix hold weights, a few rows at a time, each time with the number of the first."""
    full = min(rows, symbols.size // columns)
    matrix = symbols[: full * columns].reshape(full, columns)
    step = max(1, _BLOCK // columns)
    for first in range(0, full, step):
        yield first, matrix[first : first + step] != 0


def _recur(symbols: np.ndarray, columns: int, recurring: np.ndarray) -> None:
    """Counts, for every lag from 2, the pairs of weights at this distance in a row."""
    weights = np.zeros((-(-symbols.size // columns), columns), dtype=bool)
    weights.reshape(-1)[: symbols.size] = symbols != 0
    for lag in range(2, recurring.size):
        recurring[lag] = np.count_nonzero(weights[:, lag:] & weights[:, :-lag])


def count_rows(symbols: np.ndarray, rows: int) -> np.ndarray:
    """The weights in each row of a full matrix."""
    counts = np.zeros(rows, dtype=np.int64)
    for first, weights in _blocks(symbols, rows, symbols.size // rows):
        counts[first : first + len(weights)] = np.count_nonzero(weights, axis=1)
    return counts


def translate(symbols: np.ndarray, table: np.ndarray) -> None:
    """Replaces every symbol by its entry in `table`, in place."""
    if np.array_equal(table, np.arange(table.size)):
        return
    table = table.astype(symbols.dtype)
    for first in range(0, symbols.size, _BLOCK):
        symbols[first : first + _BLOCK] = table[symbols[first : first + _BLOCK]]
