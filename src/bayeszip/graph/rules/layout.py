"""Operators that move elements without changing them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.graph.rules.base import UNKNOWN, Atoms, Rule, Shape, Site, Value, extent, ints, spread
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["Flatten", "Input", "Reshape", "couple_reshape", "reshape_constants"]

#: Larger activations than this are not expanded to follow their constants; they count as unknown.
_LARGEST_EXPANSION = 2**24


class Input(Rule):
    """A network input: its coordinates stay."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return (-1, *ints(node, "shape"))


class Flatten(Rule):
    """Some neighboring dimensions become one: a channel becomes a block of columns."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,) = inputs
        first, last = (
            _dimension(node, int(value) if isinstance(value, int) else 0, len(shape))
            for value in (node.attributes["start_dim"], node.attributes["end_dim"])
        )
        if first > last:
            raise ModelError(f"flatten: start_dim {first} lies behind end_dim {last}")
        return (*shape[:first], _product(shape[first : last + 1]), *shape[last + 1 :])

    def couple(self, site: Site, atoms: Atoms) -> None:
        couple_reshape(site.inputs[0], site.output, atoms)

    def constants(self, site: Site) -> np.ndarray:
        return reshape_constants(site.inputs[0], site.output.shape)


class Reshape(Rule):
    """The elements in the same order under another shape, the batch dimension kept."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return filled(node, inputs[0], (inputs[0][0], *ints(node, "shape")), free=slice(1, None))

    def couple(self, site: Site, atoms: Atoms) -> None:
        couple_reshape(site.inputs[0], site.output, atoms)

    def constants(self, site: Site) -> np.ndarray:
        return reshape_constants(site.inputs[0], site.output.shape)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        asked = ints(site.node, "shape")
        sizes = [count(coordinates) for coordinates in site.output.coordinates[1:]]
        return {"shape": tuple(-1 if old == -1 else new for old, new in zip(asked, sizes, strict=True))}


def filled(node: Node, shape: Shape, asked: Shape, free: slice) -> Shape:
    """The asked-for shape with its one −1, if there is one among `free`, worked out from the elements there are."""
    open_at = [dim for dim in range(*free.indices(len(asked))) if asked[dim] == -1]
    if len(open_at) > 1:
        raise ModelError(f"{node.op}: more than one dimension of {asked} is open")
    total, batches = abs(_product(shape)), sum(size < 0 for size in shape)
    others = [size for dim, size in enumerate(asked) if dim not in open_at]
    rest, rest_batches = abs(_product(tuple(others))), sum(size < 0 for size in others)
    result = list(asked)
    if open_at:
        if rest == 0 or total % rest or batches - rest_batches not in (0, 1):
            raise ModelError(f"{node.op}: {_elements(shape)} elements don't fit into shape {asked}")
        result[open_at[0]] = total // rest * (-1 if batches - rest_batches else 1)
    elif (total, batches) != (rest, rest_batches):
        raise ModelError(f"{node.op}: {_elements(shape)} elements don't fit into shape {asked}")
    return tuple(result)


def couple_reshape(source: Value, target: Value, atoms: Atoms) -> None:
    """Join coordinates across a change of shape.

    Where one dimension splits into several, or several merge into one, coordinates of only one of the several can go:
    a channel with its block of columns, a head with its features. The others, and any less simple case, are pinned.
    """
    for value in (source, target):
        atoms.pin(*(value.coordinates[dim] for dim, size in enumerate(value.shape) if size in (1, -1)))
    for before, after in _groups(source.shape, target.shape):
        old = [factor.dim for factor in before]
        new = [factor.dim for factor in after]
        if any(factor.is_batch for factor in (*before, *after)):
            atoms.pin(*(source.coordinates[dim] for dim in old), *(target.coordinates[dim] for dim in new))
        elif len(old) == 1 and len(new) == 1:
            atoms.join(source.coordinates[old[0]], target.coordinates[new[0]])
        elif len(old) == 1:
            _couple_blocks(source.coordinates[old[0]], target, new, atoms, packed=True)
        elif len(new) == 1:
            _couple_blocks(target.coordinates[new[0]], source, old, atoms, packed=False)
        else:
            atoms.pin(*(source.coordinates[dim] for dim in old), *(target.coordinates[dim] for dim in new))


def _couple_blocks(whole: np.ndarray, value: Value, parts: list[int], atoms: Atoms, *, packed: bool) -> None:
    """One dimension against its factors: one factor may lose coordinates, the others are pinned.

    The outermost may, save that a factor of 3 in front of heads is taken for packed queries, keys and values.
    """
    sizes = [extent(value.shape[dim]) for dim in parts]
    free = 1 if packed and len(parts) > 2 and sizes[0] == 3 else 0
    index = np.indices(sizes)[free].ravel()
    atoms.join(whole, value.coordinates[parts[free]][index])
    atoms.pin(*(value.coordinates[dim] for dim in parts if dim != parts[free]))


@dataclass(frozen=True)
class _Factor:
    """A part of a dimension (the batch, or the rest), and how many elements it and all before it hold."""

    dim: int
    is_batch: bool
    elements: tuple[int, int]  # a number, and a power of the batch size


def _factors(shape: Shape) -> Iterator[_Factor]:
    """The factors of a shape from the outside in, those of size one left out. In −k the batch is taken as outside."""
    product, batches = 1, 0
    for dim, size in enumerate(shape):
        if size < 0:
            batches += 1
            yield _Factor(dim, True, (product, batches))
        if extent(size) != 1:
            product *= extent(size)
            yield _Factor(dim, False, (product, batches))


def _groups(source: Shape, target: Shape) -> Iterator[tuple[list[_Factor], list[_Factor]]]:
    """The smallest runs of factors on both sides that hold the same elements."""
    sides = [list(_factors(source)), list(_factors(target))]
    common = {factor.elements for factor in sides[0]} & {factor.elements for factor in sides[1]}
    runs: list[list[list[_Factor]]] = [[[]], [[]]]
    for side, side_runs in zip(sides, runs, strict=True):
        for factor in side:
            side_runs[-1].append(factor)
            if factor.elements in common:
                side_runs.append([])
    yield from ((before, after) for before, after in zip(*runs, strict=True) if before or after)


def reshape_constants(source: Value, shape: Shape) -> np.ndarray:
    """The constants of a value under another shape."""
    if math.prod(extent(size) for size in source.shape) > _LARGEST_EXPANSION:
        return np.full((1,) * len(shape), UNKNOWN)
    constants = _uniform_over_batches(spread(source.constants, source.shape), source.shape)
    reshaped = constants.reshape([extent(size) for size in shape])
    return _uniform_over_batches(reshaped, shape)


def _uniform_over_batches(constants: np.ndarray, shape: Shape) -> np.ndarray:
    """Which part of a dimension of −k is the batch can't be told: there a constant must be the same all along."""
    for dim, size in enumerate(shape):
        if size < -1:
            first = np.take(constants, [0], axis=dim)
            same = (constants == first).all(axis=dim, keepdims=True)
            constants = np.broadcast_to(np.where(same, first, UNKNOWN), constants.shape)
    return constants


def _dimension(node: Node, dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise ModelError(f"{node.op}: there is no dimension {dim} among {rank}")
    return dim % rank


def _product(shape: Shape) -> int:
    """The size of several dimensions as one."""
    batches = sum(size < 0 for size in shape)
    if batches > 1:
        raise ModelError(f"dimensions {shape} hold the batch more than once")
    return math.prod(shape)


def _elements(shape: Shape) -> str:
    return "×".join("batch" if size == -1 else f"{-size}·batch" if size < 0 else str(size) for size in shape)
