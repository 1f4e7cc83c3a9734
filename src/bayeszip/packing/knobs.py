"""One knob: what a packed file is held to, and the search that gets there."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bayeszip.errors import RecipeError, TargetError
from bayeszip.settings import as_number
from bayeszip.tensors import QuantizedTensor

__all__ = ["Knob", "Quantizer", "Trial", "at_error", "within_bytes"]

#: What `pack` aims at if it is told nothing.
QUALITY = 98.0
#: A budget in bytes is not filled beyond this error.
FINEST = 1e-3
#: How near to what is aimed at is near enough.
NEAR = 0.01
MOST_TRIALS = 12


@dataclass(frozen=True)
class Knob:
    """What the file is held to; one of these at most, none: a quality of 98.

    Args:
        components: so many shared values for each matrix besides 0, by clustering.
        max_error: how far a weight may move, as a share of the largest of its tensor.
        quality: from 0 to 100; at 95 weights move by 5 % of their size (root mean squares).
        max_bytes: the size of the whole file.
    """

    components: int | None = None
    max_error: float | None = None
    quality: float | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise RecipeError(f"{' and '.join(given)} contradict each other: give one")
        for name in given:
            whole = name in ("components", "max_bytes")
            object.__setattr__(self, name, as_number(name, getattr(self, name), whole=whole))
        if self.components is not None and not 1 <= self.components < 2**16:
            raise RecipeError(f"components must lie between 1 and 65,535, not {self.components}")
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise RecipeError(f"max_error must be above 0 and below 1, not {self.max_error}")
        if self.quality is not None and not 0 < self.quality < 100:
            raise RecipeError(f"quality must be above 0 and below 100, not {self.quality}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise RecipeError(f"max_bytes must be at least 1, not {self.max_bytes}")

    @property
    def error(self) -> float:
        """The share by which weights may move, if quality counts."""
        return 1 - (QUALITY if self.quality is None else self.quality) / 100


@dataclass(frozen=True)
class Trial:
    """What a quantizer made of a network.

    Args:
        error: how far it moved what counts, as a share of its size.
        factor: that it was made at.
        buffers: other tensors that are to change with the quantized ones.
        ordered: whether units may change places; values that depend on each other must not.
    """

    tensors: Mapping[str, QuantizedTensor]
    error: float
    factor: float = 0.0
    buffers: Mapping[str, np.ndarray] = field(default_factory=dict)
    ordered: bool = True


class Quantizer(Protocol):
    """Quantizes a network, the coarser the larger `factor` is; at a factor f the error is about f."""

    def at(self, factor: float) -> Trial: ...


def at_error(quantizer: Quantizer, error: float, start: float | None = None) -> Trial:
    """The coarsest trial found that is within the error, to a hundredth of it; the factor is sought from `start` on."""
    best: Trial | None = None

    def value(factor: float) -> float:
        nonlocal best
        trial = quantizer.at(factor)
        if trial.error <= error and (best is None or trial.error > best.error):
            best = trial
        return math.log(max(trial.error, 1e-12) / error)

    _approach(value, start or error, 1.0)
    if best is None:
        raise TargetError(f"no step was found that moves weights by less than {100 * error:.3g} %; lower the quality")
    return best


def within_bytes(quantizer: Quantizer, size: Callable[[Trial], int], budget: int, start: float | None = None) -> Trial:
    """The finest trial found whose file keeps within the budget; the factor is sought from `start` on.

    Raises:
        TargetError: even the coarsest doesn't.
    """
    best: Trial | None = None
    least = math.inf

    def value(factor: float) -> float:
        nonlocal best, least
        trial = quantizer.at(factor)
        found = size(trial)
        least = min(least, found)
        if found <= budget and (best is None or trial.error < best.error):
            best = trial
        # From −NEAR to 0 where the file is within the budget, and fills it.
        return math.log(budget / found) - NEAR

    if start is not None or value(FINEST) < -NEAR:
        _approach(value, start or 0.05, 0.5)
    if best is None:
        raise TargetError(f"the smallest file found has {least:,} bytes, more than {budget:,}; allow more")
    return best


def _approach(value: Callable[[float], float], start: float, slope: float) -> None:
    """Calls a function of log factor that rises, by about `slope` at first, until it is a little below 0."""
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    place = math.log(start)
    for _ in range(MOST_TRIALS):
        found = value(math.exp(place))
        if -NEAR <= found <= 0:
            return
        low, high = ((place, found), high) if found < 0 else (low, (place, found))
        if low is None or high is None:
            # Beyond what is aimed at, so that it comes to lie between two bounds; farther each time.
            place -= min(max(1.1 * found / slope, -3.0), 3.0) - (0.01 if found < 0 else -0.01)
            slope *= 0.7
            continue
        if high[0] - low[0] < 1e-4:
            return
        share = -(low[1] + 0.5 * NEAR) / (high[1] - low[1])
        place = low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
