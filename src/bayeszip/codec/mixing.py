"""The thorough model, for tensors up to half a million cells: many contexts, mixed by weights that learn.

Every live cell costs one decision, whether it holds a weight; every weight a few more, which shared value it is. Each
context keeps evidence; its log-odds enter the mixture as deviations from those of the whole tensor, so that a context
without evidence has no say.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.cells import (
    CELL_PRIORS,
    CELL_WEIGHTS,
    FIRST_ROW,
    MARGIN,
    CellWeights,
    find_cell,
    learn_cell,
    moved_weights,
    taken_weights,
    weigh_cell,
)
from bayeszip.codec.compilation import compiled, entry
from bayeszip.codec.evidence import UNIT_WEIGHT, decide, squash, weigh
from bayeszip.codec.matrix import MOST_LAG, Survey, View
from bayeszip.codec.pricing import CANDIDATES, Pricing, bits_of, candidate, distance
from bayeszip.codec.rangecoder import Span, code_bit

__all__ = ["Flags", "Memory", "MixingModel", "code_flags", "code_mixed", "deepest_levels", "price_values"]

#: Start weights of the mixtures, in 1/65536, and all other numbers of this block: found by trial on trained networks.
_VALUE_WEIGHTS = (9000, 5000, 1000, 13000, 10000, 4000)
_FLAG_WEIGHTS = (20000, 20000, 20000, 20000, 20000)
_VALUE_RATE, _FLAG_RATE = 20, 120
_MOST = 1 << 20
_VALUE_PRIOR = _FLAG_PRIOR = 8

_VALUE_INPUTS = len(_VALUE_WEIGHTS)
_FLAG_INPUTS = len(_FLAG_WEIGHTS)
#: value contexts beyond the plain ones see only the first eight decisions of a value
_SHALLOW = 256
#: a value's class by its first two decisions, or none; the same by its first four
_CLASSES, _FINE_CLASSES = 5, 17
_VALUE_CONTEXTS = _CLASSES + 2 * _FINE_CLASSES + _CLASSES**2


class Memory(NamedTuple):
    """What the model carries from one tensor to the next: the mixing weights of cells, of values, and of flags."""

    cells: np.ndarray
    values: np.ndarray
    flags: np.ndarray

    @classmethod
    def fresh(cls) -> "Memory":
        scale = UNIT_WEIGHT >> 16
        return cls(
            np.array(CELL_WEIGHTS, dtype=np.int64) * scale,
            np.array(_VALUE_WEIGHTS, dtype=np.int64) * scale,
            np.array((_FLAG_WEIGHTS, _FLAG_WEIGHTS), dtype=np.int64) * scale,
        )


class Flags(NamedTuple):
    """The model of one tensor's live rows, or columns: the evidence of all contexts, and those of the flag at hand."""

    zeros: np.ndarray
    ones: np.ndarray
    places: np.ndarray
    inputs: np.ndarray

    @classmethod
    def fresh(cls) -> "Flags":
        evidence, inputs = np.zeros((2, 104), dtype=np.int32), np.zeros((2, _FLAG_INPUTS), dtype=np.int64)
        return cls(*evidence, *inputs)


class MixingModel(NamedTuple):
    """The model of one tensor.

    Args:
        zeros: the zeros counted in all contexts of a cell, in sixteenths; `ones`: the ones.
        for_zero: what is assumed beforehand by each input of a cell; `for_one`: the same for ones.
        places: the contexts of the value at hand, one for each input; `inputs`: their log-odds.
        value_zeros: of all contexts of a value, as above; those that tensors with the same codebook share come first.
        near: the value's contexts: class of the last value in the row, mean of the neighbors, the nearest, the pair.
        live: the columns that are live.
        here: 1 for each cell of the row at hand that holds a weight, after a margin; `over`: of the matrix row above,
            `twin`: of the live row above.
        before: the weights of the row at hand before each column, after a margin.
    """

    zeros: np.ndarray
    ones: np.ndarray
    for_zero: CellWeights
    for_one: CellWeights
    places: np.ndarray
    inputs: np.ndarray
    value_zeros: np.ndarray
    value_ones: np.ndarray
    near: np.ndarray
    live: np.ndarray
    here: np.ndarray
    over: np.ndarray
    twin: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, view: View, survey: Survey, levels: int, shared: np.ndarray) -> "MixingModel":
        """`shared`: a row of zeros and one of ones, counted in tensors with the same codebook."""
        share = _share(survey.density)
        ones = [max(1, prior * share >> 16) for prior in CELL_PRIORS]
        zeros = [max(1, prior - one) for prior, one in zip(CELL_PRIORS, ones, strict=True)]
        contexts = FIRST_ROW + view.rows + 2 * MOST_LAG + view.columns
        own = np.zeros((2, (1 << levels) + _VALUE_CONTEXTS * min(1 << levels, _SHALLOW)), dtype=np.int32)
        value_zeros, value_ones = np.concatenate([shared, own], axis=1)
        row = np.zeros(MARGIN + view.columns + 1, dtype=np.int32)
        return cls(
            zeros=np.zeros(contexts, dtype=np.int32),
            ones=np.zeros(contexts, dtype=np.int32),
            for_zero=tuple(zeros),
            for_one=tuple(ones),
            places=np.zeros(_VALUE_INPUTS, dtype=np.int64),
            inputs=np.zeros(_VALUE_INPUTS, dtype=np.int64),
            value_zeros=value_zeros,
            value_ones=value_ones,
            near=np.zeros(4, dtype=np.int64),
            live=np.flatnonzero(survey.columns),
            here=row.copy(),
            over=row.copy(),
            twin=row.copy(),
            before=row.copy(),
        )


def _share(density: int) -> int:
    """The share of weights in 1/65536, in the middle of a density's class: 2^(−density/2 − 1/4)."""
    quarter = (55109, 38968)[density % 2]  # 2^(−1/4), 2^(−3/4)
    return min(max(quarter >> density // 2, 16), 60000)


def deepest_levels(values: int) -> int:
    """How many decisions tell one of `values` values."""
    return max(values - 1, 0).bit_length()


@entry
def code_flags(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    flags: np.ndarray,
    units: np.ndarray,
    lag: int,
    weights: np.ndarray,
    model: Flags,
) -> Span:
    """Codes which rows or columns are live: by the flags before, those at the lag, and how busy their inputs are."""
    zeros, ones, places, inputs = model.zeros, model.ones, model.places, model.inputs
    for place in range(len(flags)):
        one = flags[place - 1] if place >= 1 else 0
        two = flags[place - 2] if place >= 2 else 0
        back = flags[place - lag] if 0 < lag <= place else 0
        beside = flags[place - lag + 1] if 1 < lag <= place + 1 else 0
        busy = 1 + min(units[place * len(units) // len(flags)], 6) if len(units) else 0
        places[1] = 1 + one + 2 * two
        places[2] = 5 + one + 2 * back + 4 * beside
        places[3] = 16 + busy
        places[4] = 32 + 8 * busy + one + 2 * back
        odds = weigh(zeros, ones, places, inputs, weights, _FLAG_INPUTS, _FLAG_PRIOR)
        flag, span = decide(span, buffer, end, flags[place], odds, zeros, ones, places, inputs, weights,
                            _FLAG_INPUTS, _FLAG_RATE, _MOST)  # fmt: skip
        flags[place] = flag
    return span


@entry
def code_mixed(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    symbols: np.ndarray,
    rows: np.ndarray,
    units: np.ndarray,
    kernel: int,
    lag: int,
    cell_weights: np.ndarray,
    value_weights: np.ndarray,
    values: int,
    levels: int,
    model: MixingModel,
    pricing: Pricing | None,
) -> Span:
    """Codes the live cells of a matrix; `symbols` are ranks of values from 1, and 0 for no weight.

    `units` says for each column how busy its input is, from 1 to 8; 0 if that is unknown. A `pricing` is filled in, and
    may choose what is written.
    """
    above = -1
    weights = taken_weights(cell_weights)
    for row in range(len(rows)):
        if rows[row]:
            _begin_row(model, row, above)
            span, weights = _code_row(span, buffer, end, symbols, row, above, len(rows), units, kernel, lag,
                                      weights, value_weights, values, levels, model, pricing)  # fmt: skip
            above = row
    for index in range(len(weights)):
        cell_weights[index] = weights[index]
    return span


@compiled
def _begin_row(model: MixingModel, row: int, above: int) -> None:
    """Takes the row that was coded last for the live row above, and for the matrix row above if it is that one."""
    here, over, twin = model.here, model.over, model.twin
    adjacent = 1 if above == row - 1 else 0
    for place in range(MARGIN, len(here)):
        twin[place] = here[place]
        over[place] = here[place] * adjacent
        here[place] = 0


@compiled
def _code_row(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    symbols: np.ndarray,
    row: int,
    above: int,
    rows: int,
    units: np.ndarray,
    kernel: int,
    lag: int,
    cell_weights: CellWeights,
    value_weights: np.ndarray,
    values: int,
    levels: int,
    model: MixingModel,
    pricing: Pricing | None,
) -> tuple[Span, CellWeights]:
    """Codes the live cells of a row; also returns the weights of the mixture as they have become."""
    here, before, over, twins = model.here, model.before, model.over, model.twin
    zeros, ones, for_zero, for_one = model.zeros, model.ones, model.for_zero, model.for_one
    own = FIRST_ROW + rows + MOST_LAG
    start = row * len(units)
    in_kernel = until = last = found = filled = 0
    level, since = 1 if above >= 0 else 0, -1
    for column in model.live:
        while filled < column:
            before[MARGIN + filled + 1] = before[MARGIN + filled]
            filled += 1
        if column >= until:
            in_kernel = 0
            until = column - column % kernel + kernel
        place, at = start + column, MARGIN + column
        twin = twins[at]
        order = _order(level, since, found, twin) if level or since >= 0 else 0
        places = find_cell(zeros, ones, here, over, before, FIRST_ROW + row, own + column, column, units[column],
                           in_kernel, kernel, lag, order)  # fmt: skip
        probability, inputs = weigh_cell(zeros, ones, for_zero, for_one, places, cell_weights, lag)
        if pricing is not None:
            _look_around(symbols, here, place, at, lag, levels, model.near)
            model.near[0] = last
            symbols[place] = _price_cell(pricing, symbols[place], place, probability, values, levels, value_weights,
                                         model)  # fmt: skip
        bit, span = code_bit(span, buffer, end, probability, 1 if symbols[place] else 0)
        cell_weights = moved_weights(cell_weights, inputs, probability, bit)
        learn_cell(zeros, ones, places, bit)
        before[at + 1] = before[at] + bit
        filled += 1
        if level or since >= 0:
            level, since = _followed(level, since, bit, twin)
        if bit:
            here[at] = 1
            in_kernel += 1
            found += 1
            _look_around(symbols, here, place, at, lag, levels, model.near)
            model.near[0] = last
            rank, span = _code_value(span, buffer, end, symbols[place] - 1, values, levels, value_weights, model)
            symbols[place] = rank + 1
            last = 1 + (rank >> max(levels - 2, 0))
    return span, cell_weights


# Where a row stands in order to the live row above it: `level` while they have weights in the same places; `since`, the
# cells since they haven't (−1 from the next weight on); and the weights found. In a sorted matrix, a row that is level
# has no weight where the one above has none.


@compiled
def _order(level: int, since: int, found: int, twin: int) -> int:
    """A cell's context by its row's order; `twin`: whether the cell above, in the live row above, holds a weight."""
    if level:
        return 3 + min(found, 2) if twin else 2
    if since < 0:
        return 0
    bits = 0
    while since and bits < 7:
        since >>= 1
        bits += 1
    return 6 + bits


@compiled
def _followed(level: int, since: int, bit: int, twin: int) -> tuple[int, int]:
    """`level` and `since` after a cell that was coded."""
    if level:
        return (level, since) if bit == twin else (0, 0)
    return 0, -1 if bit else since + 1 if since >= 0 else since


@compiled
def _price_cell(
    pricing: Pricing,
    before: int,
    place: int,
    probability: int,
    values: int,
    levels: int,
    value_weights: np.ndarray,
    model: MixingModel,
) -> int:
    """Writes down what the cell at hand costs; returns what it takes: `before`, or the cheapest if it has an aim."""
    zero, weight = bits_of(probability, 0), bits_of(probability, 1)
    pricing.zero[place], pricing.weight[place] = zero, weight
    if not len(pricing.means):
        pricing.paid[place] = weight + _price_value(pricing, before - 1, values, levels, value_weights, model) if (
            before) else zero  # fmt: skip
        return before
    chosen, paid = 0, zero
    least = zero + distance(pricing, place, 0)
    for index in range(CANDIDATES):
        rank = candidate(pricing, place, before, index)
        if rank and weight + distance(pricing, place, rank) < least:
            bits = weight + _price_value(pricing, rank - 1, values, levels, value_weights, model)
            cost = bits + distance(pricing, place, rank)
            if cost < least:
                chosen, paid, least = rank, bits, cost
    pricing.paid[place] = paid
    return chosen


@compiled
def _look_around(
    symbols: np.ndarray, here: np.ndarray, place: int, at: int, lag: int, levels: int, near: np.ndarray
) -> None:
    """The contexts of a value in its neighbors' values: their mean, the nearest one, the classes of two."""
    left = symbols[place - 1] if here[at - 1] else 0
    back = back_left = back_right = 0
    if lag > 1:
        back = symbols[place - lag] if here[at - lag] else 0
        back_left = symbols[place - lag - 1] if here[at - lag - 1] else 0
        back_right = symbols[place - lag + 1] if here[at - lag + 1] else 0
    count = 2 * (left > 0) + 2 * (back > 0) + (back_left > 0) + (back_right > 0)
    total = 2 * left + 2 * back + back_left + back_right
    mean = (2 * total + count) // (2 * count) if count else 0
    nearest = left or back or back_left or back_right
    near[1] = _class_of(mean, levels - 4)
    near[2] = _class_of(nearest, levels - 4)
    near[3] = _class_of(left or back_left, levels - 2) * _CLASSES + _class_of(back or back_right, levels - 2)


@compiled
def _class_of(symbol: int, shift: int) -> int:
    """0 for no weight, else 1 and up by the first bits of its rank."""
    return 1 + ((symbol - 1) >> max(shift, 0)) if symbol else 0


@compiled
def _code_value(
    span: Span,
    buffer: np.ndarray,
    end: int | None,
    rank: int,
    values: int,
    levels: int,
    weights: np.ndarray,
    model: MixingModel,
) -> tuple[int, Span]:
    """Codes which value a weight has: its rank, the most significant bit first, where both bits are possible."""
    zeros, ones, places, inputs = model.value_zeros, model.value_ones, model.places, model.inputs
    node = 1
    for level in range(levels - 1, -1, -1):
        bit = 0
        if ((2 * node + 1) << level) - (1 << levels) < values:
            count = _see_value(places, node, levels, model.near)
            odds = weigh(zeros, ones, places, inputs, weights, count, _VALUE_PRIOR)
            bit, span = decide(span, buffer, end, rank >> level & 1, odds, zeros, ones, places, inputs, weights,
                               count, _VALUE_RATE, _MOST)  # fmt: skip
        node = 2 * node + bit
    return node - (1 << levels), span


@compiled
def _see_value(places: np.ndarray, node: int, levels: int, near: np.ndarray) -> int:
    """Finds the contexts of a decision about a value; returns how many there are."""
    places[0] = (1 << levels) + node
    places[1] = node
    shallow = min(1 << levels, _SHALLOW)
    if node >= shallow:
        return 2
    start = (2 << levels) + node
    places[2] = start + near[0] * shallow
    places[3] = start + (_CLASSES + near[1]) * shallow
    places[4] = start + (_CLASSES + _FINE_CLASSES + near[2]) * shallow
    places[5] = start + (_CLASSES + 2 * _FINE_CLASSES + near[3]) * shallow
    return _VALUE_INPUTS


@compiled
def _price_value(
    pricing: Pricing, rank: int, values: int, levels: int, weights: np.ndarray, model: MixingModel
) -> float:
    """The bits that `_code_value` would take for this rank now."""
    places, inputs = pricing.places, pricing.inputs
    bits = 0.0
    node = 1
    for level in range(levels - 1, -1, -1):
        bit = 0
        if ((2 * node + 1) << level) - (1 << levels) < values:
            bit = rank >> level & 1
            count = _see_value(places, node, levels, model.near)
            odds = weigh(model.value_zeros, model.value_ones, places, inputs, weights, count, _VALUE_PRIOR)
            bits += bits_of(squash((odds + (1 << 19)) >> 20), bit)
        node = 2 * node + bit
    return bits


@entry
def price_values(
    asked: np.ndarray, values: int, levels: int, weights: np.ndarray, model: MixingModel, pricing: Pricing
) -> None:
    """What each value, by rank from 1, would cost now where no weight is near."""
    for index in range(len(model.near)):
        model.near[index] = 0
    for rank in range(values):
        asked[rank + 1] = _price_value(pricing, rank, values, levels, weights, model)
