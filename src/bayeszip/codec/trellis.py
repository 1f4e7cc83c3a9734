"""Dependent values: which multiples of a step a weight may take is told by the weights before it.

A machine of eight states goes along the live cells, row by row. In even states weights take even multiples of the step,
in odd ones odd multiples or zero; so each chooses among values twice as far apart, yet all multiples are in reach, by
the right path. What is coded is an index, how many of the values at hand a weight is away from zero; its parity moves
the machine. At equal bits that halves the distance to the rate-distortion bound.

Trellis-coded quantization (Marcellin and Fischer 1990) with an entropy coder (Fischer and Wang 1992); two scalar
quantizers with zero in both, as in JPEG 2000, part 2; the machine is Ungerboeck's code of eight states, h = (13, 04).
"""

from dataclasses import replace

import numpy as np

from bayeszip.codec.compilation import compiled, entry, prepare
from bayeszip.codec.matrix import View, survey_of

__all__ = ["STATES", "depends", "index_of", "next_state", "number_of", "states_along"]

STATES = 8
#: fewer weights may be on a path by chance
_LEAST_WEIGHTS = 64


@compiled
def next_state(state: int, index: int) -> int:
    """The state after an index. The lowest bit of a state is which multiples there are: even ones, or odd ones."""
    return state >> 1 ^ (index & 1) << 1 ^ (state & 1) * 5


@compiled
def number_of(index: int, quantizer: int) -> int:
    """The multiple of the step with this index, in a state whose lowest bit is `quantizer`."""
    return 2 * index - quantizer if index > 0 else 2 * index + quantizer if index else 0


@compiled
def index_of(number: int, quantizer: int) -> int:
    """The index of a multiple."""
    return (number + quantizer) // 2 if number > 0 else -((quantizer - number) // 2)


def depends(numbers: np.ndarray, view: View) -> bool:
    """Whether a tensor's multiples of a step, in order, are ones that a path leads to, and not by chance."""
    return int(np.count_nonzero(numbers)) >= _LEAST_WEIGHTS and states_along(numbers, view) is not None


def states_along(numbers: np.ndarray, view: View) -> np.ndarray | None:
    """The state in which each number is coded, 0 outside the live cells; None: no path leads to these numbers."""
    states = np.zeros(numbers.size, dtype=np.uint8)
    if not numbers.any():
        return states
    survey = survey_of(numbers, replace(view, quick=True))  # no lag is sought
    prepare(numbers.size)
    return states if _follow(numbers, survey.rows, survey.columns, states) else None


@entry
def _follow(numbers: np.ndarray, rows: np.ndarray, columns: np.ndarray, states: np.ndarray) -> bool:
    """Fills in the states; whether there are such."""
    state = 0
    for row in range(len(rows)):
        if not rows[row]:
            continue
        start = row * len(columns)
        for column in range(min(len(columns), len(numbers) - start)):
            if columns[column]:
                number = numbers[start + column]
                if number and (number ^ state) & 1:
                    return False
                states[start + column] = state
                state = next_state(state, index_of(number, state & 1))
    return True
