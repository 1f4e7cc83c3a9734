"""The values that cross stages: quantized and raw tensors, the graph, and the compressed model. Frozen, numpy only.

Everything here is exact: two values are equal only if every symbol, every bit of every shared value and every
attribute is the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.operators import OPERATORS, AttributeValue

__all__ = ["CompressedModel", "Graph", "Node", "QuantizedTensor", "RawTensor"]

MAX_SYMBOLS = 2**16

#: dtype name → numpy dtype its bits are held in. bfloat16, which numpy lacks, is held as its bits.
RAW_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(held)
    for name, held in {
        "float32": "<f4",
        "float16": "<f2",
        "bfloat16": "<u2",
        "float64": "<f8",
        "int64": "<i8",
        "int32": "<i4",
        "int16": "<i2",
        "int8": "<i1",
        "uint8": "<u1",
        "bool": "?",
    }.items()
}


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Weights that take a few shared values: `codebook[symbols]`. Symbol 0 is the value 0.0.

    Args:
        symbols: integers in [0, len(codebook)), of the tensor's shape.
        codebook: float32 shared values, at most 2¹⁶; `codebook[0]` is 0.0; finite.
    """

    symbols: np.ndarray
    codebook: np.ndarray

    def __post_init__(self) -> None:
        symbols = np.asarray(self.symbols)
        codebook = np.ascontiguousarray(self.codebook, dtype=np.float32)
        if not np.issubdtype(symbols.dtype, np.integer):
            raise ModelError(f"symbols must be integers, not {symbols.dtype}")
        if codebook.ndim != 1 or not 1 <= codebook.size <= MAX_SYMBOLS:
            raise ModelError(f"a codebook holds 1 to {MAX_SYMBOLS} values in one dimension, not shape {codebook.shape}")
        if codebook[0].view(np.uint32) != 0:
            raise ModelError(f"codebook[0] must be 0.0, not {codebook[0]}")
        if not np.isfinite(codebook).all():
            raise ModelError("a codebook must be finite")
        if symbols.size and (symbols.min() < 0 or symbols.max() >= codebook.size):
            raise ModelError(f"symbols must lie in [0, {codebook.size}), found [{symbols.min()}, {symbols.max()}]")
        dtype = np.uint8 if codebook.size <= 2**8 else np.uint16
        object.__setattr__(self, "symbols", _frozen(np.ascontiguousarray(symbols, dtype=dtype).reshape(symbols.shape)))
        object.__setattr__(self, "codebook", _frozen(codebook))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.symbols.shape

    @property
    def size(self) -> int:
        return self.symbols.size

    @property
    def nonzero(self) -> int:
        """How many weights are not the value 0.0."""
        return int(np.count_nonzero(self.symbols))

    def dequantize(self) -> np.ndarray:
        """The float32 weights."""
        return np.asarray(self.codebook[self.symbols])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        return np.array_equal(self.symbols, other.symbols) and self.codebook.tobytes() == other.codebook.tobytes()


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor kept bit for bit: `values` holds the bits of a tensor of `dtype` (see `RAW_DTYPES`)."""

    values: np.ndarray
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in RAW_DTYPES:
            raise ModelError(f"dtype {self.dtype!r} can't be stored; known: {', '.join(RAW_DTYPES)}")
        values = np.asarray(self.values)
        if values.dtype != RAW_DTYPES[self.dtype]:
            raise ModelError(f"a raw {self.dtype} tensor is held as {RAW_DTYPES[self.dtype]}, not {values.dtype}")
        object.__setattr__(self, "values", _frozen(np.ascontiguousarray(values).reshape(values.shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def nonzero(self) -> int:
        return int(np.count_nonzero(self.values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RawTensor):
            return NotImplemented
        return (
            self.dtype == other.dtype and self.shape == other.shape and self.values.tobytes() == other.values.tobytes()
        )


@dataclass(frozen=True)
class Node:
    """One operator applied: to earlier values (`inputs`) and to tensors of the model, by role (None: absent)."""

    op: str
    inputs: tuple[int, ...]
    tensors: tuple[str | None, ...] = ()
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operator = OPERATORS.get(self.op)
        if operator is None:
            raise ModelError(f"operator {self.op!r} is not in the closed list")
        if len(self.inputs) != operator.inputs and not (operator.inputs < 0 and self.inputs):
            wanted = "at least one value" if operator.inputs < 0 else f"{operator.inputs} values"
            raise ModelError(f"{self.op} reads {wanted}, not {self.inputs}")
        if len(self.tensors) != len(operator.tensors):
            raise ModelError(f"{self.op} takes tensors {operator.tensors}, not {self.tensors}")
        unknown = set(self.attributes) - set(operator.defaults())
        if unknown:
            raise ModelError(f"{self.op} has no attribute {sorted(unknown)}")
        object.__setattr__(self, "attributes", operator.defaults() | dict(self.attributes))


@dataclass(frozen=True)
class Graph:
    """What a network computes. Values are numbered: first the `inputs` inputs, then one for each node, in order.

    Args:
        constants: tensors that tracing found and the module doesn't hold under a name (a causal mask, for example),
            for `graph.from_state` to put among the model's tensors. No part of what the graph is.
    """

    inputs: int
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    constants: Mapping[str, RawTensor] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for position, node in enumerate(self.nodes):
            if not all(0 <= value < self.inputs + position for value in node.inputs):
                raise ModelError(f"node {position} ({node.op}) reads values {node.inputs} that don't exist yet")
        if not all(0 <= value < self.inputs + len(self.nodes) for value in self.outputs):
            raise ModelError(f"the outputs {self.outputs} name values that don't exist")

    def tensor_names(self) -> Iterator[str]:
        """The tensors the nodes read, in order of first use."""
        yield from dict.fromkeys(name for node in self.nodes for name in node.tensors if name is not None)


@dataclass(frozen=True)
class CompressedModel:
    """A network ready to be coded: tensors by name, in order, and the graph that joins them if it is known.

    Args:
        original_parameters: how many parameters the network had before anything was removed; None: as many as here.
    """

    tensors: Mapping[str, QuantizedTensor | RawTensor]
    graph: Graph | None = None
    original_parameters: int | None = None

    def __post_init__(self) -> None:
        tensors = dict(self.tensors)
        missing = [name for name in (self.graph.tensor_names() if self.graph else ()) if name not in tensors]
        if missing:
            raise ModelError(f"the graph reads tensors that the model lacks: {missing}")
        object.__setattr__(self, "tensors", tensors)
        if self.original_parameters is None:
            object.__setattr__(self, "original_parameters", sum(tensor.size for tensor in tensors.values()))

    @property
    def parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def nonzero(self) -> int:
        return sum(tensor.nonzero for tensor in self.tensors.values())


def _frozen(array: np.ndarray) -> np.ndarray:
    """A read-only array of its own memory."""
    array = array.copy() if array.flags.writeable else array
    array.flags.writeable = False
    return array
