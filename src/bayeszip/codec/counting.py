"""The quick model, for tensors of many cells or weights: one adaptive probability for each decision.

A cell's context is the density of its row and of its column so far, as one score in 32 steps, and its two neighbours.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled
from bayeszip.codec.evidence import ONE_COUNT, log_count, squash
from bayeszip.codec.matrix import View
from bayeszip.codec.rangecoder import code_bit

__all__ = ["Counts", "code_counted"]

_STEPS = 32
_STEP_BITS = 6
_PRIOR = 8 * ONE_COUNT
#: a row's score is renewed every 32 cells, those of all columns every 16 rows
_ROW_PERIOD, _COLUMN_PERIOD = 32, 16
_SLOWEST = 254
_RECIPROCALS = np.array([(2 << 16) // (2 * count + 3) for count in range(_SLOWEST + 1)], dtype=np.int64)


class Counts(NamedTuple):
    """The model of one tensor.

    Args:
        cells: the probability of a weight in each context; `cell_counts`: how often it was met, up to 254.
        values: the probability of a 1 at each node of the tree of values; `value_counts`: as above.
        columns: weights in each column so far; `scores`: their log-odds against the whole.
        seen: live rows so far, weights so far, cells so far.
    """

    cells: np.ndarray
    cell_counts: np.ndarray
    values: np.ndarray
    value_counts: np.ndarray
    columns: np.ndarray
    scores: np.ndarray
    seen: np.ndarray

    @classmethod
    def of(cls, view: View, levels: int) -> "Counts":
        steps = (np.arange(_STEPS, dtype=np.int64) - _STEPS // 2) << _STEP_BITS
        start = np.array([squash(int(score) * 2) for score in steps], dtype=np.int64)
        return cls(
            cells=np.repeat(start, 4).astype(np.int32),
            cell_counts=np.zeros(4 * _STEPS, dtype=np.uint8),
            values=np.full(1 << levels, 1 << 15, dtype=np.int32),
            value_counts=np.zeros(1 << levels, dtype=np.uint8),
            columns=np.zeros(view.columns, dtype=np.int32),
            scores=np.zeros(view.columns, dtype=np.int16),
            seen=np.zeros(3, dtype=np.int64),
        )


@compiled
def _adapt(table: np.ndarray, counts: np.ndarray, place: int, probability: int, bit: int) -> None:
    """Moves a probability towards `bit`: by halves at first, by 1/255 in the end."""
    count = int(counts[place])
    moved = probability + ((((bit << 16) - probability) * int(_RECIPROCALS[count])) >> 16)
    table[place] = min(max(moved, 8), 65528)
    if count < _SLOWEST:
        counts[place] = count + 1


@compiled
def _renew_columns(model: Counts) -> None:
    """The log-odds of all columns, against those of all cells."""
    rows = int(model.seen[0])
    base = log_count(int(model.seen[1]) + 1) - log_count(int(model.seen[2]) - int(model.seen[1]) + 1)
    for column in range(model.columns.size):
        ones = int(model.columns[column]) * ONE_COUNT
        model.scores[column] = _score(ones, rows * ONE_COUNT - ones, base)


@compiled
def _score(ones: int, zeros: int, base: int) -> int:
    """Half of the log-odds by evidence against `base`, which counts as eight observations beforehand."""
    assumed = squash(base) * _PRIOR >> 16
    odds = log_count(ones + assumed + 1) - log_count(zeros + _PRIOR - assumed + 1)
    return min(max((odds - base) >> 1, -1024), 1023)


@compiled
def code_counted(
    state: np.ndarray,
    buffer: np.ndarray,
    symbols: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    first: int,
    last: int,
    values: int,
    levels: int,
    model: Counts,
) -> None:
    """Codes the live cells of rows `first` to `last`; `symbols` are ranks of values from 1, and 0 for no weight."""
    width = columns.size
    for row in range(first, last):
        if not rows[row]:
            continue
        if int(model.seen[0]) % _COLUMN_PERIOD == 0:
            _renew_columns(model)
        base = log_count(int(model.seen[1]) + 1) - log_count(int(model.seen[2]) - int(model.seen[1]) + 1)
        middle = (base >> 1) + (_STEPS // 2 << _STEP_BITS)
        ones = cells = score = left = 0
        for place in range(row * width, min(row * width + width, symbols.size)):
            column = place - row * width
            if not columns[column]:
                continue
            if cells & (_ROW_PERIOD - 1) == 0:
                score = middle + _score(ones * ONE_COUNT, (cells - ones) * ONE_COUNT, base)
            step = (score + int(model.scores[column])) >> _STEP_BITS
            up = 1 if row and symbols[place - width] else 0
            context = min(max(step, 0), _STEPS - 1) * 4 + 2 * left + up
            probability = int(model.cells[context])
            left = code_bit(state, buffer, probability, 1 if symbols[place] else 0)
            _adapt(model.cells, model.cell_counts, context, probability, left)
            cells += 1
            if left:
                ones += 1
                model.columns[column] += 1
                symbols[place] = 1 + _code_rank(state, buffer, int(symbols[place]) - 1, values, levels, model)
        model.seen[0] += 1
        model.seen[1] += ones
        model.seen[2] += cells


@compiled
def _code_rank(state: np.ndarray, buffer: np.ndarray, rank: int, values: int, levels: int, model: Counts) -> int:
    """Codes which value a weight has: its rank, the most significant bit first, where both bits are possible."""
    node = 1
    for level in range(levels - 1, -1, -1):
        if (2 * node + 1 << level) - (1 << levels) >= values:
            node = 2 * node
            continue
        probability = int(model.values[node])
        bit = code_bit(state, buffer, probability, rank >> level & 1)
        _adapt(model.values, model.value_counts, node, probability, bit)
        node = 2 * node + bit
    return node - (1 << levels)
