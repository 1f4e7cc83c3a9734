"""The thorough model, for tensors up to half a million cells: many contexts, mixed by weights that learn.

Every live cell costs one decision, whether it holds a weight; every weight a few more, which shared value it is. Each
context keeps evidence; its log-odds enter the mixture as deviations from those of the whole tensor, so that a context
without evidence has no say.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled
from bayeszip.codec.evidence import UNIT_WEIGHT, learn, log_count, log_odds, mix, sway
from bayeszip.codec.matrix import Survey, View
from bayeszip.codec.rangecoder import code_bit

__all__ = ["Memory", "Mixture", "code_flags", "code_mixed", "deepest_levels"]

#: Start weights of the mixtures, in 1/65536, and all other numbers of this block: found by trial on trained networks.
_CELL_WEIGHTS = (58000, 2764, 1017, 3407, 25080, 31457, 68523, 6664, 14420, 31457, 24538)
_VALUE_WEIGHTS = (9000, 5000, 1000, 13000, 10000, 4000)
_FLAG_WEIGHTS = (20000, 20000, 20000, 20000, 20000)
_CELL_RATE, _VALUE_RATE, _FLAG_RATE = 13, 20, 120
_MOST = 1 << 20
#: the evidence that each input of a cell assumes beforehand, in 1/16 of a count
_CELL_PRIORS = (251, 376, 94, 222, 202, 305, 173, 111, 69, 26, 345)
_VALUE_PRIOR = _FLAG_PRIOR = 8

# Where the contexts of a cell keep their evidence; rows and columns follow.
_TENSOR, _ABOVE, _NEAR, _WIDE, _UNIT, _JOINT, _KERNEL, _ORDER, _ROWS = 0, 1, 65, 129, 321, 330, 474, 498, 512
_BUCKETS = 12
#: the wide neighbourhood of a cell: columns to either side, and rows back at the lag
_REACH, _ROWS_BACK = 4, 3
_CELL_INPUTS = len(_CELL_WEIGHTS)
_VALUE_INPUTS = len(_VALUE_WEIGHTS)
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
            np.array(_CELL_WEIGHTS, dtype=np.int64) * scale,
            np.array(_VALUE_WEIGHTS, dtype=np.int64) * scale,
            np.array((_FLAG_WEIGHTS, _FLAG_WEIGHTS), dtype=np.int64) * scale,
        )


class Mixture(NamedTuple):
    """The model of one tensor.

    Args:
        evidence: of all contexts of a cell.
        assumed: what is assumed beforehand by each input of a cell: a row of (for 0, for 1).
        places: the contexts of the cell at hand, one for each input.
        inputs: their log-odds.
        value_evidence: of all contexts of a value; `shared` holds that of all tensors with the same codebook.
        near: the value's contexts: class of the last value in the row, mean of the neighbours, the nearest, the pair.
        before: the weights of the row at hand before each column.
    """

    evidence: np.ndarray
    assumed: np.ndarray
    places: np.ndarray
    inputs: np.ndarray
    value_evidence: np.ndarray
    shared: np.ndarray
    value_places: np.ndarray
    value_inputs: np.ndarray
    near: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, view: View, survey: Survey, levels: int, shared: np.ndarray) -> "Mixture":
        share = _share(survey.density)
        ones = [max(1, prior * share >> 16) for prior in _CELL_PRIORS]
        assumed = [(max(1, prior - one), one) for prior, one in zip(_CELL_PRIORS, ones, strict=True)]
        shallow = min(1 << levels, _SHALLOW)
        return cls(
            evidence=np.zeros((_ROWS + view.rows + view.columns, 2), dtype=np.int32),
            assumed=np.array(assumed, dtype=np.int64),
            places=np.zeros(_CELL_INPUTS, dtype=np.int64),
            inputs=np.zeros(_CELL_INPUTS, dtype=np.int64),
            value_evidence=np.zeros(((1 << levels) + _VALUE_CONTEXTS * shallow, 2), dtype=np.int32),
            shared=shared,
            value_places=np.zeros(_VALUE_INPUTS, dtype=np.int64),
            value_inputs=np.zeros(_VALUE_INPUTS, dtype=np.int64),
            near=np.zeros(4, dtype=np.int64),
            before=np.zeros(view.columns + 1, dtype=np.int32),
        )


def _share(density: int) -> int:
    """The share of weights in 1/65536, in the middle of a density's class: 2^(−density/2 − 1/4)."""
    quarter = (55109, 38968)[density % 2]  # 2^(−1/4), 2^(−3/4)
    return min(max(quarter >> density // 2, 16), 60000)


def deepest_levels(values: int) -> int:
    """How many decisions tell one of `values` values."""
    return max(values - 1, 0).bit_length()


@compiled
def code_flags(
    state: np.ndarray, buffer: np.ndarray, flags: np.ndarray, units: np.ndarray, lag: int, weights: np.ndarray
) -> None:
    """Codes which rows or columns are live: by the flags before, those at the lag, and how busy their inputs are."""
    evidence = np.zeros((104, 2), dtype=np.int32)
    inputs, places = np.zeros(weights.size, dtype=np.int64), np.zeros(weights.size, dtype=np.int64)
    for place in range(flags.size):
        one = int(flags[place - 1]) if place >= 1 else 0
        two = int(flags[place - 2]) if place >= 2 else 0
        back = int(flags[place - lag]) if 0 < lag <= place else 0
        beside = int(flags[place - lag + 1]) if 1 < lag <= place + 1 else 0
        busy = 1 + min(int(units[place * units.size // flags.size]), 6) if units.size else 0
        places[1] = 1 + one + 2 * two
        places[2] = 5 + one + 2 * back + 4 * beside
        places[3] = 16 + busy
        places[4] = 32 + 8 * busy + one + 2 * back
        for index in range(inputs.size):
            inputs[index] = log_odds(evidence, places[index], _FLAG_PRIOR, _FLAG_PRIOR)
        probability = mix(weights, inputs)
        flag = code_bit(state, buffer, probability, int(flags[place]))
        flags[place] = flag
        sway(weights, inputs, flag, probability, _FLAG_RATE)
        for index in range(inputs.size):
            learn(evidence, places[index], flag, _MOST)


@compiled
def code_mixed(
    state: np.ndarray,
    buffer: np.ndarray,
    symbols: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    units: np.ndarray,
    kernel: int,
    lag: int,
    cell_weights: np.ndarray,
    value_weights: np.ndarray,
    values: int,
    levels: int,
    model: Mixture,
) -> None:
    """Codes the live cells of a matrix; `symbols` are ranks of values from 1, and 0 for no weight.

    `units` says for each column how busy its input is, from 1 to 8; 0 if that is unknown.
    """
    order, above = np.zeros(3, dtype=np.int64), -1
    for row in range(rows.size):
        if not rows[row]:
            continue
        in_kernel = last = until = 0
        order[_LEVEL], order[_SINCE], order[_FOUND] = above >= 0, -1, 0
        for column in range(columns.size):
            if column == until:
                in_kernel = 0
                until += kernel
            model.before[column + 1] = model.before[column]
            if not columns[column]:
                continue
            place = row * columns.size + column
            around = _around(symbols, place, row, column, columns.size, kernel, lag)
            twin = 1 if above >= 0 and symbols[above * columns.size + column] else 0
            _see(model, row, column, rows.size, columns.size, around, int(units[column]), in_kernel, kernel, lag,
                 _order_context(order, twin))  # fmt: skip
            probability = mix(cell_weights, model.inputs)
            bit = code_bit(state, buffer, probability, 1 if symbols[place] else 0)
            sway(cell_weights, model.inputs, bit, probability, _CELL_RATE)
            for index in range(_CELL_INPUTS - 1):
                learn(model.evidence, model.places[index], bit, _MOST)
            in_kernel += bit
            model.before[column + 1] += bit
            _follow(order, bit, twin)
            if bit:
                _look_around(symbols, place, around, lag, levels, model.near)
                model.near[0] = last
                rank = _code_value(state, buffer, int(symbols[place]) - 1, values, levels, value_weights, model)
                symbols[place] = rank + 1
                last = 1 + (rank >> max(levels - 2, 0))
        above = row


# Where a row stands in order to the live row above it: whether they are level so far (weights in the same places), the
# cells since they weren't (−1 from the next weight on), and the weights found. In a sorted matrix, a row that is level
# has no weight where the one above has none.
_LEVEL, _SINCE, _FOUND = range(3)


@compiled
def _order_context(order: np.ndarray, twin: int) -> int:
    """A cell's context by its row's order; `twin`: whether the cell above, in the live row above, holds a weight."""
    if order[_LEVEL]:
        return 3 + min(int(order[_FOUND]), 2) if twin else 2
    if order[_SINCE] < 0:
        return 0
    bits, since = 0, int(order[_SINCE])
    while since:
        since >>= 1
        bits += 1
    return 6 + min(bits, 7)


@compiled
def _follow(order: np.ndarray, bit: int, twin: int) -> None:
    """Takes note of a cell that was coded."""
    order[_FOUND] += bit
    if order[_LEVEL] and bit != twin:
        order[_LEVEL], order[_SINCE] = 0, 0
    elif bit:
        order[_SINCE] = -1
    elif order[_SINCE] >= 0:
        order[_SINCE] += 1


# The neighbours of a cell that are known already, as bits.
_LEFT, _LEFT2, _BACK, _BACK_LEFT, _BACK_RIGHT, _BACK2, _BACK_LEFT2, _BACK_RIGHT2, _UP, _UP_LEFT, _UP_RIGHT, _CHANNEL = (
    1 << place for place in range(12)
)


@compiled
def _around(symbols: np.ndarray, place: int, row: int, column: int, width: int, kernel: int, lag: int) -> int:
    """Which neighbours hold weights: in the row, in the row at the lag, in the matrix row above, one kernel before."""
    found = 0
    if column >= 1 and symbols[place - 1]:
        found |= _LEFT
    if column >= 2 and symbols[place - 2]:
        found |= _LEFT2
    if lag > 1:
        if column >= lag and symbols[place - lag]:
            found |= _BACK
        if column > lag and symbols[place - lag - 1]:
            found |= _BACK_LEFT
        if column >= lag - 1 and symbols[place - lag + 1]:
            found |= _BACK_RIGHT
        if column >= 2 * lag and symbols[place - 2 * lag]:
            found |= _BACK2
        if lag > 2 and column >= lag + 2 and symbols[place - lag - 2]:
            found |= _BACK_LEFT2
        if lag > 2 and column >= lag - 2 and symbols[place - lag + 2]:
            found |= _BACK_RIGHT2
    if row:
        if symbols[place - width]:
            found |= _UP
        if column and symbols[place - width - 1]:
            found |= _UP_LEFT
        if column + 1 < width and symbols[place - width + 1]:
            found |= _UP_RIGHT
    if kernel > 1 and column >= kernel and symbols[place - kernel]:
        found |= _CHANNEL
    return found


@compiled
def _see(
    model: Mixture,
    row: int,
    column: int,
    rows: int,
    columns: int,
    around: int,
    unit: int,
    in_kernel: int,
    kernel: int,
    lag: int,
    order: int,
) -> None:
    """Finds the contexts of a cell and their log-odds."""
    evidence, assumed, places, inputs = model.evidence, model.assumed, model.places, model.inputs
    crowd = 0
    for neighbour in range(8):
        crowd += around >> neighbour & 1
    crowd += (around & 1) + (around >> 2 & 1)  # the nearest two count double
    in_row = _bucket(evidence, _ROWS + row)
    places[0] = _TENSOR
    places[1] = _ROWS + row
    places[2] = _ROWS + rows + column
    places[3] = _ABOVE + (around >> 8) + 16 * min(crowd, 3)
    places[4] = _NEAR + (around & 63)
    places[5] = _WIDE + min(_wide(model.before, column, lag), 15) * _BUCKETS + in_row
    places[6] = _UNIT + unit
    places[7] = _JOINT + in_row * _BUCKETS + _bucket(evidence, _ROWS + rows + column)
    places[8] = _KERNEL + (min(in_kernel, 7) + 8 * ((around & 1) + (around >> 2 & 1)) if kernel > 1 else min(crowd, 9))
    places[9] = _ORDER + order
    base = log_odds(evidence, _TENSOR, assumed[0, 1], assumed[0, 0])
    inputs[0] = base
    for index in range(1, _CELL_INPUTS - 1):
        inputs[index] = log_odds(evidence, places[index], assumed[index, 1], assumed[index, 0]) - base
    ones, zeros = _beside(evidence, _ROWS + rows, column, columns, lag)
    last = _CELL_INPUTS - 1
    inputs[last] = log_count(ones + assumed[last, 1]) - log_count(zeros + assumed[last, 0]) - base


@compiled
def _wide(before: np.ndarray, column: int, lag: int) -> int:
    """The weights in the wide neighbourhood: four columns before, and four to either side up to three lags back."""
    found = int(before[column]) - int(before[max(column - _REACH, 0)])
    if lag > 2:
        for back in range(1, _ROWS_BACK + 1):
            middle = column - back * lag
            first, end = max(middle - _REACH, 0), min(middle + _REACH + 1, column)
            if end > first:
                found += int(before[end]) - int(before[first])
    return found


@compiled
def _beside(evidence: np.ndarray, start: int, column: int, columns: int, lag: int) -> tuple[int, int]:
    """The evidence of a column and of its neighbours, those at the lag included."""
    ones, zeros = int(evidence[start + column, 1]), int(evidence[start + column, 0])
    for distance in (1, lag):
        if distance and column >= distance:
            ones += int(evidence[start + column - distance, 1])
            zeros += int(evidence[start + column - distance, 0])
        if distance and column + distance < columns:
            ones += int(evidence[start + column + distance, 1])
            zeros += int(evidence[start + column + distance, 0])
    return ones, zeros


@compiled
def _bucket(evidence: np.ndarray, place: int) -> int:
    """A class of density: 0 to 3 by how many zeros were seen if nothing else was, 4 to 11 by octaves."""
    ones, zeros = int(evidence[place, 1]) >> 4, int(evidence[place, 0]) >> 4
    bucket = 0
    if ones == 0:
        while bucket < 3 and zeros >> (2 * bucket + 2):
            bucket += 1
        return bucket
    while bucket < 7 and (ones + zeros) >> (bucket + 1) >= ones:
        bucket += 1
    return 11 - bucket


@compiled
def _look_around(symbols: np.ndarray, place: int, around: int, lag: int, levels: int, near: np.ndarray) -> None:
    """The contexts of a value in its neighbours' values: their mean, the nearest one, the classes of two."""
    left = int(symbols[place - 1]) if around & _LEFT else 0
    back = int(symbols[place - lag]) if around & _BACK else 0
    back_left = int(symbols[place - lag - 1]) if around & _BACK_LEFT else 0
    back_right = int(symbols[place - lag + 1]) if around & _BACK_RIGHT else 0
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
    state: np.ndarray, buffer: np.ndarray, rank: int, values: int, levels: int, weights: np.ndarray, model: Mixture
) -> int:
    """Codes which value a weight has: its rank, the most significant bit first, where both bits are possible."""
    places, inputs, near = model.value_places, model.value_inputs, model.near
    shallow = min(1 << levels, _SHALLOW)
    start = 1 << levels
    node = 1
    for level in range(levels - 1, -1, -1):
        if (2 * node + 1 << level) - (1 << levels) >= values:
            node = 2 * node
            continue
        places[0] = node
        places[1] = node
        count = 2
        if node < shallow:
            count = _VALUE_INPUTS
            places[2] = start + near[0] * shallow + node
            places[3] = start + (_CLASSES + near[1]) * shallow + node
            places[4] = start + (_CLASSES + _FINE_CLASSES + near[2]) * shallow + node
            places[5] = start + (_CLASSES + 2 * _FINE_CLASSES + near[3]) * shallow + node
        for index in range(_VALUE_INPUTS):
            table = model.shared if index == 1 else model.value_evidence
            inputs[index] = log_odds(table, places[index], _VALUE_PRIOR, _VALUE_PRIOR) if index < count else 0
        probability = mix(weights, inputs)
        bit = code_bit(state, buffer, probability, rank >> level & 1)
        sway(weights, inputs, bit, probability, _VALUE_RATE)
        for index in range(count):
            learn(model.shared if index == 1 else model.value_evidence, places[index], bit, _MOST)
        node = 2 * node + bit
    return node - (1 << levels)
