"""What is said about an operator, and in which words: shapes with a free batch size, coordinates, atoms, constants.

A value of shape (batch, 20, 12, 12) has 20 + 12 + 12 *coordinates* besides the batch. Coordinates that can only be
removed together (a channel before and after ReLU, on both sides of a residual sum, the row of the weight that
computes it) form an *atom*. An atom leaves the network as a whole or not at all; one that some operator can't do
without in any case is *pinned*.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from bayeszip.errors import ModelError
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = [
    "UNKNOWN",
    "Atoms",
    "Attributes",
    "Folded",
    "Held",
    "Rule",
    "Shape",
    "Site",
    "SiteTensor",
    "Value",
    "Values",
    "along",
    "couple_groups",
    "dimension",
    "elements",
    "extent",
    "ints",
    "spread",
    "unknown",
]

#: A dimension of −k is k times the batch size; other dimensions are plain sizes.
Shape = tuple[int, ...]

#: What a computation is given: activations, tensors by role (None: absent), attributes.
Values = Sequence[torch.Tensor]
Held = Sequence[torch.Tensor | None]
Attributes = Mapping[str, Any]

#: Where an activation isn't known to be constant, its constant is NaN.
UNKNOWN = float("nan")


@dataclass(frozen=True)
class Value:
    """An activation: its shape, the atoms of each dimension, and what is known to be constant in it.

    Args:
        coordinates: for each dimension, the atom of each coordinate (of the batch dimension: one atom).
        constants: float64, one element or all along each dimension; NaN where the activation varies.
    """

    shape: Shape
    coordinates: tuple[np.ndarray, ...]
    constants: np.ndarray


@dataclass(frozen=True)
class SiteTensor:
    """A tensor of the model as a node sees it."""

    name: str
    values: np.ndarray
    coordinates: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Site:
    """A node where it stands: the values around it and the tensors it owns, by role.

    Args:
        foldable: whether a constant that this node reads may be added to its bias.
    """

    node: Node
    inputs: tuple[Value, ...]
    output: Value
    tensors: tuple[SiteTensor | None, ...]
    foldable: bool = False


@dataclass(frozen=True)
class Folded:
    """Constants that go: what each output coordinate gains in their place, and the weights that go with them."""

    gain: np.ndarray
    weights: np.ndarray


class Atoms:
    """Coordinates and which of them belong together: a union-find that is solved once, at the end.

    Args:
        packed: whether a dimension that is split into 3 and the rest is taken for packed queries, keys and values, of
            which the rest may lose coordinates; or for three heads, of which whole ones may go.
    """

    def __init__(self, *, packed: bool = False) -> None:
        self.packed = packed
        self._count = 0
        self._joined: list[tuple[np.ndarray, np.ndarray]] = []
        self._pinned: list[np.ndarray] = []

    def new(self, count: int) -> np.ndarray:
        """So many coordinates, each an atom of its own as yet."""
        self._count += count
        return np.arange(self._count - count, self._count)

    def join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Coordinate by coordinate, these two stay or go together."""
        first, second = np.broadcast_arrays(first, second)
        self._joined.append((first.ravel(), second.ravel()))

    def pin(self, *coordinates: np.ndarray) -> None:
        """These stay."""
        self._pinned.extend(np.ravel(each) for each in coordinates)

    def solve(self) -> tuple[np.ndarray, np.ndarray]:
        """The atom of each coordinate, and for each atom whether it is pinned."""
        atom = np.arange(self._count)
        if self._joined:
            first = np.concatenate([pair[0] for pair in self._joined])
            second = np.concatenate([pair[1] for pair in self._joined])
            while True:
                low = np.minimum(atom[first], atom[second])
                before = atom.copy()
                # Both the coordinates and the atoms they stood for move to the lowest, then paths are shortened.
                for end in (first, second):
                    np.minimum.at(atom, before[end], low)
                    np.minimum.at(atom, end, low)
                while not np.array_equal(shorter := atom[atom], atom):
                    atom = shorter
                if np.array_equal(atom, before):
                    break
        pinned = np.zeros(self._count, dtype=bool)
        for coordinates in self._pinned:
            pinned[atom[coordinates]] = True
        return atom, pinned


class Rule:
    """An operator: the shapes it takes, what it computes, and what it does to atoms, constants and liveness.

    What a subclass leaves out is safe: everything around the node is pinned and nothing is known about its output.
    """

    #: Roles that a node may leave empty.
    optional: ClassVar[tuple[str, ...]] = ()
    #: Whether its inputs and tensors must be floating-point numbers, all of one type, which its output has too.
    floating = False

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """Refuse, by a ModelError, tensors and attributes that no input could make fit."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        """The shape of the output; ModelError if the operator can't be applied to these shapes."""
        raise NotImplementedError

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        """About how many multiplications one sample takes."""
        return elements(output)

    def workspace(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        """About how many elements are held for one sample besides inputs and output."""
        return 0

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        """The output, from the inputs, the tensors by role and the attributes."""
        raise NotImplementedError

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        """The same on tensors without values, for what isn't `floating`, in a time that doesn't depend on sizes."""
        return self.compute(x, tensors, a)

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        """The stock layer that computes the same, without values; None: there is none."""
        return None

    def couple(self, site: Site, atoms: Atoms) -> None:
        """Join the coordinates that go together; pin those that must stay."""
        for each in (*site.inputs, site.output, *site.tensors):
            if each is not None:
                atoms.pin(*each.coordinates)

    def constants(self, site: Site) -> np.ndarray:
        """What is constant in the output, from what is constant in the inputs."""
        return unknown(site.output.shape)

    def needs(self, site: Site, live: np.ndarray) -> None:
        """Mark in `live` the atoms that the live coordinates of the output are computed from."""

    def fold(self, site: Site, live: np.ndarray) -> Folded | None:
        """What the constants on the dead coordinates of the input leave behind (None: nothing)."""
        return None

    def shrink(self, site: Site, count: Callable[[np.ndarray], int]) -> dict[str, AttributeValue]:
        """The attributes that change when only the live ones (`count`) of some coordinates remain."""
        return {}


def ints(node: Node, name: str) -> tuple[int, ...]:
    """An attribute that is a tuple of integers."""
    value = node.attributes[name]
    if not isinstance(value, tuple):
        raise ModelError(f"{node.op}: attribute {name} must be a tuple of integers, not {value!r}")
    return value


def dimension(node: Node, name: str, rank: int) -> int:
    """An attribute that is a dimension, counted from the front."""
    dim = node.attributes[name]
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise ModelError(f"{node.op}: there is no dimension {dim} among {rank}")
    return dim % rank


def couple_groups(before: np.ndarray, after: np.ndarray, groups: int, atoms: Atoms) -> None:
    """A group leaves as a whole: stock layers can't hold groups of different sizes."""
    leaders = before[:: len(before) // groups]
    atoms.join(before, np.repeat(leaders, len(before) // groups))
    atoms.join(after, np.repeat(leaders, len(after) // groups))


def elements(shape: Shape) -> int:
    """How many elements a value has, for a batch of one."""
    return math.prod(map(abs, shape))


def extent(size: int) -> int:
    """How many coordinates a dimension of this size has: its size for a batch of one."""
    return abs(size)


def unknown(shape: Shape) -> np.ndarray:
    """Nothing is known about a value of this shape."""
    return np.full((1,) * len(shape), UNKNOWN)


def spread(constants: np.ndarray, shape: Shape) -> np.ndarray:
    """The constants with all elements of every dimension, for a batch of one."""
    return np.broadcast_to(constants, tuple(extent(size) for size in shape))


def along(constants: np.ndarray, dim: int, size: int) -> np.ndarray:
    """For each coordinate of one dimension the constant it has whatever the other dimensions; NaN if there is none."""
    moved = np.moveaxis(constants, dim, 0).reshape(constants.shape[dim], -1)
    if moved.shape[1] == 0:
        return np.full(size, UNKNOWN)
    first = moved[:, :1]
    same = (moved == first).all(axis=1)  # NaN equals nothing: unknown stays unknown
    return np.broadcast_to(np.where(same, first[:, 0], UNKNOWN), (size,))
