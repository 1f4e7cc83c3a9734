"""Hidden units in another order, the function unchanged: `order_units`, `reordered`.

Which of a hidden layer's units comes first means nothing, yet a file pays for it: log₂ n! bits for n units. Sorted
units give the coder most of these bits back, 2 to 3 % of a small file; `benchmarks/unit_order.py` says what is left.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from bayeszip.graph.families import RULES
from bayeszip.graph.families.elementwise import Unary
from bayeszip.graph.soundness import shapes, states_inputs
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor

__all__ = ["order_units", "reordered"]

_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
#: What computes each element from that element alone.
_ELEMENTWISE = {name for name, rule in RULES.items() if isinstance(rule, Unary)}
#: what treats every channel of a convolution alike, or has one number for each
_CHANNELWISE = _ELEMENTWISE | {
    "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "batch_norm1d", "batch_norm2d", "batch_norm3d",
}  # fmt: skip
#: the coder makes use of the order in tensors up to this size
_MOST_ELEMENTS = 1 << 19


def order_units(model: CompressedModel) -> CompressedModel:
    """The same function with the units of hidden layers sorted by where their weights are.

    A unit whose first weight comes earlier goes first; of two that agree so far, the one whose next weight comes
    earlier. Only layers whose outputs go to one other layer, through operators that keep units apart, are sorted;
    all else stays as it is. Sums in the next layer are taken in another order, so its last bits may change.
    """
    return reordered(model, _sorted)


def _sorted(symbols: np.ndarray) -> np.ndarray:
    gaps = (symbols == 0).astype(np.uint8)
    return np.array(sorted(range(len(gaps)), key=lambda unit: gaps[unit].tobytes()), dtype=np.int64)


def reordered(model: CompressedModel, order_of: Callable[[np.ndarray], np.ndarray]) -> CompressedModel:
    """The same function with the units of hidden layers in the order that `order_of` makes of their symbols' rows."""
    if model.graph is None or not states_inputs(model.graph):
        return model
    tensors = dict(model.tensors)
    for path in _paths(model, model.graph):
        weight = tensors[path.weight]
        if not isinstance(weight, QuantizedTensor) or weight.size > _MOST_ELEMENTS:
            continue
        order = order_of(weight.symbols.reshape(path.units, -1))
        for name in (path.weight, *path.along):
            tensors[name] = tensors[name].take(order, axis=0)
        columns = np.arange(path.units * path.block).reshape(path.units, path.block)[order].reshape(-1)
        tensors[path.reader] = tensors[path.reader].take(columns, axis=1)
    return replace(model, tensors=tensors)


@dataclass(frozen=True)
class _Path:
    """From a layer to the one that reads it.

    Args:
        along: tensors with a number for each unit: the bias, and those of norms on the way.
        reader: the weight whose second dimension are the units, `block` columns each.
    """

    weight: str
    units: int
    along: tuple[str, ...]
    reader: str
    block: int


def _paths(model: CompressedModel, graph: Graph) -> Iterator[_Path]:
    """All layers whose units may be sorted."""
    found = shapes(model)
    reads = Counter([value for node in graph.nodes for value in node.inputs] + list(graph.outputs))
    uses = Counter(name for node in graph.nodes for name in node.tensors if name is not None)
    readers = {value: place for place, node in enumerate(graph.nodes) for value in node.inputs}
    for place, node in enumerate(graph.nodes):
        if node.op not in _CONVOLUTIONS | {"linear"} or node.attributes.get("groups", 1) != 1:
            continue
        if node.op != "linear" and len(found[graph.inputs + place]) != 2 + int(node.op[4]):
            continue  # without a batch dimension, flattening would start elsewhere
        chain = [node]
        value = graph.inputs + place
        while reads[value] == 1 and value in readers:
            following = graph.nodes[readers[value]]
            chain.append(following)
            if not _keeps_apart(node, following):
                break
            value = graph.inputs + readers[value]
        path = _path(model, chain)
        names = () if path is None else (path.weight, *path.along, path.reader)
        if path is not None and all(uses[name] == 1 for name in names):
            yield path


def _keeps_apart(layer: Node, following: Node) -> bool:
    if layer.op == "linear":
        return following.op in _ELEMENTWISE
    flat = following.op == "flatten" and tuple(following.attributes.values()) == (1, -1)
    return flat or following.op in _CHANNELWISE


def _path(model: CompressedModel, chain: list[Node]) -> _Path | None:
    """The path, if its end is a layer that reads the units."""
    layer, last = chain[0], chain[-1]
    flat = any(node.op == "flatten" for node in chain[1:-1])
    if len(chain) < 2 or last.op != ("linear" if flat else layer.op) or last.attributes.get("groups", 1) != 1:
        return None
    weight, reader = layer.tensors[0], last.tensors[0]
    if weight is None or reader is None:
        return None
    units, columns = model.tensors[weight].shape[0], model.tensors[reader].shape[1]
    along = tuple(name for node in chain[:-1] for name in node.tensors if name not in (None, weight))
    if columns % units or (columns != units and not flat):
        return None
    return _Path(weight, units, tuple(str(name) for name in along), reader, columns // units)
