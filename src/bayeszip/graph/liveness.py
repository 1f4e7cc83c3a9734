"""Dead units go, the function stays: `drop_dead_units`. Numpy only.

Three passes, repeated until nothing changes:

    forward     what is constant, whatever the input              rules' `constants`
    backward    which atoms a network output is computed from     rules' `needs`
    rewrite     tensors lose the coordinates of dead atoms, constants they held move into the next bias
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.graph.families import RULES
from bayeszip.graph.families.base import Atoms, Folded, Shape, Site, SiteTensor, Value, dimension, extent, unknown
from bayeszip.graph.free import varying_dims
from bayeszip.graph.indices import narrowed, surviving, with_indices
from bayeszip.graph.soundness import shapes, states_inputs
from bayeszip.tensors import MAX_SYMBOLS, CompressedModel, Node, QuantizedTensor, RawTensor

__all__ = ["Fold", "coupled_units", "drop_dead_units"]

#: When a constant unit's contribution moves into the next bias: where the file is likely to get smaller, wherever it
#: is exact, or never. A bias that is stored raw takes it at no cost, so "smaller" only hesitates at quantized ones.
Fold = Literal["smaller", "always", "never"]

#: Rough bits in a file, for "smaller": a shared value, a symbol used for the first time, a weight, one that is zero.
_BITS_OF_SHARED_VALUE, _BITS_OF_NEW_SYMBOL, _BITS_OF_WEIGHT, _BITS_OF_ZERO = 32.0, 8.0, 7.0, 0.05


def drop_dead_units(
    model: CompressedModel, *, fold: Fold = "smaller", multiple_of: int = 1, indices: bool = False
) -> CompressedModel:
    """The same function with fewer units: every row, column and channel that is dead or constant is removed.

    Network inputs and outputs keep their size; every layer keeps at least one unit. Where removal would not be exact
    the unit stays. A folded constant is computed in float64 and rounded once, to the float32 of the bias. Tensors
    that the graph never reads go too. A model without a graph, or whose graph doesn't state the shapes of its inputs,
    comes back as it is. What is removed from a graph that runs at several sizes is dead at all of them.

    Args:
        multiple_of: round the surviving widths of linear layers and convolutions up to a multiple of this.
        indices: store which units survived, for `dense_state`.
    """
    if multiple_of < 1:
        raise ModelError(f"multiple_of must be at least 1, not {multiple_of}")
    if fold not in get_args(Fold):
        raise ModelError(f"fold must be one of {', '.join(get_args(Fold))}, not {fold!r}")
    if model.graph is None or not states_inputs(model.graph):
        return model
    if model.graph.varies and varying_dims(model) is None:
        return model
    kept = surviving(model)
    model = _without_unread_tensors(model)
    changed = True
    while changed:
        changed = False
        for packed in (True, False):
            step = _Pass(model, fold, multiple_of, packed=packed, new_biases=not indices)
            model, remaining = step.rewritten()
            changed |= not all(mask.all() for masks in remaining.values() for mask in masks)
            kept = narrowed(kept, remaining) if indices else kept
    return with_indices(model, kept) if indices else model


def coupled_units(model: CompressedModel, *, mask_pinned: bool = True) -> dict[str, tuple[np.ndarray, ...]] | None:
    """For each tensor that the graph reads, and each of its dimensions, the unit that each coordinate belongs to.

    Coordinates with the same number leave the network together or not at all, whichever tensors they are of. None:
    there is no graph, or one that doesn't state the shapes of its inputs.

    Args:
        mask_pinned: number those −1 that stay whatever happens.
    """
    if model.graph is None or not states_inputs(model.graph):
        return None
    if model.graph.varies and varying_dims(model) is None:
        return None
    return _Pass(model, "never", 1, packed=True, new_biases=False).units(mask_pinned)


@dataclass(frozen=True)
class _Solution:
    """Which atoms live, and what each node's bias gains from the constants that go."""

    live: np.ndarray
    gains: Mapping[int, np.ndarray]


class _Pass:
    """One round over a model: its sites, what is live among them, and the model without the rest."""

    def __init__(self, model: CompressedModel, fold: Fold, multiple_of: int, *, packed: bool, new_biases: bool) -> None:
        if model.graph is None:
            raise ModelError("the model has no graph")
        self._model, self._graph, self._multiple_of = model, model.graph, multiple_of
        self._new_biases = new_biases
        self._weights = {name: _dense(model.tensors[name]) for name in self._graph.tensor_names()}
        self._uses = [name for node in self._graph.nodes for name in node.tensors if name is not None]
        self._varying = varying_dims(model) or [()] * (self._graph.inputs + len(self._graph.nodes))
        self._sites, self._pinned, self._coordinates = self._coupled(Atoms(packed=packed))
        self._fold: Fold = fold

    def units(self, mask_pinned: bool) -> dict[str, tuple[np.ndarray, ...]]:
        """The atoms of every tensor's coordinates; −1 for those that are pinned, if so said."""
        hidden = self._pinned & mask_pinned
        return {
            name: tuple(np.where(hidden[atoms], -1, atoms) for atoms in dims)
            for name, dims in self._coordinates.items()
        }

    def rewritten(self) -> tuple[CompressedModel, dict[str, list[np.ndarray]]]:
        """The model without what is dead, and what remains of each dimension of its tensors."""
        solution = self._solved()
        live = solution.live

        def count(coordinates: np.ndarray) -> int:
            return int(np.count_nonzero(live[coordinates]))

        nodes, tensors = list(self._graph.nodes), dict(self._model.tensors)
        for position, gain in solution.gains.items():
            nodes[position], name, bias = self._with_gain(position, gain)
            tensors = _placed(tensors, name, bias, after=str(nodes[position].tensors[0]))
        for position, site in enumerate(self._sites):
            changes = RULES[site.node.op].shrink(site, count)
            nodes[position] = replace(nodes[position], attributes={**nodes[position].attributes, **changes})
        remaining = {name: [live[atoms] for atoms in dims] for name, dims in self._coordinates.items()}
        tensors |= {name: _taken(tensors[name], masks) for name, masks in remaining.items()}
        for position in solution.gains:  # a bias that wasn't there before has no coordinates of its own
            bias_name = nodes[position].tensors[1]
            if bias_name is not None and bias_name not in self._coordinates:
                tensors[bias_name] = _taken(tensors[bias_name], [live[_rows(self._sites[position])]])
        return replace(self._model, tensors=tensors, graph=replace(self._graph, nodes=tuple(nodes))), remaining

    def _coupled(self, atoms: Atoms) -> tuple[list[Site], np.ndarray, dict[str, list[np.ndarray]]]:
        """The sites with their atoms and constants, which atoms are pinned, and the coordinates of each tensor."""
        values = [self._blank(shape, atoms) for shape in shapes(self._model)]
        tensors = {
            name: SiteTensor(name, weights, tuple(atoms.new(size) for size in weights.shape))
            for name, weights in self._weights.items()
        }
        sites = [
            self._site(position, node, values, {name: tensors[name] for name in node.tensors if name is not None})
            for position, node in enumerate(self._graph.nodes)
        ]
        for site in sites:
            RULES[site.node.op].couple(site, atoms)
            if site.node.varying and "dim" in site.node.attributes:  # at another size it takes another part
                atoms.pin(site.inputs[0].coordinates[dimension(site.node, "dim", len(site.inputs[0].shape))])
        for value, dims in zip(values, self._varying, strict=True):
            atoms.pin(*(value.coordinates[dim] for dim in dims))
        for value in (*range(self._graph.inputs), *self._graph.outputs):
            atoms.pin(*values[value].coordinates)
        atom, pinned = atoms.solve()
        values = [replace(value, coordinates=tuple(atom[each] for each in value.coordinates)) for value in values]
        tensors = {
            name: replace(tensor, coordinates=tuple(atom[each] for each in tensor.coordinates))
            for name, tensor in tensors.items()
        }
        sites = []
        for position, node in enumerate(self._graph.nodes):
            site = self._site(position, node, values, tensors)
            with np.errstate(all="ignore"):
                constants = RULES[node.op].constants(site)
            constants = np.where(np.isfinite(constants), constants, np.nan)
            constants = self._at_all_sizes(position, node, constants)
            site = replace(site, output=replace(site.output, constants=constants))
            values[self._graph.inputs + position] = site.output
            sites.append(site)
        return sites, pinned, {name: list(tensor.coordinates) for name, tensor in tensors.items()}

    def _at_all_sizes(self, position: int, node: Node, constants: np.ndarray) -> np.ndarray:
        """What is constant at the sizes that are stated, as far as it is at all others: there along whole dimensions.

        The rules tell what is so at one size. They look at whole channels, not at single places; what depends on how
        many places there are, or takes another part of a tensor at another size, is left out here.
        """
        shaped = node.op in _SHAPED or "pool" in node.op or self._takes_of_the_same(node, constants.ndim)
        if node.varying and not shaped:
            return np.full((1,) * constants.ndim, np.nan)
        if node.op == "sum" and self._varying[node.inputs[0]]:
            constants = np.where(constants == 0, constants, np.nan)
        for dim in self._varying[self._graph.inputs + position]:
            first = constants.take([0], axis=dim)
            constants = np.where((constants == first).all(axis=dim, keepdims=True), first, np.nan)
        return constants

    def _takes_of_the_same(self, node: Node, rank: int) -> bool:
        """Whether it takes a part of a dimension that varies: what is constant there is so all along it."""
        rank += node.op == "select"  # which its output has lost
        return node.op in ("select", "slice") and dimension(node, "dim", rank) in self._varying[node.inputs[0]]

    def _blank(self, shape: Shape, atoms: Atoms) -> Value:
        coordinates = tuple(atoms.new(extent(size)) for size in shape)
        atoms.pin(*(each for each, size in zip(coordinates, shape, strict=True) if size == -1))
        return Value(shape, coordinates, unknown(shape))

    def _site(self, position: int, node: Node, values: Sequence[Value], tensors: Mapping[str, SiteTensor]) -> Site:
        return Site(
            node,
            inputs=tuple(values[value] for value in node.inputs),
            output=values[self._graph.inputs + position],
            tensors=tuple(None if name is None else tensors[name] for name in node.tensors),
            foldable=self._can_fold(node),
        )

    def _can_fold(self, node: Node) -> bool:
        """Whether the node's bias is its own and of a kind that can take a new value."""
        if node.op not in _WIDTHS:
            return False
        weight, bias = node.tensors[:2]
        if bias is None:
            alone = weight is not None and self._uses.count(weight) == 1
            return self._new_biases and alone and _bias_name(str(weight)) not in self._model.tensors
        tensor = self._model.tensors[bias]
        if isinstance(tensor, RawTensor) and tensor.dtype not in ("float32", "float64"):
            return False
        return self._uses.count(bias) == 1

    def _solved(self) -> _Solution:
        """The live atoms, with folding given up where it doesn't pay."""
        if self._fold == "never":
            self._sites = [replace(site, foldable=False) for site in self._sites]
        while True:
            live = self._live()
            folds = dict(self._folds(live))
            poor = [position for position, fold in folds.items() if not self._pays(position, fold)]
            if not poor:
                return _Solution(live, {position: fold.gain for position, fold in folds.items()})
            for position in poor:
                self._sites[position] = replace(self._sites[position], foldable=False)

    def _live(self) -> np.ndarray:
        """The atoms that outputs are computed from, and as many more as every dimension needs."""
        live = self._pinned.copy()
        while True:
            before = np.count_nonzero(live)
            for site in reversed(self._sites):
                RULES[site.node.op].needs(site, live)
            if np.count_nonzero(live) == before and not self._revive(live):
                return live

    def _revive(self, live: np.ndarray) -> bool:
        """Keep at least one coordinate of every dimension, and widths at the multiple asked for."""
        before = np.count_nonzero(live)
        for coordinates in (*(each for site in self._sites for each in site.output.coordinates), *self._tensor_dims()):
            if len(coordinates) and not live[coordinates].any():
                live[coordinates[0]] = True
        if self._multiple_of > 1:
            for site in self._sites:
                if site.node.op in _WIDTHS:
                    _round_up(_rows(site), live, self._multiple_of)
        return bool(np.count_nonzero(live) > before)

    def _tensor_dims(self) -> Iterator[np.ndarray]:
        return (each for coordinates in self._coordinates.values() for each in coordinates)

    def _folds(self, live: np.ndarray) -> Iterator[tuple[int, Folded]]:
        """For each node that loses non-zero constants, what its live outputs gain in their place."""
        for position, site in enumerate(self._sites):
            if site.foldable and (fold := RULES[site.node.op].fold(site, live)) is not None:
                alive = live[_rows(site)]
                gain = np.where(alive, fold.gain, 0.0)
                if gain.any():
                    yield position, Folded(gain, fold.weights[alive])

    def _pays(self, position: int, fold: Folded) -> bool:
        """Whether a fold may be done: there is room for its new values, and they cost less than what goes."""
        _, name, bias = self._with_gain(position, fold.gain)
        if not isinstance(bias, QuantizedTensor):
            return True
        if bias.codebook.size > MAX_SYMBOLS // 2:
            return False
        if self._fold == "always":
            return True
        nonzero = np.count_nonzero(fold.weights)
        saved = nonzero * _BITS_OF_WEIGHT + (fold.weights.size - nonzero) * _BITS_OF_ZERO
        cost = np.count_nonzero(fold.gain) * _BITS_OF_NEW_SYMBOL + bias.codebook.size * _BITS_OF_SHARED_VALUE
        return bool(saved > cost - self._own_values(name) * _BITS_OF_SHARED_VALUE)

    def _own_values(self, name: str) -> int:
        """How many shared values a file holds for this tensor alone: none, if another has the same codebook."""
        tensors = {each: tensor for each, tensor in self._model.tensors.items() if isinstance(tensor, QuantizedTensor)}
        if name not in tensors:
            return 0
        own = tensors[name].codebook
        shared = any(each != name and np.array_equal(tensor.codebook, own) for each, tensor in tensors.items())
        return 0 if shared else own.size

    def _with_gain(self, position: int, gain: np.ndarray) -> tuple[Node, str, QuantizedTensor | RawTensor]:
        """The node and its bias with the constants added; a bias is made where there was none."""
        node = self._graph.nodes[position]
        weight, name = node.tensors[:2]
        if name is None:
            name = _bias_name(str(weight))
            node = replace(node, tensors=(weight, name, *node.tensors[2:]))
            old: QuantizedTensor | RawTensor = QuantizedTensor(np.zeros(len(gain), dtype=np.uint8), np.zeros(1))
        else:
            old = self._model.tensors[name]
        return node, name, _added(old, gain)


_WIDTHS = ("linear", "conv1d", "conv2d", "conv3d")

#: Operators that make of what is constant all over the same, whatever the size they are given.
_SHAPED = ("view", "reshape", "expand", "interpolate")


def _rows(site: Site) -> np.ndarray:
    """The coordinates that a node's bias is added to."""
    return site.output.coordinates[-1 if site.node.op == "linear" else 1]


def _round_up(coordinates: np.ndarray, live: np.ndarray, multiple: int) -> None:
    missing = -np.count_nonzero(live[coordinates]) % multiple
    for atom in coordinates[~live[coordinates]]:
        if missing <= 0:
            return
        missing -= not live[atom]
        live[atom] = True


def _added(tensor: QuantizedTensor | RawTensor, gain: np.ndarray) -> QuantizedTensor | RawTensor:
    """A bias plus what it gains; a quantized one with a codebook of the values it then has."""
    if isinstance(tensor, RawTensor):
        return RawTensor((tensor.values.astype(np.float64) + gain).astype(tensor.values.dtype), tensor.dtype)
    wanted = (tensor.dequantize().astype(np.float64) + gain).astype(np.float32)
    wanted[wanted == 0] = 0.0  # no negative zero: symbol 0 is the one zero
    unchanged = np.unique(tensor.symbols[gain == 0])
    old = tensor.codebook[unchanged[unchanged != 0]]
    new = np.setdiff1d(wanted[gain != 0], np.append(old, np.float32(0)))
    codebook = np.concatenate([np.zeros(1, dtype=np.float32), old, new])
    place = {value.tobytes(): symbol for symbol, value in enumerate(codebook)}
    return QuantizedTensor(np.array([place[value.tobytes()] for value in wanted], dtype=np.int64), codebook)


def _placed(
    tensors: Mapping[str, QuantizedTensor | RawTensor], name: str, tensor: QuantizedTensor | RawTensor, after: str
) -> dict[str, QuantizedTensor | RawTensor]:
    """The tensors with one replaced, or put behind another if it is new: a bias behind its weight."""
    placed: dict[str, QuantizedTensor | RawTensor] = {}
    for each, old in tensors.items():
        placed[each] = tensor if each == name else old
        if each == after and name not in tensors:
            placed[name] = tensor
    return placed


def _taken(tensor: QuantizedTensor | RawTensor, kept: Sequence[np.ndarray]) -> QuantizedTensor | RawTensor:
    """The tensor with only the kept coordinates of each dimension."""
    for axis, each in enumerate(kept):
        if not each.all():
            tensor = tensor.take(np.flatnonzero(each), axis)
    return tensor


def _dense(tensor: QuantizedTensor | RawTensor) -> np.ndarray:
    """The numbers of a tensor, for the analysis."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.dequantize()
    return tensor.numbers() if tensor.dtype == "bfloat16" else tensor.values


def _bias_name(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias" if weight.endswith("weight") else f"{weight}_bias"


def _without_unread_tensors(model: CompressedModel) -> CompressedModel:
    read = set(model.graph.tensor_names()) if model.graph else set(model.tensors)
    return replace(model, tensors={name: tensor for name, tensor in model.tensors.items() if name in read})
