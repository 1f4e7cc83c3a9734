"""The model of dense tensors whose values resemble their neighbors': filters, spectra, embeddings.

A cell is seen as a signed number: how many shared values away from 0.0 its value is. The numbers left of it, above it,
in the channel before and a row of the kernel back say how large it will be, and of which sign; each of six contexts
keeps evidence for every decision, and a mixture that learns weighs them, as in the thorough model.

Values that depend on each other (see `trellis`) are coded by the same model: their indices, with evidence for either
kind of state, and a seventh context, how large the numbers of the row and of the column have been.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled, entry
from bayeszip.codec.evidence import UNIT_WEIGHT, decide, log_count, weigh
from bayeszip.codec.matrix import View
from bayeszip.codec.rangecoder import Span
from bayeszip.codec.trellis import index_of, next_state, number_of

__all__ = ["LAG_BITS", "SPREAD_BITS", "Neighbors", "code_neighbors", "lag_of", "spread_of"]

#: Found by trial on public networks: start weight of each of six inputs, or seven, in 1/65536, of a single one; rate.
_WEIGHT, _DEPENDENT_WEIGHT, _ALONE, _RATE = 19660, 16384, 65536, 20
_PRIOR, _MOST = 8, 1 << 12
_INPUTS = 6
#: contexts see the first eight decisions of a value; node 0 is whether there is one
_SHALLOW = 256
#: a mean magnitude is told in eighths of a natural unit
SPREAD_BITS = 7
_SPREAD_STEP = 32
#: classes of magnitude, by their logarithm against the mean's; and of signed numbers, four on either side of 0
_SIZES, _SIZE_STEP, _SIZE_FROM = 8, 96, 384
_SIDE, _SIDE_STEP, _SIDE_FROM = 4, 224, 760
_SIGNED = 2 * _SIDE + 1
# Where the contexts of each input begin.
_AROUND, _LEFT, _ABOVE = 1, 1 + _SIZES, 1 + _SIZES * (1 + _SIGNED)
_BEFORE = _ABOVE + _SIZES * _SIGNED
_SLOPE = _BEFORE + _SIGNED**2
_LINES = _SLOPE + _SIGNED**2
#: classes of a row's and a column's mean magnitude, the step between them, and where the first one begins
_LINE, _LINE_STEP, _LINE_FROM = 8, 64, 288
_CONTEXTS = _LINES + _LINE**2
#: weights in the sum of magnitudes around a cell, the same with those at the lag, and in that of two
_SUM, _WIDE_SUM, _PAIR = 9, 13, 2
#: where two numbers point to is at most three times as far as any number
_FARTHEST = 3
_BLOCK = 1 << 18
#: a lag is below 2⁶, and sought in the rows that so many cells take
LAG_BITS = 6
_SOUGHT = 1 << 16


class Neighbors(NamedTuple):
    """The model of one tensor.

    Args:
        zeros: the zeros counted for each context and node, in sixteenths; then for nodes that are too deep for
            contexts; all that once more for odd states, if values are dependent; `ones`: the ones.
        weights: of the inputs, a row for each decision of a value from the last on, and one for whether there is one;
            again for odd states.
        sizes: the class of a sum of magnitudes, `pairs`: of two, `signs`: of a signed number, from the lowest on.
        here: the numbers of the row at hand, after a margin; `above`: of the row above; `higher`: of the one above it.
        sums: of the magnitudes in each column so far.
        seen: the state, the live rows so far, and the spread.
    """

    zeros: np.ndarray
    ones: np.ndarray
    weights: np.ndarray
    sizes: np.ndarray
    pairs: np.ndarray
    signs: np.ndarray
    contexts: np.ndarray
    places: np.ndarray
    inputs: np.ndarray
    here: np.ndarray
    above: np.ndarray
    higher: np.ndarray
    sums: np.ndarray
    seen: np.ndarray

    @classmethod
    def of(cls, view: View, levels: int, values: int, spread: int, lag: int, dependent: bool) -> "Neighbors":
        shallow = min(1 << levels, _SHALLOW)
        evidence = np.zeros((2, (_CONTEXTS * shallow + (1 << levels)) << dependent), dtype=np.int32)
        start = _DEPENDENT_WEIGHT if dependent else _WEIGHT
        weights = np.full((1 + dependent, levels + 1, _INPUTS + dependent), start * (UNIT_WEIGHT >> 16), dtype=np.int64)
        weights[:, : max(levels - 8, 0), 0] = _ALONE * (UNIT_WEIGHT >> 16)
        contexts, places, inputs = np.zeros((3, _INPUTS + dependent), dtype=np.int64)
        # Empty cells before the first column: as many as a neighbor may be away.
        rows = np.zeros((3, max(view.kernel, lag + dependent, 2) + view.columns + 1), dtype=np.int32)
        return cls(
            zeros=evidence[0],
            ones=evidence[1],
            weights=weights.reshape(-1, _INPUTS + dependent),
            sizes=_sizes(spread, _WIDE_SUM if dependent and lag else _SUM, values),
            pairs=_sizes(spread, _PAIR, values),
            signs=_signs(spread, values),
            contexts=contexts,
            places=places,
            inputs=inputs,
            here=rows[0],
            above=rows[1],
            higher=rows[2],
            sums=np.zeros(view.columns, dtype=np.int64),
            seen=np.array([0, 0, spread]),
        )


def spread_of(symbols: np.ndarray, negative: int, cells: int) -> int:
    """The mean magnitude of a tensor's signed numbers over its live cells (a file may lie to have none), as told."""
    total = 0
    for first in range(0, symbols.size, _BLOCK):
        ranks = symbols[first : first + _BLOCK].astype(np.int64)
        total += int(np.where(ranks > negative, ranks - negative, (negative + 1 - ranks) * (ranks > 0)).sum())
    return log_count(max(1, 16 * total // max(1, cells))) // _SPREAD_STEP


def lag_of(symbols: np.ndarray, negative: int, view: View) -> int:
    """The distance in a row at which large numbers most often recur, for its pairs, as told."""
    count = min(view.rows - 1, max(1, _SOUGHT // view.columns))
    ranks = symbols[: count * view.columns].reshape(count, view.columns).astype(np.int64)
    sizes = np.abs(2 * ranks - 2 * negative - 1) * (ranks > 0)
    large = sizes * sizes.size > sizes.sum()
    best, most, pairs = 0, 0, 1
    for lag in range(2, min(1 << LAG_BITS, max(view.columns // 2, 2))):
        found = int(np.count_nonzero(large[:, lag:] & large[:, :-lag]))
        if found * pairs > most * (view.columns - lag):
            best, most, pairs = lag, found, view.columns - lag
    return best


def _sizes(spread: int, parts: int, values: int) -> np.ndarray:
    """The class of every sum of `parts` magnitudes, as far as it isn't the last one."""
    least = [
        _least(_SPREAD_STEP * spread + _SIZE_STEP * size - _SIZE_FROM, parts, parts * values)
        for size in range(1, _SIZES)
    ]
    return np.searchsorted(least, np.arange(least[-1] + 1), side="right").astype(np.uint8)


def _signs(spread: int, values: int) -> np.ndarray:
    """The class of every signed number, from the lowest class to the highest."""
    least = [
        _least(_SPREAD_STEP * spread + _SIDE_STEP * size - _SIDE_FROM, 1, _FARTHEST * values)
        for size in range(1, _SIDE + 1)
    ]
    sides = np.searchsorted(least, np.arange(1, least[-1] + 1), side="right").astype(np.uint8)
    return np.concatenate([_SIDE - sides[::-1], [_SIDE], _SIDE + sides]).astype(np.uint8)


def _least(logarithm: int, parts: int, most: int) -> int:
    """The least number from 1 to `most` whose `parts`-th has at least this logarithm; one more, if none has."""
    low, high = 1, most + 1
    while low < high:
        middle = (low + high) // 2
        if log_count(16 * middle // parts + 1) < logarithm:
            low = middle + 1
        else:
            high = middle
    return low


@entry
def code_neighbors(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    symbols: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    first: int,
    last: int,
    kernel: int,
    lag: int,
    negative: int,
    values: int,
    levels: int,
    dependent: bool | None,
    model: Neighbors,
) -> Span:
    """Codes the live cells of rows `first` to `last`; `symbols` are ranks of values from 1, and 0 for no weight.

    `negative` is how many values are below 0.0; `dependent` is None if values don't depend on each other. Loops are
    compiled for either apart.
    """
    here, above, higher, seen = model.here, model.above, model.higher, model.seen
    width = len(columns)
    margin = len(here) - width - 1
    state = seen[0]
    for row in range(first, last):
        for place in range(margin, margin + width):
            higher[place], above[place], here[place] = above[place], here[place], 0
        if not rows[row]:
            continue
        start, total, cells = row * width, 0, 0
        for column in range(min(width, len(symbols) - start)):
            if not columns[column]:
                continue
            place, at, quantizer = start + column, margin + column, state & 1
            _look(model, at, kernel, lag, dependent)
            if dependent is None:
                rank, span = _code_cell(span, buffer, end, symbols[place], values, levels, 0, dependent, model)
                symbols[place], here[at] = rank, _number(rank, negative)
                continue
            _look_along(model, total, cells, column)
            below = (negative + quantizer) >> 1
            count = below + ((values - negative + quantizer) >> 1)
            index = index_of(_number(symbols[place], negative), quantizer)
            rank, span = _code_cell(span, buffer, end, _rank(index, below), count, levels, quantizer, dependent,
                                    model)  # fmt: skip
            index = _number(rank, below)
            number, state = number_of(index, quantizer), next_state(state, index)
            symbols[place], here[at] = _rank(number, negative), number
            total, cells = total + abs(number), cells + 1
            model.sums[column] += abs(number)
        seen[1] += 1
    seen[0] = state
    return span


@compiled
def _number(rank: int, below: int) -> int:
    """The signed number of a rank from 1, `below` of which are below 0; 0 for no weight."""
    return rank - below - (1 if rank <= below else 0) if rank else 0


@compiled
def _rank(number: int, below: int) -> int:
    return number + below + (1 if number < 0 else 0) if number else 0


@compiled
def _look(model: Neighbors, at: int, kernel: int, lag: int, dependent: bool | None) -> None:
    """Finds the contexts of a cell in the numbers around it; those beside the one at the lag count if dependent."""
    here, above, contexts = model.here, model.above, model.contexts
    sizes, pairs, signs = model.sizes, model.pairs, model.signs
    left, left2, up, up2, up_left, up_right = here[at - 1], here[at - 2], above[at], model.higher[at], above[at - 1], 0
    up_right = above[at + 1]
    before = here[at - kernel] if kernel > 1 else 0
    back = here[at - lag] if lag > 1 else 0
    around = 2 * abs(left) + 2 * abs(up) + abs(before) + abs(left2) + abs(up2) + abs(up_left) + abs(up_right)
    if dependent is not None and lag > 1:
        around += 2 * abs(back) + abs(here[at - lag - 1]) + abs(here[at - lag + 1])
    contexts[1] = _AROUND + _clipped(sizes, around)
    contexts[2] = _LEFT + _clipped(pairs, abs(left) + abs(left2)) * _SIGNED + _sign(signs, left)
    contexts[3] = _ABOVE + _clipped(pairs, abs(up) + abs(up2)) * _SIGNED + _sign(signs, up)
    contexts[4] = _BEFORE + _sign(signs, before) * _SIGNED + _sign(signs, back)
    contexts[5] = _SLOPE + _sign(signs, 2 * left - left2) * _SIGNED + _sign(signs, left + up - up_left)


@compiled
def _look_along(model: Neighbors, total: int, cells: int, column: int) -> None:
    """Finds the context of a cell in the sum of its row's magnitudes so far and of its column's."""
    in_row = _line(total, cells, model.seen[2])
    model.contexts[6] = _LINES + in_row * _LINE + _line(model.sums[column], model.seen[1], model.seen[2])


@compiled
def _line(total: int, cells: int, spread: int) -> int:
    """The class of the mean magnitude of so many cells."""
    if not cells:
        return _LINE // 2
    size = log_count(16 * total // cells + 1) - _SPREAD_STEP * spread + _LINE_FROM
    return min(max(size // _LINE_STEP, 0), _LINE - 1)


@compiled
def _clipped(table: np.ndarray, index: int) -> int:
    return table[index] if index < len(table) else table[len(table) - 1]


@compiled
def _sign(signs: np.ndarray, number: int) -> int:
    """The class of a signed number; 0 is in the middle."""
    middle = len(signs) // 2
    return signs[min(max(number, -middle), middle) + middle]


@compiled
def _code_cell(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    symbol: int,
    values: int,
    levels: int,
    quantizer: int,
    dependent: bool | None,
    model: Neighbors,
) -> tuple[int, Span]:
    """Codes whether a cell holds a weight, and the bits of its rank; returns the latter from 1, or 0 for no weight."""
    zeros, ones, contexts, places, inputs = model.zeros, model.ones, model.contexts, model.places, model.inputs
    shallow = min(1 << levels, _SHALLOW)
    base = quantizer * (_CONTEXTS * shallow + (1 << levels))
    node, rank = 0, symbol - 1
    for level in range(levels, -1, -1):
        bit = 0
        if values and (not node or ((2 * node + 1) << level) - (1 << levels) < values):
            count = 1
            places[0] = base + _CONTEXTS * shallow + node
            if node < shallow:
                count = _INPUTS if dependent is None else _INPUTS + 1
                for index in range(count):
                    places[index] = base + contexts[index] * shallow + node
            weights = model.weights[quantizer * (levels + 1) + level]
            odds = weigh(zeros, ones, places, inputs, weights, count, _PRIOR)
            wanted = (rank >> level & 1) if node else (1 if symbol else 0)
            bit, span = decide(span, buffer, end, wanted, odds, zeros, ones, places, inputs, weights, count, _RATE,
                               _MOST)  # fmt: skip
        if not node and not bit:
            return 0, span
        node = 2 * node + bit
    return node - (1 << levels) + 1, span
