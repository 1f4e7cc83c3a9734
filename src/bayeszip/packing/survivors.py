"""A row of weights on a path through the coder's trellis, the error of each made good by those behind it.

Viterbi's algorithm with a row of its own for each state: what a weight is to be depends on the errors made before it,
so every path that is still in the running takes its own along. After some columns the best one is kept, and its errors
are passed on to all columns behind.
"""

from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled, entry
from bayeszip.codec.paths import NEVER, cheapest_index
from bayeszip.codec.trellis import STATES, next_state, number_of

__all__ = ["Survivors", "walk_row"]

#: Columns before the best path is kept.
TOGETHER = 96


class Survivors(NamedTuple):
    """Room for the paths in the running.

    Args:
        costs: of the path into each state, before a column and after it.
        rows: what the weights of these columns are to be along each path, before an even column and before an odd one.
        before: for each column and state, the state that the path comes from; `picked`: the multiple that it takes;
            `errors`: what is left of the weight, over U_jj.
    """

    costs: np.ndarray
    rows: np.ndarray
    before: np.ndarray
    picked: np.ndarray
    errors: np.ndarray

    @classmethod
    def fresh(cls) -> "Survivors":
        many = STATES * TOGETHER
        before, picked = np.zeros((2, many), dtype=np.int64)
        return cls(np.zeros(2 * STATES), np.zeros(2 * many), before, picked, np.zeros(many))


@entry
def walk_row(
    weights: np.ndarray,
    upper: np.ndarray,
    live: np.ndarray,
    price: float,
    bits: np.ndarray,
    state: int,
    chosen: np.ndarray,
    states: np.ndarray,
    paths: Survivors,
) -> int:
    """Chooses multiples for as many columns as `chosen` has; returns the state that their path ends in.

    Leaves in `states` those in which they are chosen, and in `weights`, which are in units of the step, what the others
    have been moved to.

    Args:
        upper: U of all columns, row by row.
        live: 0 for columns that are zero in all rows: they are no part of the path.
        price: of a bit, in squared steps, where U_jj is 1.
        bits: of the indices, in even states and in odd ones.
    """
    size = len(weights)
    for start in range(0, len(chosen), TOGETHER):
        count = min(TOGETHER, len(chosen) - start)
        for each in range(STATES):
            paths.costs[each] = 0.0 if each == state else NEVER
            for column in range(count):
                paths.rows[each * TOGETHER + column] = weights[start + column]
        for column in range(count):
            own = upper[(start + column) * (size + 1)]
            _compete(paths, column, own, live[start + column], price * own * own, bits)
            _pass_on(paths, column, count, own, upper, (start + column) * size + start)
        state = _best(paths)
        each = state
        for column in range(start + count - 1, start - 1, -1):
            place = (column - start) * STATES + each
            chosen[column], each = paths.picked[place], paths.before[place]
            states[column] = each
            for later in range(start + count, size):
                weights[later] -= paths.errors[place] * upper[column * size + later]
    return state


@compiled
def _compete(paths: Survivors, column: int, own: float, live: int, price: float, bits: np.ndarray) -> None:
    """Finds for each state the path that comes into it at the least cost."""
    costs, width = paths.costs, len(bits) // 2
    for state in range(STATES):
        costs[STATES + state] = NEVER
        paths.before[column * STATES + state], paths.picked[column * STATES + state] = state, 0
    for state in range(STATES):
        ratio, quantizer = paths.rows[(column % 2 * STATES + state) * TOGETHER + column], state & 1
        if not live:
            costs[STATES + state] = costs[state] + ratio * ratio / (own * own)
            continue
        for parity in range(2):
            zero = quantizer * width + width // 2
            index, cost = cheapest_index(ratio, quantizer, parity, bits, zero, width // 2, price)
            after, total = next_state(state, parity), costs[state] + cost / (own * own)
            if total < costs[STATES + after]:
                costs[STATES + after], place = total, column * STATES + after
                paths.before[place], paths.picked[place] = state, number_of(index, quantizer)
    for state in range(STATES):
        costs[state] = costs[STATES + state]


@compiled
def _pass_on(paths: Survivors, column: int, count: int, own: float, upper: np.ndarray, first: int) -> None:
    """Lets the columns behind hear of the errors, along each path; U of this row begins at `first`."""
    rows = paths.rows
    for state in range(STATES):
        place = column * STATES + state
        source = (column % 2 * STATES + paths.before[place]) * TOGETHER
        target = ((column + 1) % 2 * STATES + state) * TOGETHER
        error = (rows[source + column] - paths.picked[place]) / own
        paths.errors[place] = error
        for later in range(column + 1, count):
            rows[target + later] = rows[source + later] - error * upper[first + later]


@compiled
def _best(paths: Survivors) -> int:
    best = 0
    for state in range(STATES):
        if paths.costs[state] < paths.costs[best]:
            best = state
    return best
