"""Batch norms folded into what stands before them: `fold_norms`. Numpy only.

A network that is done with training has no use for statistics. In `eval()` a batch norm is

    y = s·x + t,   s = γ / √(v + ε),   t = β − s·m        channel by channel,

so behind a convolution or linear layer that nobody else reads, s becomes a scale for each output channel of its weight,
in which symbols and zeros stay what they are, and s·b + t its bias. That bias keeps the norm's name: who loads the file
into a class with norms can tell which one it stands for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from bayeszip.graph.soundness import shapes, states_inputs
from bayeszip.tensors import RAW_DTYPES, CompressedModel, Graph, Node, QuantizedTensor, RawTensor

__all__ = ["CHANNELS", "fold_norms"]

Tensors = dict[str, QuantizedTensor | RawTensor]

#: Operators that a norm can be folded into → the axis of their weight that its channels are.
CHANNELS = {"linear": 0, "conv1d": 0, "conv2d": 0, "conv3d": 0}
CHANNELS |= {"conv_transpose1d": 1, "conv_transpose2d": 1, "conv_transpose3d": 1}


def fold_norms(
    model: CompressedModel, frozen: Collection[str] = (), *, rounded: bool = True
) -> tuple[CompressedModel, dict[str, float]]:
    """The same function without batch norms where they can be folded; where they can't, with two vectors, not four.

    Only norms behind quantized weights are folded. A model without a graph comes back as it is.

    Args:
        frozen: names of tensors that stay as they are.
        rounded: whether what comes of norms is rounded afterwards. If not, those in types shorter than float32 stay:
            what comes of them has more digits than they have, and takes no less room.

    Returns:
        The model, and for the bias of each norm (of any kind) the deviation of what it is added to; by the name of its
        weight where a norm has no bias.
    """
    if model.graph is None:
        return model, {}
    folding = _Folding(model, model.graph)
    for position, node in enumerate(model.graph.nodes):
        stays = any(name in frozen for name in node.tensors) or (not rounded and _is_short(model, node))
        if node.op.startswith("batch_norm") and not stays:
            folding.fold(position, node)
    return folding.folded(model), {**_deviations(model, frozen), **folding.named}


def _is_short(model: CompressedModel, norm: Node) -> bool:
    """Whether a norm holds anything in a type shorter than float32."""
    held = [model.tensors[name] for name in norm.tensors if name is not None]
    return any(isinstance(each, RawTensor) and each.dtype in ("float16", "bfloat16") for each in held)


def _deviations(model: CompressedModel, frozen: Collection[str]) -> dict[str, float]:
    """What comes out of a norm has the deviation that its weight says."""
    found = {}
    for node in model.graph.nodes if model.graph is not None else ():
        weight_name, bias_name = (*node.tensors, None, None)[:2]
        if "_norm" not in node.op or weight_name is None or any(name in frozen for name in node.tensors):
            continue
        weight = model.tensors[weight_name]
        if isinstance(weight, RawTensor) and weight.is_floating and weight.size:
            found[bias_name or weight_name] = float(np.sqrt(np.square(weight.numbers()).mean()))
    return found


@dataclass(frozen=True)
class _Affine:
    """What a batch norm does to a channel.

    Args:
        dtype: that holds it, to what the network's own type can tell apart.
    """

    scale: np.ndarray
    shift: np.ndarray
    dtype: str

    def raw(self, values: np.ndarray) -> RawTensor:
        return RawTensor(values.astype(RAW_DTYPES[self.dtype]), self.dtype)


class _Folding:
    """A model on its way to fewer norms."""

    def __init__(self, model: CompressedModel, graph: Graph) -> None:
        self._tensors: Tensors = dict(model.tensors)
        self._graph = graph
        self._shapes = shapes(model) if states_inputs(graph) else []
        self._nodes: list[Node | None] = list(graph.nodes)
        #: Biases that norms without one have left, and the deviation of what these are added to.
        self.named: dict[str, float] = {}
        #: What a folded norm gave → what gives it now.
        self._stands_for: dict[int, int] = {}
        reads = [value for node in graph.nodes for value in node.inputs]
        self._readers = {value: reads.count(value) + graph.outputs.count(value) for value in set(reads)}
        names = [name for node in graph.nodes for name in node.tensors if name is not None]
        self._uses = {name: names.count(name) for name in names}

    def fold(self, position: int, norm: Node) -> None:
        """Fold a norm, or make it one of two vectors, if either can be done."""
        affine = self._affine(norm)
        if affine is None:
            return
        (source,) = norm.inputs
        producer = source - self._graph.inputs
        node = self._nodes[producer] if producer >= 0 else None
        names = [name for name in norm.tensors if name is not None]
        alone = all(self._uses[name] == 1 for name in names)
        can = node is not None and alone and self._readers[source] == 1 and self._takes_scales(node, source)
        if node is None or not can or not self._stays_in_range(node, affine):
            # One without weight and bias has no more than two vectors.
            if norm.tensors[0] is not None and norm.tensors[1] is not None:
                self._reduce(norm, affine)
            return
        bias_name = self._bias_of(norm)
        self._nodes[producer] = self._scaled(node, affine, bias_name)
        for name in names:
            if name != bias_name:
                del self._tensors[name]
        self._nodes[position] = None
        self._stands_for[self._graph.inputs + position] = source

    def _bias_of(self, norm: Node) -> str:
        """The name of a norm's bias; where it has none, the name that it would have."""
        if norm.tensors[1] is not None:
            return norm.tensors[1]
        path, dot, _ = str(norm.tensors[2]).rpartition(".")
        name = f"{path}{dot}bias"
        self.named[name] = 1.0
        return name

    def _affine(self, norm: Node) -> _Affine | None:
        """None where statistics are missing, a tensor isn't one of plain floats, or is read by others than this very
        norm, used again."""
        names = {name for name in norm.tensors if name is not None}
        if any(names & set(other.tensors) and not _alike(norm, other) for other in self._graph.nodes):
            return None
        found: list[np.ndarray] = []
        dtype = "float32"
        for name, without in zip(norm.tensors, (1.0, 0.0, None, None), strict=True):
            if name is None and without is not None:
                found.append(np.asarray(without))
                continue
            tensor = None if name is None else self._tensors[name]
            if not isinstance(tensor, RawTensor) or not tensor.is_floating:
                return None
            found.append(tensor.numbers())
            dtype = "float64" if tensor.dtype == "float64" else dtype
        weight, bias, mean, variance = found
        with np.errstate(all="ignore"):
            scale = weight / np.sqrt(variance + float(norm.attributes["eps"]))  # type: ignore[arg-type]
            shift = bias - scale * mean
        # A scale is a float32 in a file, whatever the network's type.
        return _Affine(scale, shift, dtype) if _in_float32(scale) and np.isfinite(shift).all() else None

    def _takes_scales(self, node: Node, value: int) -> bool:
        """Whether the channels of what a node gives, `value`, are those of its weight, which is quantized."""
        if node.op == "linear" and not (self._shapes and len(self._shapes[value]) == 2):
            return False  # of more dimensions a norm's channels are the second, and a linear layer's the last
        weight = None if not node.tensors or node.tensors[0] is None else self._tensors[node.tensors[0]]
        if node.op not in CHANNELS or not isinstance(weight, QuantizedTensor) or not weight.size:
            return False
        axis = CHANNELS[node.op]
        grouped = axis == 1 and node.attributes.get("groups", 1) != 1
        across = weight.scale is not None and weight.axis != axis and len(np.unique(weight.scale.symbols)) > 1
        return not grouped and not across and all(name is None or self._uses[name] == 1 for name in node.tensors)

    def _stays_in_range(self, node: Node, affine: _Affine) -> bool:
        """Whether a network that computes in float16 has the scaled weights as precisely as it has any."""
        stated = [str(each.attributes["computes_in"]) for each in self._graph.nodes if each.op == "input"]
        weight = self._tensors[str(node.tensors[0])]
        if stated[:1] != ["float16"] or not isinstance(weight, QuantizedTensor):
            return True
        channels = np.moveaxis(weight.dequantize().astype(np.float64), CHANNELS[node.op], 0)
        scaled = channels.reshape(len(affine.scale), -1) * affine.scale[:, None]
        with np.errstate(over="ignore"):
            lost, shift = scaled.astype(np.float16) - scaled, affine.shift.astype(np.float16)
        precise = np.square(lost).sum(1) <= np.square(np.finfo(np.float16).eps) * np.square(scaled).sum(1)
        return bool(precise.all() and np.isfinite(shift).all())

    def _scaled(self, node: Node, affine: _Affine, bias_name: str) -> Node:
        weight_name, old_bias = str(node.tensors[0]), node.tensors[1]
        weight = self._tensors[weight_name]
        if not isinstance(weight, QuantizedTensor):
            raise TypeError(weight_name)  # never: `_takes_scales` asks for it
        axis = CHANNELS[node.op]
        scale = affine.scale if weight.scale is None else affine.scale * _along(weight, axis)
        self._tensors[weight_name] = replace(weight, scale=exactly(scale), axis=axis)
        shift = affine.shift
        if old_bias is not None:
            bias = self._tensors.pop(old_bias)
            values = bias.dequantize().astype(np.float64) if isinstance(bias, QuantizedTensor) else bias.numbers()
            shift = shift + affine.scale * values
        self._tensors[bias_name] = affine.raw(shift)
        return replace(node, tensors=(weight_name, bias_name, *node.tensors[2:]))

    def _reduce(self, norm: Node, affine: _Affine) -> None:
        """y = s·x + t as a norm of mean 0 and variance 1 − ε, which take next to nothing."""
        weight, bias, mean, variance = map(str, norm.tensors)
        eps = float(norm.attributes["eps"])  # type: ignore[arg-type]
        count, rest = len(affine.scale), np.float32(1 - eps)
        # What float32 lacks of 1 − ε, a weight in float64 makes up for.
        self._tensors[weight] = affine.raw(affine.scale * np.sqrt(float(rest) + eps))
        self._tensors[bias] = affine.raw(affine.shift)
        self._tensors[mean] = QuantizedTensor(np.zeros(count, np.uint8), np.zeros(1))
        self._tensors[variance] = QuantizedTensor(np.ones(count, np.uint8), np.array([0.0, rest]))

    def folded(self, model: CompressedModel) -> CompressedModel:
        """The model with what is left."""
        graph, number = self._graph, dict(enumerate(range(self._graph.inputs)))
        nodes: list[Node] = []
        for position, node in enumerate(self._nodes):
            value = graph.inputs + position
            if node is None:
                number[value] = number[self._stands_for[value]]
                continue
            number[value] = graph.inputs + len(nodes)
            nodes.append(node.renumbered(number))
        outputs = tuple(number[value] for value in graph.outputs)
        order = dict.fromkeys((*_names(nodes), *self._tensors))
        tensors: Mapping[str, QuantizedTensor | RawTensor] = {
            name: self._tensors[name] for name in order if name in self._tensors
        }
        return replace(model, tensors=tensors, graph=replace(graph, nodes=tuple(nodes), outputs=outputs))


def _alike(norm: Node, other: Node) -> bool:
    return (norm.op, norm.tensors, norm.attributes) == (other.op, other.tensors, other.attributes)


def _names(nodes: list[Node]) -> list[str]:
    return [name for node in nodes for name in node.tensors if name is not None]


def _along(weight: QuantizedTensor, axis: int) -> np.ndarray:
    """The scale that a weight has by now, which is one number for all channels where it lies along the other axis."""
    if weight.scale is None:
        raise TypeError("no scale")  # never: asked of weights that have one
    values = weight.scale.dequantize().astype(np.float64)
    return values if weight.axis == axis else np.full(weight.shape[axis], values[0])


def _in_float32(values: np.ndarray) -> bool:
    """Whether float32 holds them in its full precision."""
    sizes = np.abs(values[values != 0])
    return bool(((sizes >= np.finfo(np.float32).smallest_normal) & (sizes <= np.finfo(np.float32).max)).all())


def exactly(values: np.ndarray) -> QuantizedTensor:
    """A vector as it is, in float32: every value of it a shared one."""
    single = values.astype(np.float32) + np.float32(0)
    distinct = np.unique(single[single != 0])
    symbols = np.where(single == 0, 0, np.searchsorted(distinct, single) + 1)
    return QuantizedTensor(symbols, np.concatenate([[np.float32(0)], distinct]))
