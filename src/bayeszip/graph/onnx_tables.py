"""Weights of an ONNX file as a table of shared values and indices of 4 or 8 bits, gathered when it is loaded.

    dense     table ── Gather ◄── indices                                     every weight takes 4 or 8 bits
    sparse    zeros ── ScatterElements ◄── CumSum ◄── gaps                    every weight but 0 takes 12 or 16
                              ▲
                       table ── Gather ◄── indices

A runtime folds such constants when it loads the file, and then computes as if they had been written out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from bayeszip.tensors import CompressedModel, QuantizedTensor

__all__ = ["OPSET", "with_tables"]

#: The first version of the operators that knows indices of 4 bits.
OPSET = 21

#: Tensors of fewer elements stay as they are; tables have at most so many values; gaps at most so many weights.
_SMALLEST, _MOST_VALUES, _MOST_GAP = 64, 256, 255

#: Bytes that the operators take, about: dense, sparse, and one more for scales.
_DENSE, _SPARSE, _SCALED = 150, 500, 80


@dataclass(frozen=True)
class _Shared:
    """Weights as indices into a table, and perhaps a scale that multiplies them."""

    table: np.ndarray
    indices: np.ndarray
    scale: np.ndarray | None = None

    @property
    def bits(self) -> int:
        return 4 if len(self.table) <= 16 else 8

    @cached_property
    def entries(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Gaps and indices, where most of the weights are zero and that is shorter."""
        found = _gaps(self.indices.reshape(-1)) if self.table[0] == 0 else None
        if found is None or _SPARSE + len(found[0]) * (1 + self.bits / 8) >= _DENSE + self.indices.size * self.bits / 8:
            return None
        return found

    @property
    def cost(self) -> float:
        """Bytes in a file, about."""
        scale = 0 if self.scale is None else self.scale.nbytes + _SCALED
        each, more = (self.indices.size, _DENSE) if self.entries is None else (len(self.entries[0]), _SPARSE)
        return more + scale + self.table.nbytes + each * ((self.entries is not None) + self.bits / 8)

    def values(self) -> np.ndarray:
        values = self.table[self.indices]
        return values if self.scale is None else values * self.scale


def with_tables(proto: Any, model: CompressedModel, onnx: ModuleType) -> Any:
    """An ONNX model whose weights are indices into tables where that is shorter; nothing else is left out but notes.

    Args:
        proto: an `onnx.ModelProto`, which is changed.
        model: that it was exported from, for weights with scales.
        onnx: the package.
    """
    graph, nodes, initializers = proto.graph, [], []
    for tensor in graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        large = values.size >= _SMALLEST and values.dtype.kind == "f"
        best = min(_ways(tensor.name, values, model) if large else (), key=lambda way: way.cost, default=None)
        if best is None or best.cost >= values.nbytes:
            initializers.append(tensor)
            continue
        parts = _Parts(tensor.name, onnx)
        parts.write(best)
        nodes += parts.nodes
        initializers += parts.initializers
    everything = [*nodes, *graph.node]
    del graph.initializer[:], graph.node[:], graph.value_info[:]
    graph.initializer.extend(initializers)
    graph.node.extend(everything)
    for each in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
    return proto


def _ways(name: str, values: np.ndarray, model: CompressedModel) -> Iterator[_Shared]:
    """All that a weight may be made from, exactly: its own values, or shared values and scales."""
    table, indices = np.unique(values.reshape(-1), return_inverse=True)
    if len(table) <= _MOST_VALUES and np.isfinite(table).all():
        # The most frequent value comes first: zero, as a rule.
        order = np.argsort(-np.bincount(indices, minlength=len(table)), kind="stable")
        yield _Shared(table[order], np.argsort(order)[indices].reshape(values.shape))
    yield from (each for each in _scaled(name, values, model) if np.array_equal(each.values(), values))


def _scaled(name: str, values: np.ndarray, model: CompressedModel) -> Iterator[_Shared]:
    """What a tensor with scales may be: that of its name, or another one, perhaps transposed."""
    tensors: Mapping[str, Any] = model.tensors
    for other in (name, *(each for each in tensors if each != name)):
        tensor = tensors.get(other)
        if not isinstance(tensor, QuantizedTensor) or tensor.scale is None or len(tensor.codebook) > _MOST_VALUES:
            continue
        scale = tensor.row_scales().astype(values.dtype)
        scale = scale.reshape((1,) * (len(tensor.shape) - scale.ndim) + scale.shape)
        table = tensor.codebook.astype(values.dtype)
        if tensor.shape == values.shape:
            yield _Shared(table, tensor.symbols, scale)
        if len(tensor.shape) == 2 and tensor.shape[::-1] == values.shape:
            yield _Shared(table, tensor.symbols.T, scale.T)


class _Parts:
    """The operators and constants that make one weight."""

    def __init__(self, name: str, onnx: ModuleType) -> None:
        self._name, self._onnx = name, onnx
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def write(self, shared: _Shared) -> None:
        """Make the weight, under its name."""
        last = "gathered" if shared.scale is not None else ""
        if shared.entries is not None:
            self._scattered(shared, *shared.entries, last)
        else:
            self._gathered(shared, shared.indices, last)
        if shared.scale is not None:
            self._add("Mul", [self._of(last), self._constant("scale", shared.scale)], "")

    def _gathered(self, shared: _Shared, indices: np.ndarray, result: str) -> None:
        whole = self._add("Cast", [self._indices(indices, shared.bits)], "places", to=self._onnx.TensorProto.INT32)
        self._add("Gather", [self._constant("table", shared.table), whole], result)

    def _scattered(self, shared: _Shared, gaps: np.ndarray, entries: np.ndarray, result: str) -> None:
        shape = shared.indices.shape
        self._gathered(shared, entries, "weights")
        steps = self._add("Cast", [self._constant("gaps", gaps)], "steps", to=self._onnx.TensorProto.INT32)
        rows = self._add("CumSum", [steps, self._constant("axis", np.array(0, np.int64))], "rows")
        size = self._constant("size", np.array([math.prod(shape)], np.int64))
        zeros = self._add(
            "ConstantOfShape", [size], "zeros", value=self._tensor("zero", np.zeros(1, shared.table.dtype))
        )
        flat = self._add("ScatterElements", [zeros, rows, self._of("weights")], "flat", axis=0)
        self._add("Reshape", [flat, self._constant("shape", np.array(shape, np.int64))], result)

    def _of(self, part: str) -> str:
        return f"{self._name}/{part}" if part else self._name

    def _add(self, op: str, inputs: Sequence[str], result: str, **attributes: Any) -> str:
        self.nodes.append(self._onnx.helper.make_node(op, inputs, [self._of(result)], **attributes))
        return self._of(result)

    def _constant(self, part: str, values: np.ndarray) -> str:
        self.initializers.append(self._tensor(self._of(part), values))
        return self._of(part)

    def _tensor(self, name: str, values: np.ndarray) -> Any:
        return self._onnx.numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)

    def _indices(self, indices: np.ndarray, bits: int) -> str:
        kinds = self._onnx.TensorProto
        flat: np.ndarray = indices.astype(np.uint8).reshape(-1)
        kind = kinds.UINT8
        if bits == 4:
            kind, flat = kinds.UINT4, np.append(flat, np.zeros(flat.size % 2, np.uint8))
            flat = (flat[0::2] | flat[1::2] << 4).astype(np.uint8)
        self.initializers.append(
            self._onnx.helper.make_tensor(self._of("indices"), kind, indices.shape, flat.tobytes(), raw=True)
        )
        return self._of("indices")


def _gaps(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """How far each weight that isn't zero lies behind the one before, and its index.

    A zero is put where a gap would be too long; None if nothing is there at all.
    """
    places = np.flatnonzero(indices)
    if not len(places):
        return None
    gaps = np.diff(places, prepend=0)
    fillers = np.maximum(gaps - 1, 0) // _MOST_GAP
    count = fillers + 1
    ends = np.cumsum(count) - 1
    steps = np.full(int(count.sum()), _MOST_GAP, np.uint8)
    steps[ends] = gaps - fillers * _MOST_GAP
    entries = np.zeros(len(steps), np.uint8)
    entries[ends] = indices[places]
    return steps, entries
