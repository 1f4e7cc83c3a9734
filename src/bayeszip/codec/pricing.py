"""What the coding loops ask: the bits of a zero, of a weight, and of what was coded, told while they code.

A loop that is handed a `Pricing` writes its prices down cell by cell. If the pricing has aims, the loop also chooses
what it codes: of zero and a few values, the one with the least cost in bits and in distance from the aim, by the very
probabilities that it codes with.
"""

import math
from typing import NamedTuple

import numpy as np

from bayeszip.codec.compilation import compiled
from bayeszip.codec.rangecoder import PROBABILITY_BITS

__all__ = ["CANDIDATES", "Pricing", "bits_of", "candidate", "distance"]

#: a weight's choice: its nearest value, those beside it, what it was before; and zero
CANDIDATES = 4


class Pricing(NamedTuple):
    """The prices of one tensor, for the loops to fill in, and what its weights are to be.

    Args:
        zero: for each cell the bits of no weight; `weight`: of a weight, whichever it is; `paid`: of what was coded.
        asked: for each value, by rank from 1, the bits of its being this one and no other, at the end.
        means: for each cell the value aimed at, in units of the codebook; empty: nothing is chosen.
        worth: for each cell the bits that a squared distance of 1 from its mean is worth.
        nearest: for each cell the rank, from 1, of the value nearest to its mean.
        values: the shared values by rank, from 1; 0.0 comes first.
        places, inputs: the contexts and log-odds of a value that is only considered.
    """

    zero: np.ndarray
    weight: np.ndarray
    paid: np.ndarray
    asked: np.ndarray
    means: np.ndarray
    worth: np.ndarray
    nearest: np.ndarray
    values: np.ndarray
    places: np.ndarray
    inputs: np.ndarray

    @classmethod
    def of(cls, size: int, values: np.ndarray, means: np.ndarray, worth: np.ndarray) -> "Pricing":
        """`values` by rank, from 1; `means` and `worth` are empty if nothing is to be chosen."""
        zero, weight, paid = np.zeros((3, size))
        bounds = 0.5 * (values[2:] + values[1:-1])
        nearest = np.searchsorted(bounds, means).astype(np.int64) + 1
        asked = np.full(values.size, math.log2(max(values.size - 1, 1)))  # all alike, until one is coded
        asked[0] = 0.0
        places, inputs = np.zeros((2, 16), dtype=np.int64)
        return cls(zero, weight, paid, asked, means, worth, nearest, values, places, inputs)


@compiled
def bits_of(probability: int, bit: int) -> float:
    """What it costs to code `bit`, which is 1 with `probability` / 2¹⁶."""
    return PROBABILITY_BITS - math.log2(probability if bit else (1 << PROBABILITY_BITS) - probability)


@compiled
def distance(pricing: Pricing, place: int, rank: int) -> float:
    """What it costs, in bits, that the cell takes the value with this rank."""
    away = pricing.means[place] - pricing.values[rank]
    return pricing.worth[place] * away * away


@compiled
def candidate(pricing: Pricing, place: int, before: int, index: int) -> int:
    """The rank of a value that the cell may take, nearer than zero or what it was; 0: none. `before` is what it was."""
    rank = pricing.nearest[place]
    if index == 1:
        rank -= 1
    elif index == 2:
        rank += 1
    elif index == 3:
        rank = before
    if not 1 <= rank < len(pricing.values):
        return 0
    value, mean = pricing.values[rank], pricing.means[place]
    # Where zeros are dear a cell had better stay, however near to zero its mean.
    return rank if index == 3 or abs(mean - value) < abs(mean) else 0
