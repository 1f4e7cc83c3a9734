"""Operators that move elements without changing them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from bayeszip.errors import InputError, ModelError
from bayeszip.graph.families.base import (
    UNKNOWN,
    Atoms,
    Attributes,
    Held,
    Rule,
    Shape,
    Site,
    Value,
    Values,
    dimension,
    extent,
    ints,
    spread,
)
from bayeszip.graph.families.elementwise import cast
from bayeszip.graph.lowering import Call, Lower, Lowered, Lowering, listed, rank_of, shape_of
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS"]

#: Larger activations than this are not expanded to follow their constants; they count as unknown.
_LARGEST_EXPANSION = 2**24


class Input(Rule):
    """A network input: its coordinates stay."""

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        if min(ints(node, "shape"), default=1) < 1:
            raise ModelError(f"an input can't have the shape {ints(node, 'shape')}")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return (-1, *ints(node, "shape"))

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        if tuple(x[0].shape[1:]) != a["shape"]:
            raise InputError(f"the network takes inputs of shape (batch, *{a['shape']}), not {tuple(x[0].shape)}")
        return cast(x[0], tensors, a["dtype"]) if tensors else x[0]


class Flatten(Rule):
    """Some neighboring dimensions become one: a channel becomes a block of columns."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,) = inputs
        first, last = (dimension(node, name, len(shape)) for name in ("start_dim", "end_dim"))
        if first > last:
            raise ModelError(f"flatten: start_dim {first} lies behind end_dim {last}")
        return (*shape[:first], _product(shape[first : last + 1]), *shape[last + 1 :])

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return torch.cat(list(x), a["dim"])

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        one = self.compute([torch.ones((1,) * each.ndim, dtype=each.dtype) for each in x], tensors, a)
        sizes = list(x[0].shape)
        sizes[a["dim"]] = sum(each.shape[a["dim"]] for each in x)
        return torch.empty(sizes, dtype=one.dtype, device="meta")

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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
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


class _Picking(Rule):
    """What picks along a dimension of its first input by the numbers in its second."""

    def constants(self, site: Site) -> np.ndarray:
        """What is constant all along the dimension."""
        dim = dimension(site.node, "dim", len(site.output.shape))
        constants = site.inputs[0].constants
        first = constants.take([0], axis=dim)
        return np.where((constants == first).all(axis=dim, keepdims=True), first, UNKNOWN)


class Take(_Picking):
    """Coordinates of a dimension by their numbers; as these are given, all of the dimension stays."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape, places), dim = inputs, dimension(node, "dim", len(inputs[0]))
        if len(places) != 1 or places[0] < 0 or shape[dim] < 1:
            raise ModelError(f"take: numbers of shape {places} can't pick from dimension {dim} of shape {shape}")
        return (*shape[:dim], places[0], *shape[dim + 1 :])

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return x[0].index_select(a["dim"], x[1])

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        if x[1].dtype not in (torch.int64, torch.int32):
            raise ModelError(f"take picks by whole numbers, not by {x[1].dtype}")
        return self.compute(x, tensors, a)

    def couple(self, site: Site, atoms: Atoms) -> None:
        source, dim = site.inputs[0], dimension(site.node, "dim", len(site.output.shape))
        atoms.pin(source.coordinates[dim], site.output.coordinates[dim], *site.inputs[1].coordinates)
        for position, (one, other) in enumerate(zip(source.coordinates, site.output.coordinates, strict=True)):
            if position != dim:
                atoms.join(one, other)


class Gather(_Picking):
    """An element of one dimension for each of many numbers; as these are given, all of the dimension stays."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape, places), dim = inputs, dimension(node, "dim", len(inputs[0]))
        if len(places) != len(shape) or min(places[dim], shape[dim]) < 1:
            raise ModelError(f"gather: numbers of shape {places} can't pick from dimension {dim} of shape {shape}")
        if any(one != other for at, (one, other) in enumerate(zip(shape, places, strict=True)) if at != dim):
            raise ModelError(f"gather: numbers of shape {places} don't fit a value of shape {shape} beside {dim}")
        return places

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return x[0].gather(a["dim"], x[1])

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        if x[1].dtype != torch.int64:
            raise ModelError(f"gather picks by whole numbers in int64, not by {x[1].dtype}")
        return self.compute(x, tensors, a)

    def couple(self, site: Site, atoms: Atoms) -> None:
        source, places, output = *site.inputs, site.output
        dim = dimension(site.node, "dim", len(output.shape))
        atoms.pin(source.coordinates[dim], places.coordinates[dim], output.coordinates[dim])
        for at in range(len(output.shape)):
            if at != dim:
                atoms.join(source.coordinates[at], output.coordinates[at])
                atoms.join(places.coordinates[at], output.coordinates[at])


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

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return F.pad(x[0], a["amounts"], a["mode"], a["value"] if a["mode"] == "constant" else None)

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        """With a few real elements too: not every type has all modes, or can hold the value."""
        space = max(1, x[0].ndim - 2)
        few = torch.ones((1, 1) + (2,) * space, dtype=x[0].dtype)
        if a["mode"] == "constant" or not few.is_floating_point():
            self.compute([few], (), {**a, "amounts": (1, 1) * space})
        return self.compute(x, tensors, a)

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
    "gather": Gather(),
    "pad": Pad(),
}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_pad(mode: str | None = None) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        amounts = call["pad"] if "pad" in call else call["padding"]
        if not all(isinstance(each, int) for each in amounts):
            raise call.unsupported("by an amount that varies")
        value = (call.get("value", None)) or 0.0
        return lowering.emit(
            "pad", [lowering.value(call.source)], amounts=tuple(amounts), mode=mode or call["mode"], value=float(value)
        )

    return lower


def _lower_flatten(lowering: Lowering, call: Call) -> int:
    dims = rank_of(call.source)
    if not dims:
        return _lower_reshape(lowering, call)
    start, end = call["start_dim"] % dims, call["end_dim"] % dims
    if start == end:
        return lowering.value(call.source)
    return lowering.emit(
        "flatten", [lowering.value(call.source)], start_dim=start, end_dim=-1 if end == dims - 1 else end
    )


def _lower_reshape(lowering: Lowering, call: Call) -> int:
    """Another shape, said by the shapes before and after, not by how it was asked for."""
    before, after = shape_of(call.source), call.shape
    value = lowering.value(call.source)
    if before == after:
        return value
    if before[:1] == after[:1] == (-1,) and all(size > 0 for size in (*before[1:], *after[1:])):
        if len(after) == 2 and len(before) > 1:
            return lowering.emit("flatten", [value])
        return lowering.emit("reshape", [value], shape=after[1:])
    return lowering.emit("view", [value], shape=after)


def _lower_expand(lowering: Lowering, call: Call) -> int:
    value = lowering.value(call.source)
    if shape_of(call.source) == call.shape:
        return value
    return lowering.emit("expand", [value, lowering.reference()], shape=call.shape)


def _lower_filled(number: float | None) -> Lower:
    """A tensor of one number whose size depends on the batch: a constant for one sample, repeated."""

    def lower(lowering: Lowering, call: Call) -> int:
        value = number if number is not None else float(call["fill_value"])
        sizes = [1 if size < 0 or lowering.spelled else size for size in call.shape]
        sample = torch.full(sizes, value, dtype=call.node.meta["val"].dtype)
        constant = lowering.constant(sample, call.node)
        if not call.shape:
            return constant
        return lowering.emit("expand", [constant, lowering.reference()], shape=call.shape)

    return lower


def _lower_permute(lowering: Lowering, call: Call) -> int:
    rank = rank_of(call.source)
    order = list(range(rank))
    if call.name == "permute":
        order = [dim % rank for dim in call["dims"]]
    elif call.name in ("movedim", "moveaxis"):
        order = _lower_moved(order, listed(call["source"]), listed(call["destination"]))
    elif call.name in ("t", "mT", "numpy_T"):
        order = order[::-1] if call.name != "mT" else [*order[:-2], *order[:-3:-1]]
    else:
        names = ("dim0", "dim1") if "dim0" in call else ("axis0", "axis1")
        one, other = (call[name] % rank for name in names)
        order[one], order[other] = order[other], order[one]
    if order == list(range(rank)):
        return lowering.value(call.source)
    return lowering.emit("permute", [lowering.value(call.source)], dims=tuple(order))


def _lower_moved(order: list[int], sources: list[int], targets: list[int]) -> list[int]:
    rank = len(order)
    placed = {target % rank: source % rank for source, target in zip(sources, targets, strict=True)}
    rest = iter(dim for dim in order if dim not in placed.values())
    return [placed[position] if position in placed else next(rest) for position in range(rank)]


def _lower_concat(lowering: Lowering, call: Call) -> int:
    values = [lowering.value(each) for each in call["tensors"]]
    dim = call["dim"] % len(call.shape)
    if call.shape[dim] < 0:
        raise call.unsupported("along the batch")
    return values[0] if len(values) == 1 else lowering.emit("concat", values, dim=dim)


def _lower_stack(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % len(call.shape)
    one = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    values = [lowering.emit("view", [lowering.value(each)], shape=one) for each in call["tensors"]]
    return values[0] if len(values) == 1 else lowering.emit("concat", values, dim=dim)


def _lower_slice(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    size, value = shape_of(call.source)[dim], lowering.value(call.source)
    if call.shape[dim] == size:
        return value
    if size < 0:
        raise call.unsupported("along the batch")
    start, end, step = slice(call["start"], call["end"], call["step"]).indices(size)
    return lowering.sliced(value, dim, start, end) if step == 1 else _lower_every(lowering, call, dim, start, step)


def _lower_every(lowering: Lowering, call: Call, dim: int, start: int, step: int) -> int:
    """Every so many-th coordinate of a dimension: the first of each block of `step`."""
    value, shape, count = lowering.value(call.source), shape_of(call.source), call.shape[dim]
    end, size = start + count * step, shape[dim]
    if end > size:
        behind = (0, 0) * (len(shape) - 1 - dim)
        value = lowering.emit("pad", [value], amounts=(*behind, 0, end - size))
    if start or end < size:
        value = lowering.sliced(value, dim, start, end)
    blocks = lowering.emit("view", [value], shape=(*shape[:dim], count, step, *shape[dim + 1 :]))
    return lowering.emit("select", [blocks], dim=dim + 1, index=0)


def _lower_narrow(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    if shape_of(call.source)[dim] < 0 or not isinstance(call["start"], int):
        raise call.unsupported("along the batch, or from where a value says")
    start = call["start"] % max(shape_of(call.source)[dim], 1)
    return lowering.sliced(lowering.value(call.source), dim, start, start + call["length"])


def _lower_select(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    size = shape_of(call.source)[dim]
    if size < 0:
        raise call.unsupported("along the batch")
    return lowering.emit("select", [lowering.value(call.source)], dim=dim, index=call["index"] % size)


def _lower_split(lowering: Lowering, call: Call) -> Lowered:
    dim = call["dim"] % rank_of(call.source)
    value, start, parts = lowering.value(call.source), 0, []
    if shape_of(call.source)[dim] < 0:
        raise call.unsupported("along the batch")
    for part in call.node.meta["val"]:
        size = int(part.shape[dim])
        parts.append(lowering.sliced(value, dim, start, start + size))
        start += size
    return tuple(parts)


def _lower_unbind(lowering: Lowering, call: Call) -> Lowered:
    dim = call["dim"] % rank_of(call.source)
    size, value = shape_of(call.source)[dim], lowering.value(call.source)
    if size < 0:
        raise call.unsupported("along the batch")
    return tuple(lowering.emit("select", [value], dim=dim, index=index) for index in range(size))


ATEN: dict[str, Lower] = {
    "pad": _lower_pad(),
    "constant_pad_nd": _lower_pad("constant"),
    **{f"reflection_pad{dims}d": _lower_pad("reflect") for dims in (1, 2, 3)},
    **{f"replication_pad{dims}d": _lower_pad("replicate") for dims in (1, 2, 3)},
    "flatten": _lower_flatten,
    **dict.fromkeys(
        ("view", "reshape", "unflatten", "_unsafe_view", "squeeze", "unsqueeze", "view_as", "reshape_as"),
        _lower_reshape,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _lower_expand),
    **dict.fromkeys(("new_zeros", "zeros_like", "zeros"), _lower_filled(0.0)),
    **dict.fromkeys(("new_ones", "ones_like", "ones"), _lower_filled(1.0)),
    **dict.fromkeys(("new_full", "full_like", "full"), _lower_filled(None)),
    **dict.fromkeys(
        ("permute", "transpose", "t", "mT", "numpy_T", "swapaxes", "swapdims", "movedim", "moveaxis"), _lower_permute
    ),
    **dict.fromkeys(("cat", "concat", "concatenate"), _lower_concat),
    "stack": _lower_stack,
    "slice": _lower_slice,
    "narrow": _lower_narrow,
    "select": _lower_select,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split"), _lower_split
    ),
    "unbind": _lower_unbind,
}
