"""Normalization: batch and instance norm channel by channel, group norm group by group, layer norm over all."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.graph.rules.base import UNKNOWN, Atoms, Rule, Shape, Site, along, couple_groups, ints
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm"]


class _ChannelNorm(Rule):
    """A norm whose tensors have one element for each channel, dimension 1."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,) = inputs
        if len(shape) < 2 or any(each is not None and each != (shape[1],) for each in tensors):
            raise ModelError(f"{node.op}: tensors of shapes {tuple(tensors)} don't fit a value of shape {shape}")
        return shape

    def couple(self, site: Site, atoms: Atoms) -> None:
        before, after = site.inputs[0].coordinates, site.output.coordinates
        atoms.pin(before[0], after[0], *before[2:], *after[2:])
        atoms.join(before[1], after[1])
        for tensor in site.tensors:
            if tensor is not None:
                atoms.join(tensor.coordinates[0], after[1])

    def constants(self, site: Site) -> np.ndarray:
        """A channel whose weight is zero is its bias."""
        weight, bias = site.tensors[:2]
        if weight is None:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        offset = np.zeros(site.output.shape[1]) if bias is None else bias.values.astype(np.float64)
        return self._channels(site, np.where(weight.values == 0, offset, UNKNOWN))

    def _channels(self, site: Site, constants: np.ndarray) -> np.ndarray:
        return constants.reshape(1, -1, *(1,) * (len(site.output.shape) - 2))


class InstanceNorm(_ChannelNorm):
    """Each channel of each sample by its own mean and variance."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        shape = super().shape(node, inputs, tensors)
        if math.prod(shape[2:]) < 2:
            raise ModelError(f"{node.op}: a value of shape {shape} has nothing to normalize over")
        return shape


class BatchNorm(_ChannelNorm):
    """Each channel by its running mean and variance: it turns a dead channel into a constant."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if None in tensors[2:]:
            raise ModelError(f"{node.op} has no running statistics")
        return super().shape(node, inputs, tensors)

    def constants(self, site: Site) -> np.ndarray:
        weight, bias, mean, variance = (
            None if tensor is None else tensor.values.astype(np.float64) for tensor in site.tensors
        )
        if mean is None or variance is None:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        channels = along(site.inputs[0].constants, 1, site.output.shape[1])
        scale = (1.0 if weight is None else weight) / np.sqrt(variance + float(site.node.attributes["eps"]))  # type: ignore[arg-type]
        offset = np.zeros_like(mean) if bias is None else bias
        result = np.where(scale == 0, offset, (channels - mean) * scale + offset)
        return self._channels(site, np.where(np.isfinite(scale), result, UNKNOWN))


class GroupNorm(_ChannelNorm):
    """Groups of channels by their common mean and variance; a group leaves as a whole."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        shape, groups = super().shape(node, inputs, tensors), node.attributes["groups"]
        if not isinstance(groups, int) or groups < 1 or shape[1] % groups:
            raise ModelError(f"group_norm: {shape[1]} channels can't form {groups} groups")
        return shape

    def couple(self, site: Site, atoms: Atoms) -> None:
        super().couple(site, atoms)
        groups = int(site.node.attributes["groups"])  # type: ignore[arg-type]
        couple_groups(site.inputs[0].coordinates[1], site.output.coordinates[1], groups, atoms)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        groups = int(site.node.attributes["groups"])  # type: ignore[arg-type]
        return {"groups": count(site.output.coordinates[1][:: site.output.shape[1] // groups])}


class LayerNorm(Rule):
    """The last dimensions by their common mean and variance: all of their coordinates stay."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), normalized = inputs, ints(node, "shape")
        if not normalized or shape[-len(normalized) :] != normalized:
            raise ModelError(f"{node.op} over {normalized} can't be applied to a value of shape {shape}")
        if any(each is not None and each != normalized for each in tensors):
            raise ModelError(f"{node.op}: tensors of shapes {tuple(tensors)} don't fit {normalized}")
        return shape

    def couple(self, site: Site, atoms: Atoms) -> None:
        before, after = site.inputs[0].coordinates, site.output.coordinates
        normalized = len(ints(site.node, "shape"))
        for one, other in zip(before, after, strict=True):
            atoms.join(one, other)
        atoms.pin(*after[-normalized:])
        for tensor in site.tensors:
            if tensor is not None:
                atoms.pin(*tensor.coordinates)

    def constants(self, site: Site) -> np.ndarray:
        """An element whose weight is zero is its bias."""
        weight, bias = site.tensors[0], site.tensors[1] if len(site.tensors) > 1 else None
        rank = len(site.output.shape)
        if weight is None:
            return np.full((1,) * rank, UNKNOWN)
        offset = 0.0 if bias is None else bias.values.astype(np.float64)
        constants = np.where(weight.values == 0, offset, UNKNOWN)
        return constants.reshape((1,) * (rank - constants.ndim) + constants.shape)
