"""Pools and interpolation: channels pass through, space changes."""

from collections.abc import Sequence

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.graph.rules.base import UNKNOWN, Atoms, Rule, Shape, Site, along, ints
from bayeszip.tensors import Node

__all__ = ["AveragePool", "MaxPool", "Resized"]


class _Spatial(Rule):
    """Channels, dimension 1, pass through; what comes behind is space and stays."""

    def couple(self, site: Site, atoms: Atoms) -> None:
        before, after = site.inputs[0].coordinates, site.output.coordinates
        atoms.pin(before[0], after[0], *before[2:], *after[2:])
        atoms.join(before[1], after[1])

    def constants(self, site: Site) -> np.ndarray:
        """The constant of each channel, NaN where it isn't the same all over."""
        channels = along(site.inputs[0].constants, 1, site.output.shape[1])
        return channels.reshape(1, -1, *(1,) * (len(site.output.shape) - 2))


class Resized(_Spatial):
    """An output of a given size: adaptive pools, and interpolation, whose weights sum to one."""

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), sizes = inputs, ints(node, self._attribute)
        if len(shape) != len(sizes) + 2 or min(sizes, default=0) < 1:
            raise ModelError(f"{node.op} can't bring a value of shape {shape} to {sizes}")
        return (*shape[:2], *sizes)


class _Pool(_Spatial):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,) = inputs
        if len(shape) != self._rank + 2:
            raise ModelError(f"{node.op} takes {self._rank + 2} dimensions, not {len(shape)}")
        dilation = ints(node, "dilation") if "dilation" in node.attributes else (1,) * self._rank
        per_dim = zip(
            shape[2:], ints(node, "kernel_size"), ints(node, "stride"), ints(node, "padding"), dilation, strict=True
        )
        sizes = [_pooled(*each, ceil=bool(node.attributes["ceil_mode"])) for each in per_dim]
        if min(sizes) < 1:
            raise ModelError(f"{node.op}: the window is larger than its input of shape {shape}")
        return (*shape[:2], *sizes)


class MaxPool(_Pool):
    """The maximum over windows; padding never wins."""


class AveragePool(_Pool):
    """The mean over windows; padding counts as zeros unless it is told not to."""

    def constants(self, site: Site) -> np.ndarray:
        channels = super().constants(site)
        if not any(ints(site.node, "padding")):
            return channels
        return np.where(channels == 0.0, 0.0, UNKNOWN)


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool) -> int:
    """The size of a pool's output, as torch computes it: a window may not start in the padding on the right."""
    if min(kernel, stride, dilation) < 1 or padding < 0:
        raise ModelError("a pool's kernel, stride and dilation must be at least 1, its padding at least 0")
    reach = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1
    return count
