"""Tensors that are values, or are looked up."""

from collections.abc import Sequence

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.graph.rules.base import UNKNOWN, Atoms, Rule, Shape, Site
from bayeszip.tensors import Node

__all__ = ["Embedding", "Stored"]


class Stored(Rule):
    """A tensor of the model as a value: constant all over."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if tensors[0] is None:
            raise ModelError(f"{node.op} has no tensor")
        return tensors[0]

    def couple(self, site: Site, atoms: Atoms) -> None:
        (tensor,) = site.tensors
        if tensor is not None:
            for one, other in zip(tensor.coordinates, site.output.coordinates, strict=True):
                atoms.join(one, other)

    def constants(self, site: Site) -> np.ndarray:
        (tensor,) = site.tensors
        return np.full((1,) * len(site.output.shape), UNKNOWN) if tensor is None else tensor.values.astype(np.float64)


class Embedding(Rule):
    """Rows of a table, by number; every row may be asked for."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        weight = tensors[0]
        if weight is None or len(weight) != 2:
            raise ModelError(f"embedding: a table must have two dimensions, not shape {weight}")
        return (*inputs[0], weight[1])

    def couple(self, site: Site, atoms: Atoms) -> None:
        for one, other in zip(site.inputs[0].coordinates, site.output.coordinates[:-1], strict=True):
            atoms.join(one, other)
        (weight,) = site.tensors
        if weight is not None:
            atoms.pin(weight.coordinates[0])
            atoms.join(weight.coordinates[1], site.output.coordinates[-1])

    def constants(self, site: Site) -> np.ndarray:
        """A feature that is the same in all rows."""
        (weight,) = site.tensors
        rank = len(site.output.shape)
        if weight is None or not len(weight.values):
            return np.full((1,) * rank, UNKNOWN)
        first = weight.values[0].astype(np.float64)
        same = np.where((weight.values == weight.values[:1]).all(axis=0), first, UNKNOWN)
        return same.reshape((1,) * (rank - 1) + (-1,))
