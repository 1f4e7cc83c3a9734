"""Which path of the trellis to take: the one of least distance and bits, by Viterbi's algorithm."""

from dataclasses import replace

import numpy as np

from bayeszip.codec.compilation import compiled, entry, prepare
from bayeszip.codec.matrix import View, survey_of, view_of
from bayeszip.codec.trellis import STATES, next_state, number_of

__all__ = ["NEVER", "bits_of_indices", "cheapest_index", "cheapest_path"]

#: rounds of choosing, each by the shares that indices had in the round before
_ROUNDS = 2
#: prices differ by how large the numbers around a cell are against the mean, in classes of so many natural units
_CLASSES, _CLASS_STEP = 8, 0.375
#: observations that a class takes over from all
_SHARED = 8.0
#: live cells after which a path is settled
_SETTLED = 1 << 15
NEVER = 1e300


def cheapest_path(ratios: np.ndarray, price: float) -> np.ndarray:
    """Multiples n of a step that `context` can code as dependent ones, near to given real multiples.

    Least is the sum of (ratio − n)² + price · bits(n), the bits being those of n's share where it is among numbers of
    about the same size. Exact zeros stay zero.
    """
    view = replace(view_of(ratios.shape), quick=True)  # no lag is sought
    flat = ratios.reshape(-1).astype(np.float64)
    numbers = np.rint(flat).astype(np.int64)
    states: np.ndarray | None = None
    prepare(STATES * numbers.size)
    for _ in range(_ROUNDS):
        classes = _classes(numbers, view)
        bits = bits_of_indices(numbers, states, classes)
        numbers, states = _path(flat, classes, bits, price, view)
    return numbers.reshape(ratios.shape)


def _path(
    ratios: np.ndarray, classes: np.ndarray, bits: np.ndarray, price: float, view: View
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers along the best path, and the state at each; empty rows and columns are no part of it."""
    ratios = ratios.copy()
    before, picked = np.zeros(_SETTLED * STATES, np.uint8), np.zeros(_SETTLED * STATES, np.int32)
    places, costs = np.zeros(_SETTLED, np.int64), np.zeros(2 * STATES)
    while True:
        numbers, states = np.zeros(ratios.size, np.int64), np.zeros(ratios.size, np.uint8)
        if not ratios.any():
            return numbers, states
        live = survey_of(ratios, view)
        _walk(ratios, live.rows, live.columns, classes, bits.reshape(-1), bits.shape[-1], price, before, picked, places,
              costs, numbers, states)  # fmt: skip
        if not numbers.any():
            return numbers, states
        found = survey_of(numbers, view)
        if np.array_equal(found.rows, live.rows) and np.array_equal(found.columns, live.columns):
            return numbers, states
        cells = np.arange(ratios.size)
        ratios[(found.rows[cells // view.columns] == 0) | (found.columns[cells % view.columns] == 0)] = 0.0


def _classes(numbers: np.ndarray, view: View) -> np.ndarray:
    """The class of each cell by the magnitudes before it in its row and above it, as far as these tell."""
    padded = np.zeros(view.rows * view.columns)
    padded[: numbers.size] = np.abs(numbers)
    sizes = np.pad(padded.reshape(view.rows, view.columns), ((1, 0), (2, 1)))
    left, left2, up = sizes[1:, 1:-2], sizes[1:, :-3], sizes[:-1, 2:-1]
    around = 2 * left + left2 + 2 * up + sizes[:-1, 1:-2] + sizes[:-1, 3:]
    mean = max(float(sizes.mean()), 1e-9)
    step = np.log(np.maximum(around / 7, 1e-9) / mean) / _CLASS_STEP + _CLASSES / 2
    return np.clip(step, 0, _CLASSES - 1).astype(np.uint8).reshape(-1)[: numbers.size]


def bits_of_indices(numbers: np.ndarray, states: np.ndarray | None, classes: np.ndarray) -> np.ndarray:
    """What each index costs, by class, kind of state, and from the lowest index on.

    By the shares of those at hand, in such states; None: before there is a path, as if all could be in either kind.
    """
    most = int(np.abs(numbers).max(initial=0)) // 2 + 3
    width = 2 * most + 1
    counts = np.zeros((_CLASSES, 2, width))
    for quantizer in (0, 1):
        here = slice(None) if states is None else states & 1 == quantizer
        indices = np.sign(numbers[here]) * ((np.abs(numbers[here]) + quantizer) // 2) + most
        places = classes[here].astype(np.int64) * width + indices
        counts[:, quantizer] = np.bincount(places, minlength=_CLASSES * width).reshape(_CLASSES, width)
    shared = counts.sum(0) + 0.5
    counts += _SHARED * shared / shared.sum(1, keepdims=True)
    return np.log2(counts.sum(2, keepdims=True) / counts)


@entry
def _walk(
    ratios: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    classes: np.ndarray,
    bits: np.ndarray,
    width: int,
    price: float,
    before: np.ndarray,
    picked: np.ndarray,
    places: np.ndarray,
    costs: np.ndarray,
    numbers: np.ndarray,
    states: np.ndarray,
) -> None:
    """Fills in numbers and states; `before`, `picked`, `places` and `costs` are room to work in."""
    start, count = 0, 0
    _begin(costs, start)
    for row in range(len(rows)):
        if not rows[row]:
            continue
        first = row * len(columns)
        for column in range(min(len(columns), len(ratios) - first)):
            if columns[column]:
                place = first + column
                places[count] = place
                _step(ratios[place], bits, 2 * width * classes[place], width, price, costs, before, picked, count)
                count += 1
                if count == len(places):
                    start = _settle(count, before, picked, places, costs, numbers, states)
                    _begin(costs, start)
                    count = 0
    _settle(count, before, picked, places, costs, numbers, states)


@compiled
def _begin(costs: np.ndarray, start: int) -> None:
    for state in range(STATES):
        costs[state] = 0.0 if state == start else NEVER


@compiled
def _step(
    ratio: float,
    bits: np.ndarray,
    first: int,
    width: int,
    price: float,
    costs: np.ndarray,
    before: np.ndarray,
    picked: np.ndarray,
    count: int,
) -> None:
    """For each state the cheapest way to be in it after one more weight; prices begin at `first`."""
    for state in range(STATES, 2 * STATES):
        costs[state] = NEVER
    for quantizer in range(2):
        zero = first + quantizer * width + width // 2
        for parity in range(2):
            index, cost = cheapest_index(ratio, quantizer, parity, bits, zero, width // 2, price)
            for state in range(quantizer, STATES, 2):
                after = next_state(state, parity)
                total = costs[state] + cost
                if total < costs[STATES + after]:
                    costs[STATES + after] = total
                    before[count * STATES + after], picked[count * STATES + after] = state, index
    for state in range(STATES):
        costs[state] = costs[STATES + state]


@compiled
def cheapest_index(
    ratio: float, quantizer: int, parity: int, bits: np.ndarray, zero: int, most: int, price: float
) -> tuple[int, float]:
    """Of the two nearest indices of a parity, and zero, the one with the least distance and bits; and its cost."""
    size, sign, chosen, least = abs(ratio), -1 if ratio < 0 else 1, 0, NEVER
    if not parity:
        least = ratio * ratio + price * bits[zero]
    if ratio != 0:
        low = min(int(size + quantizer) // 2, most - 1)
        low -= (low ^ parity) & 1
        for index in range(max(low, parity), min(low + 2, most) + 1, 2):
            away = size - number_of(index, quantizer)
            cost = away * away + price * bits[zero + sign * index]
            if cost < least:
                chosen, least = sign * index, cost
    return chosen, least


@compiled
def _settle(
    count: int,
    before: np.ndarray,
    picked: np.ndarray,
    places: np.ndarray,
    costs: np.ndarray,
    numbers: np.ndarray,
    states: np.ndarray,
) -> int:
    """Goes back along the cheapest path; returns the state that it ends in."""
    last = 0
    for state in range(STATES):
        if costs[state] < costs[last]:
            last = state
    state = last
    for place in range(count - 1, -1, -1):
        index, state = picked[place * STATES + state], before[place * STATES + state]
        numbers[places[place]] = number_of(index, state & 1)
        states[places[place]] = state
    return last
