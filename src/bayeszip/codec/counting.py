"""The quick model, for tensors of many cells or weights: one adaptive probability for each decision.

A cell's context is the density of its row and of its column so far, as one score in 32 steps, and its two neighbors.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled, entry, tabulated
from bayeszip.codec.evidence import ONE_COUNT, log_count, squash
from bayeszip.codec.matrix import View
from bayeszip.codec.pricing import CANDIDATES, Pricing, bits_of, candidate, distance
from bayeszip.codec.rangecoder import Span, code_bit

__all__ = ["Counts", "code_counted", "price_ranks"]

_STEPS = 32
_STEP_BITS = 6
_PRIOR = 8 * ONE_COUNT
#: a row's score is renewed every 32 cells, those of all columns every 16 rows
_ROW_PERIOD, _COLUMN_PERIOD = 32, 16
_SLOWEST = 254
_RECIPROCALS = tabulated(np.array([(2 << 16) // (2 * count + 3) for count in range(_SLOWEST + 1)], dtype=np.int64))


class Counts(NamedTuple):
    """The model of one tensor.

    Args:
        cells: for each context 256 × the probability of a weight + how often the context was met, up to 254.
        values: the same of a 1 at each node of the tree of values.
        columns: weights in each column so far; `scores`: their log-odds against the whole.
        seen: live rows so far, weights so far, cells so far.
    """

    cells: np.ndarray
    values: np.ndarray
    columns: np.ndarray
    scores: np.ndarray
    seen: np.ndarray

    @classmethod
    def of(cls, view: View, levels: int) -> "Counts":
        steps = (np.arange(_STEPS, dtype=np.int64) - _STEPS // 2) << _STEP_BITS
        start = np.array([squash(int(score) * 2) for score in steps], dtype=np.int64)
        return cls(
            cells=np.repeat(start << 8, 4).astype(np.int32),
            values=np.full(1 << levels, 1 << 15 + 8, dtype=np.int32),
            columns=np.zeros(view.columns, dtype=np.int32),
            scores=np.zeros(view.columns, dtype=np.int16),
            seen=np.zeros(3, dtype=np.int64),
        )


@compiled
def _adapted(known: int, bit: int) -> int:
    """A probability and its count, the former moved towards `bit`: by two thirds at first, by 1/255 in the end."""
    probability, count = known >> 8, known & 255
    moved = probability + ((((bit << 16) - probability) * _RECIPROCALS[count]) >> 16)
    return min(max(moved, 8), 65528) << 8 | (count + 1 if count < _SLOWEST else count)


@compiled
def _renew_columns(model: Counts, rows: int, base: int) -> None:
    """The log-odds of all columns, against those of all cells."""
    for column in range(len(model.columns)):
        ones = model.columns[column] * ONE_COUNT
        model.scores[column] = _score(ones, rows * ONE_COUNT - ones, base)


@compiled
def _score(ones: int, zeros: int, base: int) -> int:
    """Half of the log-odds by evidence against `base`, which counts as eight observations beforehand."""
    assumed = squash(base) * _PRIOR >> 16
    odds = log_count(ones + assumed + 1) - log_count(zeros + _PRIOR - assumed + 1)
    return min(max((odds - base) >> 1, -1024), 1023)


@entry
def code_counted(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    symbols: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    first: int,
    last: int,
    values: int,
    levels: int,
    model: Counts,
    pricing: Pricing | None,
) -> Span:
    """Codes the live cells of rows `first` to `last`; `symbols` are ranks of values from 1, and 0 for no weight.

    A `pricing` is filled in, and may choose what is written.
    """
    for row in range(first, last):
        if not rows[row]:
            continue
        live, weights, cells = model.seen[0], model.seen[1], model.seen[2]
        base = log_count(weights + 1) - log_count(cells - weights + 1)
        if live % _COLUMN_PERIOD == 0:
            _renew_columns(model, live, base)
        span, found, met = _code_row(span, buffer, end, symbols, columns, row, values, levels, model, base,
                                      pricing)  # fmt: skip
        model.seen[0], model.seen[1], model.seen[2] = live + 1, weights + found, cells + met
    return span


@compiled
def _code_row(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    symbols: np.ndarray,
    columns: np.ndarray,
    row: int,
    values: int,
    levels: int,
    model: Counts,
    base: int,
    pricing: Pricing | None,
) -> tuple[Span, int, int]:
    """Codes a row; also returns how many weights and how many cells it has."""
    width = len(columns)
    start = row * width
    middle = (base >> 1) + (_STEPS // 2 << _STEP_BITS)
    ones = cells = score = left = 0
    for column in range(min(width, len(symbols) - start)):
        if not columns[column]:
            continue
        place = start + column
        if cells & (_ROW_PERIOD - 1) == 0:
            score = middle + _score(ones * ONE_COUNT, (cells - ones) * ONE_COUNT, base)
        step = (score + model.scores[column]) >> _STEP_BITS
        up = 1 if row and symbols[place - width] else 0
        context = min(max(step, 0), _STEPS - 1) * 4 + 2 * left + up
        known = model.cells[context]
        if pricing is not None:
            symbols[place] = _price_cell(pricing, symbols[place], place, known >> 8, values, levels, model.values)
        left, span = code_bit(span, buffer, end, known >> 8, 1 if symbols[place] else 0)
        model.cells[context] = _adapted(known, left)
        cells += 1
        if left:
            ones += 1
            model.columns[column] += 1
            rank, span = _code_rank(span, buffer, end, symbols[place] - 1, values, levels, model.values)
            symbols[place] = rank + 1
    return span, ones, cells


@compiled
def _code_rank(
    span: Span, buffer: np.ndarray, end: int | None, rank: int, values: int, levels: int, known: np.ndarray
) -> tuple[int, Span]:
    """Codes which value a weight has: its rank, the most significant bit first, where both bits are possible."""
    node = 1
    for level in range(levels - 1, -1, -1):
        bit = 0
        if ((2 * node + 1) << level) - (1 << levels) < values:
            bit, span = code_bit(span, buffer, end, known[node] >> 8, rank >> level & 1)
            known[node] = _adapted(known[node], bit)
        node = 2 * node + bit
    return node - (1 << levels), span


@compiled
def _price_cell(
    pricing: Pricing, before: int, place: int, probability: int, values: int, levels: int, known: np.ndarray
) -> int:
    """Writes down what a cell costs; returns what it takes: `before`, or the cheapest if it has an aim."""
    zero, weight = bits_of(probability, 0), bits_of(probability, 1)
    pricing.zero[place], pricing.weight[place] = zero, weight
    if not len(pricing.means):
        pricing.paid[place] = weight + _price_rank(before - 1, values, levels, known) if before else zero
        return before
    chosen, paid = 0, zero
    least = zero + distance(pricing, place, 0)
    for index in range(CANDIDATES):
        rank = candidate(pricing, place, before, index)
        if rank and weight + distance(pricing, place, rank) < least:
            bits = weight + _price_rank(rank - 1, values, levels, known)
            cost = bits + distance(pricing, place, rank)
            if cost < least:
                chosen, paid, least = rank, bits, cost
    pricing.paid[place] = paid
    return chosen


@compiled
def _price_rank(rank: int, values: int, levels: int, known: np.ndarray) -> float:
    """The bits that `_code_rank` would take for this rank now."""
    bits = 0.0
    node = 1
    for level in range(levels - 1, -1, -1):
        bit = 0
        if ((2 * node + 1) << level) - (1 << levels) < values:
            bit = rank >> level & 1
            bits += bits_of(known[node] >> 8, bit)
        node = 2 * node + bit
    return bits


@entry
def price_ranks(asked: np.ndarray, values: int, levels: int, known: np.ndarray) -> None:
    """What each value, by rank from 1, would cost now."""
    for rank in range(values):
        asked[rank + 1] = _price_rank(rank, values, levels, known)
