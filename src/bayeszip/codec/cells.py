"""A cell of the thorough model: whether it holds a weight, by eleven inputs whose mixture learns.

What is at hand is passed as tuples of integers, which compiled loops keep in registers and plain Python unpacks faster
than it reads lists. So inputs stand one below the other where a loop over them would be shorter.
"""

import numpy as np

from bayeszip.codec.compilation import compiled, tabulated
from bayeszip.codec.evidence import LOG, LOG_DIRECT, LOG_OF_16, ONE_COUNT, log_count, squash

__all__ = [
    "CELL_PRIORS",
    "CELL_WEIGHTS",
    "FIRST_ROW",
    "MARGIN",
    "CellPlaces",
    "CellWeights",
    "find_cell",
    "learn_cell",
    "moved_weights",
    "taken_weights",
    "weigh_cell",
]

#: Start weights of the mixture, in 1/65536, and all other numbers of this block: found by trial on trained networks.
CELL_WEIGHTS = (58000, 2764, 1017, 3407, 25080, 31457, 68523, 6664, 14420, 31457, 24538)
_RATE = 13
#: the evidence that each input assumes beforehand, in 1/16 of a count
CELL_PRIORS = (251, 376, 94, 222, 202, 305, 173, 111, 69, 26, 345)

# Where contexts keep their evidence; that of the tensor is at 0. Rows follow, and columns with a margin on either side.
_ABOVE, _NEAR, _WIDE, _UNIT, _JOINT, _KERNEL, _ORDER, FIRST_ROW = 1, 65, 129, 321, 330, 474, 498, 512
_BUCKETS = 12
#: the wide neighborhood of a cell: columns to either side, and rows back at the lag
_REACH, _ROWS_BACK, _MOST_LAG = 4, 3, 64
#: empty cells before the first column of a row, as many as a neighbor may be away
MARGIN = _ROWS_BACK * _MOST_LAG + _REACH
_MOST = 1 << 20
_HALF = 1 << 15
#: classes of density: 0 to 3 by how many zeros were seen if nothing else was, 4 to 11 by octaves of cells for each 1
_BY_ZEROS = tabulated(np.array([0] * 4 + [1] * 12 + [2] * 48 + [3], dtype=np.int64))
_BY_SHARE = tabulated(np.array([11] + [12 - share.bit_length() for share in range(1, 129)], dtype=np.int64))

#: where the evidence of a cell's inputs lies: of the tensor (0), its row, its column, and seven contexts
CellPlaces = tuple[int, ...]
#: one number for each input: the tensor's, the nine above, and the columns around
CellWeights = tuple[int, ...]


@compiled
def find_cell(
    zeros: np.ndarray,
    ones: np.ndarray,
    here: np.ndarray,
    over: np.ndarray,
    before: np.ndarray,
    row: int,
    own: int,
    column: int,
    unit: int,
    in_kernel: int,
    kernel: int,
    lag: int,
    order: int,
) -> CellPlaces:
    """The contexts of a cell; `row` and `own` are the places of its row and its column."""
    at = MARGIN + column
    left, left2 = here[at - 1], here[at - 2]
    back, near, crowd = 0, left + 2 * left2, 2 * left + left2
    wide = before[at] - before[at - _REACH]
    if lag > 1:
        back, back_left, back_right, back2 = here[at - lag], here[at - lag - 1], here[at - lag + 1], here[at - 2 * lag]
        near += 4 * back + 8 * back_left + 16 * back_right + 32 * back2
        crowd += 2 * back + back_left + back_right + back2
        if lag > 2:
            crowd += here[at - lag - 2] + here[at - lag + 2]
            wide += before[at - lag + _REACH + 1 if lag > _REACH else at] - before[at - lag - _REACH]
            wide += before[at - 2 * lag + _REACH + 1] - before[at - 2 * lag - _REACH]
            wide += before[at - 3 * lag + _REACH + 1] - before[at - 3 * lag - _REACH]
    upper = over[at] + 2 * over[at - 1] + 4 * over[at + 1]
    if kernel > 1 and column >= kernel:
        upper += 8 * here[at - kernel]
    in_row = _bucket(ones[row], zeros[row])
    return (
        0,
        row,
        own,
        _ABOVE + upper + 16 * (crowd if crowd < 3 else 3),
        _NEAR + near,
        _WIDE + (wide if wide < 15 else 15) * _BUCKETS + in_row,
        _UNIT + unit,
        _JOINT + in_row * _BUCKETS + _bucket(ones[own], zeros[own]),
        _KERNEL
        + ((in_kernel if in_kernel < 7 else 7) + 8 * (left + back) if kernel > 1 else crowd if crowd < 9 else 9),
        _ORDER + order,
    )


@compiled
def _bucket(one: int, zero: int) -> int:
    """The class of density of a row or column by its evidence."""
    if one >= ONE_COUNT:
        share = ((one >> 4) + (zero >> 4)) // (one >> 4)
        return _BY_SHARE[share] if share < 128 else _BY_SHARE[128]
    return _BY_ZEROS[zero >> 4] if zero < 1024 else _BY_ZEROS[64]


@compiled
def weigh_cell(
    zeros: np.ndarray,
    ones: np.ndarray,
    for_zero: CellWeights,
    for_one: CellWeights,
    places: CellPlaces,
    weights: CellWeights,
    lag: int,
) -> tuple[int, CellWeights]:
    """The probability of a weight, and the inputs that say so.

    All inputs are less the first. The last is that of the columns around, and has no evidence of its own.
    """
    _, p1, p2, p3, p4, p5, p6, p7, p8, p9 = places
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10 = weights
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10 = for_zero
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10 = for_one
    log, top, far = LOG, LOG_DIRECT, LOG_OF_16
    one, zero = ones[0] + a0, zeros[0] + b0
    base = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far)
    one, zero = ones[p1] + a1, zeros[p1] + b1
    x1 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p2] + a2, zeros[p2] + b2
    x2 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p3] + a3, zeros[p3] + b3
    x3 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p4] + a4, zeros[p4] + b4
    x4 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p5] + a5, zeros[p5] + b5
    x5 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p6] + a6, zeros[p6] + b6
    x6 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p7] + a7, zeros[p7] + b7
    x7 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p8] + a8, zeros[p8] + b8
    x8 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p9] + a9, zeros[p9] + b9
    x9 = (log[one] if one < top else log[one >> 4] + far) - (log[zero] if zero < top else log[zero >> 4] + far) - base
    one, zero = ones[p2] + ones[p2 - 1] + ones[p2 + 1] + a10, zeros[p2] + zeros[p2 - 1] + zeros[p2 + 1] + b10
    if lag:
        one += ones[p2 - lag] + ones[p2 + lag]
        zero += zeros[p2 - lag] + zeros[p2 + lag]
    x10 = (log[one] if one < top else log_count(one)) - (log[zero] if zero < top else log_count(zero)) - base
    odds = (w0 * base + w1 * x1 + w2 * x2 + w3 * x3 + w4 * x4 + w5 * x5
            + w6 * x6 + w7 * x7 + w8 * x8 + w9 * x9 + w10 * x10)  # fmt: skip
    return squash((odds + (1 << 19)) >> 20), (base, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10)


@compiled
def moved_weights(weights: CellWeights, inputs: CellWeights, probability: int, bit: int) -> CellWeights:
    """The weights, moved along the gradient of the bits spent: by input × error × rate."""
    error = ((bit << 16) - probability) * _RATE
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10 = weights
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10 = inputs
    return (
        w0 + ((x0 * error + _HALF) >> 16),
        w1 + ((x1 * error + _HALF) >> 16),
        w2 + ((x2 * error + _HALF) >> 16),
        w3 + ((x3 * error + _HALF) >> 16),
        w4 + ((x4 * error + _HALF) >> 16),
        w5 + ((x5 * error + _HALF) >> 16),
        w6 + ((x6 * error + _HALF) >> 16),
        w7 + ((x7 * error + _HALF) >> 16),
        w8 + ((x8 * error + _HALF) >> 16),
        w9 + ((x9 * error + _HALF) >> 16),
        w10 + ((x10 * error + _HALF) >> 16),
    )


@compiled
def taken_weights(weights: np.ndarray) -> CellWeights:
    """Weights out of the array in which they are carried from tensor to tensor."""
    w0, w1, w2, w3, w4, w5 = weights[0], weights[1], weights[2], weights[3], weights[4], weights[5]
    return w0, w1, w2, w3, w4, w5, weights[6], weights[7], weights[8], weights[9], weights[10]


@compiled
def learn_cell(zeros: np.ndarray, ones: np.ndarray, places: CellPlaces, bit: int) -> None:
    """Counts the bit in the evidence at all places."""
    seen, others = (ones, zeros) if bit else (zeros, ones)
    for place in places:
        more = seen[place] + ONE_COUNT
        if more > _MOST:
            more >>= 1
            others[place] >>= 1
        seen[place] = more
