"""Operators that move elements without changing them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bayeszip.errors import ModelError
from bayeszip.graph.families.base import UNKNOWN, Atoms, Rule, Shape, Site, Value, dimension, extent, ints, spread
from bayeszip.graph.families.elementwise import cast
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["OPERATORS"]

#: Larger activations than this are not expanded to follow their constants; they count as unknown.
_LARGEST_EXPANSION = 2**24


class Input(Rule):
    """A network input: its coordinates stay."""

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        if min(ints(node, "shape"), default=1) < 1:
            raise ModelError(f"an input can't have the shape {ints(node, 'shape')}")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return (-1, *ints(node, "shape"))

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        if tuple(x[0].shape[1:]) != a["shape"]:
            raise ValueError(f"the network takes inputs of shape (batch, *{a['shape']}), not {tuple(x[0].shape)}")
        return cast(x[0], tensors, a["dtype"]) if tensors else x[0]


class Flatten(Rule):
    """Some neighboring dimensions become one: a channel becomes a block of columns."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,) = inputs
        first, last = (dimension(node, name, len(shape)) for name in ("start_dim", "end_dim"))
        if first > last:
            raise ModelError(f"flatten: start_dim {first} lies behind end_dim {last}")
        return (*shape[:first], _product(shape[first : last + 1]), *shape[last + 1 :])

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return torch.flatten(x[0], a["start_dim"], a["end_dim"])

    def couple(self, site: Site, atoms: Atoms) -> None:
        couple_reshape(site.inputs[0], site.output, atoms)

    def constants(self, site: Site) -> np.ndarray:
        return reshape_constants(site.inputs[0], site.output.shape)


class Reshape(Rule):
    """The elements in the same order under another shape, the batch dimension kept."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if not inputs[0]:
            raise ModelError("reshape keeps the first dimension, but there is none")
        return _filled(node, inputs[0], (inputs[0][0], *ints(node, "shape")), free=slice(1, None))

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return x[0].reshape(x[0].shape[0], *a["shape"])

    def couple(self, site: Site, atoms: Atoms) -> None:
        couple_reshape(site.inputs[0], site.output, atoms)

    def constants(self, site: Site) -> np.ndarray:
        return reshape_constants(site.inputs[0], site.output.shape)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        asked = ints(site.node, "shape")
        sizes = [count(coordinates) for coordinates in site.output.coordinates[1:]]
        return {"shape": tuple(-1 if old == -1 else new for old, new in zip(asked, sizes, strict=True))}


class View(Rule):
    """The elements in the same order under another shape, wherever the batch dimension comes to lie."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), asked = inputs, ints(node, "shape")
        if _product(shape) != _product(asked):
            raise ModelError(f"view: {_elements(shape)} elements don't fit into shape {asked}")
        return asked

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return x[0].reshape([-1 if size < 0 else size for size in a["shape"]])

    def couple(self, site: Site, atoms: Atoms) -> None:
        couple_reshape(site.inputs[0], site.output, atoms)

    def constants(self, site: Site) -> np.ndarray:
        return reshape_constants(site.inputs[0], site.output.shape)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        return {"shape": _counted(site.output, count)}


class Expand(Rule):
    """Dimensions of one element repeated; the second input tells the batch size."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        shape, asked = inputs[0], ints(node, "shape")
        aligned = (1,) * (len(asked) - len(shape)) + shape
        if len(aligned) != len(asked) or any(one not in (1, other) for one, other in zip(aligned, asked, strict=True)):
            raise ModelError(f"expand: a value of shape {shape} can't be brought to {asked}")
        if not inputs[1] or (min(asked) < 0 and inputs[1][0] != -1):
            raise ModelError(f"expand: a value of shape {inputs[1]} doesn't tell the batch size")
        return asked

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        batch = x[1].shape[0]
        return x[0].expand([-size * batch if size < 0 else size for size in a["shape"]])

    def couple(self, site: Site, atoms: Atoms) -> None:
        source, skipped = site.inputs[0], len(site.output.shape) - len(site.inputs[0].shape)
        for dim, coordinates in enumerate(site.output.coordinates):
            if dim >= skipped and source.shape[dim - skipped] == site.output.shape[dim]:
                atoms.join(source.coordinates[dim - skipped], coordinates)
            else:
                atoms.pin(
                    coordinates, *(source.coordinates[dim - skipped : dim - skipped + 1] if dim >= skipped else ())
                )

    def constants(self, site: Site) -> np.ndarray:
        constants = site.inputs[0].constants
        return constants.reshape((1,) * (len(site.output.shape) - constants.ndim) + constants.shape)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        return {"shape": _counted(site.output, count)}


class Permute(Rule):
    """The dimensions in another order."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), dims = inputs, ints(node, "dims")
        if sorted(dims) != list(range(len(shape))):
            raise ModelError(f"permute: {dims} is not an order of {len(shape)} dimensions")
        return tuple(shape[dim] for dim in dims)

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return x[0].permute(a["dims"])

    def couple(self, site: Site, atoms: Atoms) -> None:
        for target, dim in enumerate(ints(site.node, "dims")):
            atoms.join(site.inputs[0].coordinates[dim], site.output.coordinates[target])

    def constants(self, site: Site) -> np.ndarray:
        return site.inputs[0].constants.transpose(ints(site.node, "dims"))


class Concat(Rule):
    """Values one after the other along a dimension."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        dim = dimension(node, "dim", len(inputs[0]))
        rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in inputs}
        sizes = [shape[dim] for shape in inputs if len(shape) > dim]
        if len(rests) != 1 or len(sizes) != len(inputs) or min(sizes) < 0:
            raise ModelError(f"concat: shapes {', '.join(map(str, inputs))} don't fit along dimension {dim}")
        return (*inputs[0][:dim], sum(sizes), *inputs[0][dim + 1 :])

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return torch.cat(list(x), a["dim"])

    def couple(self, site: Site, atoms: Atoms) -> None:
        along_dim = dimension(site.node, "dim", len(site.output.shape))
        start = 0
        for value in site.inputs:
            for dim, coordinates in enumerate(value.coordinates):
                target = site.output.coordinates[dim]
                atoms.join(coordinates, target[start : start + len(coordinates)] if dim == along_dim else target)
            start += value.shape[along_dim]

    def constants(self, site: Site) -> np.ndarray:
        along_dim = dimension(site.node, "dim", len(site.output.shape))
        common = np.broadcast_shapes(*(_without(value.constants.shape, along_dim) for value in site.inputs))
        if math.prod(common) * site.output.shape[along_dim] > _LARGEST_EXPANSION:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        parts = [
            np.broadcast_to(value.constants, (*common[:along_dim], value.shape[along_dim], *common[along_dim + 1 :]))
            for value in site.inputs
        ]
        return np.concatenate(parts, axis=along_dim)


class Slice(Rule):
    """A stretch of a dimension, from `start` up to `end`; what lies outside isn't read here."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), dim = inputs, dimension(node, "dim", len(inputs[0]))
        start, end = self._bounds(node)
        if not 0 <= start < end <= shape[dim]:
            raise ModelError(f"slice: {start} to {end} is not a stretch of dimension {dim} of shape {shape}")
        return (*shape[:dim], end - start, *shape[dim + 1 :])

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return x[0].narrow(a["dim"], a["start"], a["end"] - a["start"])

    def couple(self, site: Site, atoms: Atoms) -> None:
        (start, end), dim = self._bounds(site.node), dimension(site.node, "dim", len(site.output.shape))
        for position, (one, other) in enumerate(zip(site.inputs[0].coordinates, site.output.coordinates, strict=True)):
            atoms.join(one[start:end] if position == dim else one, other)

    def constants(self, site: Site) -> np.ndarray:
        (start, end), dim = self._bounds(site.node), dimension(site.node, "dim", len(site.output.shape))
        constants = site.inputs[0].constants
        return constants if constants.shape[dim] == 1 else constants.take(np.arange(start, end), axis=dim)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        (start, end), dim = self._bounds(site.node), dimension(site.node, "dim", len(site.output.shape))
        coordinates = site.inputs[0].coordinates[dim]
        return {"start": count(coordinates[:start]), "end": count(coordinates[:end])}

    def _bounds(self, node: Node) -> tuple[int, int]:
        start, end = node.attributes["start"], node.attributes["end"]
        if not isinstance(start, int) or not isinstance(end, int):
            raise ModelError(f"slice: {start!r} to {end!r} is not a stretch")
        return start, end


class Select(Rule):
    """One coordinate of a dimension, which disappears."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), dim = inputs, dimension(node, "dim", len(inputs[0]))
        if not 0 <= self._index(node) < shape[dim]:
            raise ModelError(f"select: there is no index {self._index(node)} in dimension {dim} of shape {shape}")
        return _without(shape, dim, keep=False)

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return x[0].select(a["dim"], a["index"])

    def couple(self, site: Site, atoms: Atoms) -> None:
        dim = dimension(site.node, "dim", len(site.inputs[0].shape))
        atoms.pin(site.inputs[0].coordinates[dim][self._index(site.node)])
        rest = (*site.inputs[0].coordinates[:dim], *site.inputs[0].coordinates[dim + 1 :])
        for one, other in zip(rest, site.output.coordinates, strict=True):
            atoms.join(one, other)

    def constants(self, site: Site) -> np.ndarray:
        dim = dimension(site.node, "dim", len(site.inputs[0].shape))
        constants = site.inputs[0].constants
        return constants.take(0 if constants.shape[dim] == 1 else self._index(site.node), axis=dim)

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        dim = dimension(site.node, "dim", len(site.inputs[0].shape))
        return {"index": count(site.inputs[0].coordinates[dim][: self._index(site.node)])}

    def _index(self, node: Node) -> int:
        index = node.attributes["index"]
        if not isinstance(index, int):
            raise ModelError(f"select: {index!r} is not an index")
        return index


class Take(Rule):
    """Coordinates of a dimension by their numbers; as these are given, all of the dimension stays."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape, places), dim = inputs, dimension(node, "dim", len(inputs[0]))
        if len(places) != 1 or places[0] < 0 or shape[dim] < 1:
            raise ModelError(f"take: numbers of shape {places} can't pick from dimension {dim} of shape {shape}")
        return (*shape[:dim], places[0], *shape[dim + 1 :])

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return x[0].index_select(a["dim"], x[1])

    def rehearse(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        if x[1].dtype not in (torch.int64, torch.int32):
            raise ModelError(f"take picks by whole numbers, not by {x[1].dtype}")
        return self.compute(x, tensors, a)

    def couple(self, site: Site, atoms: Atoms) -> None:
        source, dim = site.inputs[0], dimension(site.node, "dim", len(site.output.shape))
        atoms.pin(source.coordinates[dim], site.output.coordinates[dim], *site.inputs[1].coordinates)
        for position, (one, other) in enumerate(zip(source.coordinates, site.output.coordinates, strict=True)):
            if position != dim:
                atoms.join(one, other)

    def constants(self, site: Site) -> np.ndarray:
        """What is constant all along the dimension."""
        dim = dimension(site.node, "dim", len(site.output.shape))
        constants = site.inputs[0].constants
        first = constants.take([0], axis=dim)
        return np.where((constants == first).all(axis=dim, keepdims=True), first, UNKNOWN)


class Pad(Rule):
    """More elements at the ends of the last dimensions; those dimensions stay as they are."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), amounts, mode = inputs, ints(node, "amounts"), node.attributes["mode"]
        if len(amounts) % 2 or len(amounts) > 2 * len(shape):
            raise ModelError(f"pad: {amounts} doesn't fit a value of shape {shape}")
        if mode != "constant" and (len(amounts) // 2 + 2 != len(shape) or len(shape) not in (3, 4, 5)):
            raise ModelError(f"pad: {mode} needs amounts for all of {shape} but the first two, not {amounts}")
        most = {"reflect": lambda size: size - 1, "circular": lambda size: size}.get(str(mode))
        result = list(shape)
        for dim, before, after in self._padded(node, len(shape)):
            if shape[dim] < 0 or shape[dim] + before + after < 1:
                raise ModelError(f"pad: dimension {dim} of shape {shape} can't be padded by {before} and {after}")
            if (most and max(before, after) > most(shape[dim])) or min(before, after) < -shape[dim]:
                raise ModelError(f"pad: dimension {dim} of shape {shape} can't give {before} and {after} ({mode})")
            result[dim] += before + after
        return tuple(result)

    def compute(
        self, x: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], a: Mapping[str, Any]
    ) -> torch.Tensor:
        return F.pad(x[0], a["amounts"], a["mode"], a["value"] if a["mode"] == "constant" else None)

    def couple(self, site: Site, atoms: Atoms) -> None:
        padded = {dim for dim, _, _ in self._padded(site.node, len(site.output.shape))}
        for dim, (one, other) in enumerate(zip(site.inputs[0].coordinates, site.output.coordinates, strict=True)):
            if dim in padded:
                atoms.pin(one, other)
            else:
                atoms.join(one, other)

    def constants(self, site: Site) -> np.ndarray:
        constants = site.inputs[0].constants
        for dim, _, _ in self._padded(site.node, constants.ndim):
            first = constants.take([0], axis=dim)
            constants = np.where((constants == first).all(axis=dim, keepdims=True), first, UNKNOWN)
        if site.node.attributes["mode"] == "constant":
            constants = np.where(constants == site.node.attributes["value"], constants, UNKNOWN)
        return constants

    def _padded(self, node: Node, rank: int) -> Iterator[tuple[int, int, int]]:
        amounts = ints(node, "amounts")
        for position in range(len(amounts) // 2):
            before, after = amounts[2 * position : 2 * position + 2]
            if before or after:
                yield rank - 1 - position, before, after


def _counted(value: Value, count: Callable[[np.ndarray], int]) -> Shape:
    """A value's shape when only its live coordinates remain."""
    return tuple(
        count(coordinates) * (-1 if size < 0 else 1)
        for size, coordinates in zip(value.shape, value.coordinates, strict=True)
    )


def _without(shape: Shape, dim: int, *, keep: bool = True) -> Shape:
    """The shape with one dimension of size one, or without it."""
    return (*shape[:dim], *((1,) if keep else ()), *shape[dim + 1 :])


def _filled(node: Node, shape: Shape, asked: Shape, free: slice) -> Shape:
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
        if _is_batch_alone(before, after):
            continue
        if _has_batch(before) or _has_batch(after):
            atoms.pin(*(source.coordinates[dim] for dim in old), *(target.coordinates[dim] for dim in new))
        elif len(old) == 1 and len(new) == 1:
            atoms.join(source.coordinates[old[0]], target.coordinates[new[0]])
        elif len(old) == 1:
            _couple_blocks(source.coordinates[old[0]], target, new, atoms, packed=atoms.packed)
        elif len(new) == 1:
            _couple_blocks(target.coordinates[new[0]], source, old, atoms, packed=False)
        else:
            atoms.pin(*(source.coordinates[dim] for dim in old), *(target.coordinates[dim] for dim in new))


def _couple_blocks(whole: np.ndarray, value: Value, parts: list[int], atoms: Atoms, *, packed: bool) -> None:
    """One dimension against its factors: one factor may lose coordinates, the others are pinned.

    The outermost may, or the one behind three packed parts.
    """
    sizes = [extent(value.shape[dim]) for dim in parts]
    free = 1 if packed and sizes[0] == 3 else 0
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
    constants = spread(source.constants, source.shape)
    if all(_is_batch_alone(before, after) for before, after in _groups(source.shape, shape) if _has_batch(before)):
        return constants.reshape([extent(size) for size in shape])
    reshaped = _uniform_over_batches(constants, source.shape).reshape([extent(size) for size in shape])
    return _uniform_over_batches(reshaped, shape)


def _has_batch(factors: list[_Factor]) -> bool:
    return any(factor.is_batch for factor in factors)


def _is_batch_alone(before: list[_Factor], after: list[_Factor]) -> bool:
    """Whether the batch comes out as it went in. Of a dimension of −k the k coordinates are another factor."""
    return [factor.is_batch for factor in before] == [factor.is_batch for factor in after] == [True]


def _uniform_over_batches(constants: np.ndarray, shape: Shape) -> np.ndarray:
    """Which part of a dimension of −k is the batch can't be told: there a constant must be the same all along."""
    for dim, size in enumerate(shape):
        if size < -1:
            first = np.take(constants, [0], axis=dim)
            same = (constants == first).all(axis=dim, keepdims=True)
            constants = np.broadcast_to(np.where(same, first, UNKNOWN), constants.shape)
    return constants


def _product(shape: Shape) -> int:
    """The size of several dimensions as one."""
    batches = sum(size < 0 for size in shape)
    if batches > 1:
        raise ModelError(f"dimensions {shape} hold the batch more than once")
    return math.prod(shape)


def _elements(shape: Shape) -> str:
    return "×".join("batch" if size == -1 else f"{-size}·batch" if size < 0 else str(size) for size in shape)


OPERATORS: dict[str, Rule] = {
    "input": Input(),
    "flatten": Flatten(),
    "reshape": Reshape(),
    "view": View(),
    "expand": Expand(),
    "permute": Permute(),
    "concat": Concat(),
    "slice": Slice(),
    "select": Select(),
    "take": Take(),
    "pad": Pad(),
}
