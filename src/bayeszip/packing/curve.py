"""Bytes against error: the same network packed at several qualities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from bayeszip.fitting.batches import Loader
from bayeszip.packing.pack import pack
from bayeszip.recipe import Coding

__all__ = ["QUALITIES", "Point", "curve"]

QUALITIES = (99.5, 99.0, 98.0, 97.0, 95.0, 92.0, 88.0, 80.0, 70.0)


@dataclass(frozen=True)
class Point:
    """A file at a quality; `moved` is how far weights moved, `accuracy` what was measured of the decoded network."""

    quality: float
    bytes: int
    ratio: float
    moved: float
    accuracy: float | None


def curve(
    model: nn.Module | Mapping[str, Tensor],
    qualities: Sequence[float] = QUALITIES,
    *,
    example_inputs: Sequence[Tensor] | Tensor | None = None,
    calibration: Loader | Tensor | None = None,
    coding: Coding | None = None,
    accuracy: Callable[[nn.Module], float] | None = None,
) -> list[Point]:
    """The files that `pack` makes of a network, from fine to coarse.

    Args:
        accuracy: of a network, as decoded; None: it is not asked for.
    """
    points = []
    for quality in qualities:
        result = pack(model, quality=quality, example_inputs=example_inputs, calibration=calibration, coding=coding)
        measured = None if accuracy is None else accuracy(result.network())
        points.append(Point(quality, result.bytes, result.ratio, result.moved or 0.0, measured))
    return points
