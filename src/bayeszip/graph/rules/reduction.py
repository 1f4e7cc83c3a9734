"""Operators over whole dimensions: means, sums, softmax, products of matrices, attention."""

import math
from collections.abc import Sequence

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.graph.rules.base import UNKNOWN, Atoms, Rule, Shape, Site, Value, along, dimension, extent, ints, spread
from bayeszip.graph.rules.elementwise import Elementwise
from bayeszip.tensors import Node

__all__ = ["ArgMax", "Attention", "Matmul", "Reduction", "Softmax"]

#: Larger products than this aren't searched for zeros.
_LARGEST_PRODUCT = 2**24


class Softmax(Rule):
    """Every coordinate of the dimension counts; for sums up to each coordinate as well."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        dimension(node, "dim", len(inputs[0]))
        return inputs[0]

    def couple(self, site: Site, atoms: Atoms) -> None:
        for one, other in zip(site.inputs[0].coordinates, site.output.coordinates, strict=True):
            atoms.join(one, other)
        atoms.pin(site.output.coordinates[dimension(site.node, "dim", len(site.output.shape))])


class Reduction(Rule):
    """The mean, sum or maximum over some dimensions, none of which may be the batch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), dims = inputs, self._dims(node, len(inputs[0]))
        if any(shape[dim] < 0 for dim in dims):
            raise ModelError(f"{node.op} over the batch: samples would depend on each other")
        if node.attributes["keepdim"]:
            return tuple(1 if dim in dims else size for dim, size in enumerate(shape))
        return tuple(size for dim, size in enumerate(shape) if dim not in dims)

    def couple(self, site: Site, atoms: Atoms) -> None:
        dims, source = self._dims(site.node, len(site.inputs[0].shape)), site.inputs[0]
        kept = [dim for dim in range(len(source.shape)) if dim not in dims]
        atoms.pin(*(source.coordinates[dim] for dim in dims))
        targets = kept if site.node.attributes["keepdim"] else range(len(kept))
        for dim, target in zip(kept, targets, strict=True):
            atoms.join(source.coordinates[dim], site.output.coordinates[target])
        atoms.pin(*(each for each, size in zip(site.output.coordinates, site.output.shape, strict=True) if size == 1))

    def constants(self, site: Site) -> np.ndarray:
        source = site.inputs[0]
        dims = self._dims(site.node, len(source.shape))
        count = math.prod(source.shape[dim] for dim in dims)
        keepdim = bool(site.node.attributes["keepdim"])
        if not count:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        if self._name == "amax":
            return np.asarray(source.constants.max(axis=dims, keepdims=keepdim))
        mean = np.asarray(source.constants.mean(axis=dims, keepdims=keepdim))
        return mean * count if self._name == "sum" else mean

    def _dims(self, node: Node, rank: int) -> tuple[int, ...]:
        dims = ints(node, "dims")
        if not dims or not all(-rank <= dim < rank for dim in dims):
            raise ModelError(f"{node.op}: there are no dimensions {dims} among {rank}")
        return tuple(dim % rank for dim in dims)


class ArgMax(Reduction):
    """Where the maximum over one dimension lies."""

    def __init__(self) -> None:
        super().__init__("argmax")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if len(ints(node, "dims")) != 1:
            raise ModelError(f"argmax is over one dimension, not {ints(node, 'dims')}")
        return super().shape(node, inputs, tensors)

    def constants(self, site: Site) -> np.ndarray:
        return np.full((1,) * len(site.output.shape), UNKNOWN)


class Matmul(Rule):
    """The product of matrices in the last two dimensions; those before meet element by element."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        first, second = inputs
        if len(first) < 2 or len(second) < 2 or first[-1] != second[-2]:
            raise ModelError(f"matmul: values of shapes {first} and {second} can't be multiplied")
        outer = Elementwise().shape(node, [first[:-2], second[:-2]], ()) if len(first) + len(second) > 4 else ()
        return (*outer, first[-2], second[-1])

    def couple(self, site: Site, atoms: Atoms) -> None:
        first, second = site.inputs
        for value in site.inputs:
            _couple_outer(value, site.output, atoms)
        atoms.join(first.coordinates[-2], site.output.coordinates[-2])
        atoms.join(second.coordinates[-1], site.output.coordinates[-1])
        atoms.join(first.coordinates[-1], second.coordinates[-2])

    def constants(self, site: Site) -> np.ndarray:
        """Zero where in every term one of the factors is zero."""
        first, second = site.inputs
        if max(_elements(first), _elements(second), _elements(site.output)) > _LARGEST_PRODUCT:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        terms = (spread(first.constants, first.shape) != 0).astype(np.float32) @ (
            spread(second.constants, second.shape) != 0
        ).astype(np.float32)
        return np.where(terms == 0, 0.0, UNKNOWN)

    def needs(self, site: Site, live: np.ndarray) -> None:
        first, second = site.inputs
        if not all(live[each].any() for each in site.output.coordinates):
            return
        inner = first.coordinates[-1]
        absent = along(first.constants, -1, len(inner)) == 0
        absent |= along(second.constants, -2, len(inner)) == 0
        live[inner[~absent]] = True


class Attention(Rule):
    """Scaled dot-product attention: queries, keys, values, and perhaps a mask."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if len(inputs) not in (3, 4) or min(map(len, inputs[:3])) < 3:
            raise ModelError(f"attention takes queries, keys, values and perhaps a mask, not shapes {tuple(inputs)}")
        queries, keys, values = inputs[:3]
        outer = [shape[:-2] for shape in (queries, keys, values)]
        if queries[-1] != keys[-1] or keys[-2] != values[-2] or len(set(outer)) > 1:
            raise ModelError(f"attention: shapes {queries}, {keys} and {values} don't fit together")
        return (*queries[:-1], values[-1])

    def couple(self, site: Site, atoms: Atoms) -> None:
        queries, keys, values = site.inputs[:3]
        for value in (queries, keys, values):
            _couple_outer(value, site.output, atoms)
        atoms.join(queries.coordinates[-2], site.output.coordinates[-2])
        atoms.join(values.coordinates[-1], site.output.coordinates[-1])
        # The number of features sets the scale, and every key counts in the softmax.
        atoms.pin(queries.coordinates[-1], keys.coordinates[-1], keys.coordinates[-2], values.coordinates[-2])
        if site.node.attributes["causal"]:
            atoms.pin(queries.coordinates[-2])  # which keys a query sees depends on its place
        if len(site.inputs) > 3:
            self._couple_mask(site.inputs[3], site.output, keys, atoms)

    def _couple_mask(self, mask: Value, output: Value, keys: Value, atoms: Atoms) -> None:
        atoms.pin(*mask.coordinates[-2:], output.coordinates[-2], keys.coordinates[-2])
        _couple_outer(mask, output, atoms)

    def constants(self, site: Site) -> np.ndarray:
        """A mean of constants is the constant; where a mask may leave nothing to average, only zero is safe."""
        values = site.inputs[2].constants
        first = np.take(values, [0], axis=-2)
        same = np.where((values == first).all(axis=-2, keepdims=True), first, UNKNOWN)
        return np.where(same == 0, 0.0, UNKNOWN) if len(site.inputs) > 3 else same


def _couple_outer(value: Value, output: Value, atoms: Atoms) -> None:
    """Join all but the last two dimensions, as far as they aren't repeated."""
    skipped = len(output.shape) - len(value.shape)
    for dim in range(len(value.shape) - 2):
        if value.shape[dim] == output.shape[dim + skipped]:
            atoms.join(value.coordinates[dim], output.coordinates[dim + skipped])
        else:
            atoms.pin(value.coordinates[dim])


def _elements(value: Value) -> int:
    return math.prod(extent(size) for size in value.shape)
