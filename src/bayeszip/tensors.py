"""The values that cross stages: quantized and raw tensors, the graph, and the compressed model. Frozen, numpy only.

Everything here is exact: two values are equal only if every symbol, every bit of every shared value and every
attribute is the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, repeat

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.operators import BUFFER_ROLES, OPERATORS, AttributeValue

__all__ = [
    "Aim",
    "CompressedModel",
    "Graph",
    "Grid",
    "LogGrid",
    "Node",
    "Prices",
    "QuantizedTensor",
    "RawTensor",
    "TensorPrices",
    "UniformGrid",
    "Varying",
    "sized",
]

MAX_SYMBOLS = 2**16
MAX_LOG_SYMBOLS = 2**12
#: Dimensions that one varying number may be the product of.
MAX_FACTORS = 4

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


@dataclass(frozen=True)
class UniformGrid:
    """Shared values at equal distances: symbols 0, 1, 2, 3, 4 … stand for 0, −1, 1, −2, 2 … times `step`.

    Args:
        step: the distance, a positive float32.
        size: how many symbols there are.
    """

    step: float
    size: int

    def __post_init__(self) -> None:
        _check_grid(self.size, MAX_SYMBOLS, step=self.step)
        object.__setattr__(self, "step", float(self.step))
        if self.size // 2 * self.step > _LARGEST:
            raise ModelError(f"{self.size} values at a distance of {self.step} reach beyond float32")

    @lru_cache(maxsize=8)  # noqa: B019 - a grid is a small frozen value
    def values(self) -> np.ndarray:
        """The shared values: products of `step` and integers, each rounded once to float32."""
        symbols = np.arange(self.size)
        integers = np.where(symbols % 2, -(symbols + 1) // 2, symbols // 2)
        return _frozen((integers * self.step).astype(np.float32))


@dataclass(frozen=True)
class LogGrid:
    """Shared values at equal ratios: ∓`base`, ∓`base` · `ratio`, ∓`base` · `ratio`² …, the negative of two first.

    Args:
        base: the smallest magnitude, a positive float32.
        ratio: of each magnitude to the one before, a float32 above 1.
        size: how many symbols there are; symbol 0 is 0.0.
        signed: whether there are negative values; if not, symbols 1, 2, 3 … are the magnitudes in order.
    """

    base: float
    ratio: float
    size: int
    signed: bool = True

    def __post_init__(self) -> None:
        _check_grid(self.size, MAX_LOG_SYMBOLS, base=self.base, ratio=self.ratio)
        object.__setattr__(self, "base", float(self.base))
        object.__setattr__(self, "ratio", float(self.ratio))
        if self.ratio <= 1:
            raise ModelError(f"the ratio of a grid is {self.ratio}, must be above 1")
        if self._magnitudes()[-1] > _LARGEST:
            raise ModelError(f"{self.size} values from {self.base} by {self.ratio} on reach beyond float32")

    def _magnitudes(self) -> list[float]:
        """Products in double precision, one after the other: IEEE 754 says what each is, to the last bit."""
        count = self.size // 2 if self.signed else self.size - 1
        return list(
            accumulate(repeat(self.ratio, count - 1), lambda product, ratio: product * ratio, initial=self.base)
        )

    @lru_cache(maxsize=8)  # noqa: B019 - a grid is a small frozen value
    def values(self) -> np.ndarray:
        """The shared values: magnitudes rounded to float32, with their signs."""
        magnitudes = np.array(self._magnitudes())
        if self.signed:
            magnitudes = np.stack([-magnitudes, magnitudes], axis=1).reshape(-1)[: self.size - 1]
        return _frozen(np.concatenate([[0.0], magnitudes]).astype(np.float32))


Grid = UniformGrid | LogGrid

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).smallest_normal)


def _check_grid(size: int, most: int, **numbers: float) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= most:
        raise ModelError(f"a grid has 2 to {most} symbols, not {size!r}")
    for name, number in numbers.items():
        if not _SMALLEST <= number <= _LARGEST or float(np.float32(number)) != number:
            raise ModelError(f"the {name} of a grid must be a positive float32, not {number!r}")


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Weights that take a few shared values: `codebook[symbols]`. Symbol 0 is the value 0.0.

    Args:
        symbols: integers in [0, len(codebook)), of the tensor's shape.
        codebook: float32 shared values, at most 2¹⁶; `codebook[0]` is 0.0; finite.
        grid: what the codebook's values are computed from, if a file is to say that instead of the values.
        scale: a factor for each row along `axis`, itself quantized: a vector without a scale of its own.
        axis: 0, or 1 for a transposed convolution.
    """

    symbols: np.ndarray
    codebook: np.ndarray
    grid: Grid | None = None
    scale: "QuantizedTensor | None" = None
    axis: int = 0

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
        if self.grid is not None and self.grid.values().tobytes() != codebook.tobytes():
            raise ModelError("the codebook's values are not those of its grid")
        self._check_scale()

    def _check_scale(self) -> None:
        if self.scale is None:
            if self.axis:
                raise ModelError(f"a tensor without a scale has no axis {self.axis} for it")
            return
        if self.axis not in (0, 1) or len(self.shape) < 2 or not self.size:
            raise ModelError(f"a scale goes along axis 0 or 1 of a matrix or more, not {self.axis} of {self.shape}")
        if self.scale.shape != (self.shape[self.axis],) or self.scale.scale is not None:
            raise ModelError(f"a scale for axis {self.axis} of {self.shape} can't have shape {self.scale.shape}")
        largest = float(np.abs(self.codebook).max()) * float(np.abs(self.scale.codebook).max())
        if largest > _LARGEST:
            raise ModelError(f"values times scales reach {largest:.3g}, beyond float32")

    @classmethod
    def on_grid(
        cls, symbols: np.ndarray, grid: Grid, scale: "QuantizedTensor | None" = None, axis: int = 0
    ) -> "QuantizedTensor":
        """Weights whose shared values are those of a grid.

        >>> QuantizedTensor.on_grid(np.array([0, 1, 2, 3]), UniformGrid(step=0.25, size=4)).dequantize()
        array([ 0.  , -0.25,  0.25, -0.5 ], dtype=float32)
        """
        return cls(symbols, grid.values(), grid, scale, axis)

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
        """The float32 weights: shared values, times their row's scale; no zero is negative where there is a scale."""
        values = np.asarray(self.codebook[self.symbols])
        return values if self.scale is None else values * self.row_scales() + np.float32(0)

    def row_scales(self) -> np.ndarray:
        """The scales, in a shape that multiplies the tensor's; 1 where it has none."""
        if self.scale is None:
            return np.ones((), np.float32)
        return self.scale.dequantize().reshape(-1, *(1,) * (len(self.shape) - self.axis - 1))

    def take(self, places: np.ndarray, axis: int) -> "QuantizedTensor":
        """The rows at `places` along an axis, in that order, with their scales."""
        scale = self.scale.take(places, 0) if self.scale is not None and axis == self.axis else self.scale
        symbols = np.ascontiguousarray(np.take(self.symbols, places, axis))
        if scale is not None and not symbols.size:
            return replace(self, symbols=symbols, scale=None, axis=0)
        return replace(self, symbols=symbols, scale=scale)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        return (
            (self.grid, self.axis, self.scale) == (other.grid, other.axis, other.scale)
            and np.array_equal(self.symbols, other.symbols)
            and self.codebook.tobytes() == other.codebook.tobytes()
        )


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

    @property
    def is_floating(self) -> bool:
        return "float" in self.dtype

    def numbers(self) -> np.ndarray:
        """The values in float64, which holds those of every floating-point type."""
        if self.dtype == "bfloat16":  # the upper half of a float32
            return (self.values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.values.astype(np.float64)

    def take(self, places: np.ndarray, axis: int) -> "RawTensor":
        """The rows at `places` along an axis, in that order."""
        return RawTensor(np.ascontiguousarray(np.take(self.values, places, axis)), self.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RawTensor):
            return NotImplemented
        return (
            self.dtype == other.dtype and self.shape == other.shape and self.values.tobytes() == other.values.tobytes()
        )


@dataclass(frozen=True)
class Varying:
    """A number in a node's attributes that isn't fixed, but follows the sizes of earlier values.

    It is ⌊factor · product of `dims` / divisor⌋ + offset. Without `dims`, in the shape that an `input` states, it is
    whatever comes in. What the attribute itself holds is the number at the sizes that the graph was traced at.

    Args:
        attribute: that the number is in.
        place: which one of several.
        dims: (value, dimension) pairs; a dimension that depends on the batch size can't be one.
    """

    attribute: str
    place: int = 0
    dims: tuple[tuple[int, int], ...] = ()
    factor: int = 1
    divisor: int = 1
    offset: int = 0

    def at(self, shapes: Sequence[Sequence[int]]) -> int:
        """The number, where the values so far have these shapes."""
        product = self.factor
        for value, dim in self.dims:  # spelled out: `torch.compile` takes no generator
            product *= shapes[value][dim]
        return product // self.divisor + self.offset


@dataclass(frozen=True)
class Node:
    """One operator applied: to earlier values (`inputs`) and to tensors of the model, by role (None: absent).

    Args:
        varying: the numbers among the attributes that follow the sizes of the network's inputs, in order.
    """

    op: str
    inputs: tuple[int, ...]
    tensors: tuple[str | None, ...] = ()
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    varying: tuple[Varying, ...] = ()

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
        self._check_varying([attribute.name for attribute in operator.attributes])

    def _check_varying(self, names: list[str]) -> None:
        for each in self.varying:
            value = self.attributes.get(each.attribute)
            count = len(value) if isinstance(value, tuple) else isinstance(value, int) and not isinstance(value, bool)
            if not 0 <= each.place < count:
                raise ModelError(f"{self.op} has no number {each.place} in its {each.attribute} that could vary")
            if bool(each.dims) == (self.op == "input") or len(each.dims) > MAX_FACTORS or each.divisor < 1:
                raise ModelError(f"{self.op}: {each.attribute} can't follow {len(each.dims)} dimensions")
            if self.op == "input" and (each.factor, each.divisor, each.offset) != (1, 1, 0):
                raise ModelError("what an input states is free, or it is not")
        order = [(names.index(each.attribute), each.place) for each in self.varying]
        if sorted(set(order)) != order:
            raise ModelError(f"{self.op}: what varies is not in order")

    def sized(self, shapes: Sequence[Sequence[int]]) -> dict[str, AttributeValue]:
        """The attributes, where the values so far (of an `input`: its own) have these shapes."""
        return sized(self.attributes, self.varying, shapes, self.inputs)

    def renumbered(self, values: Mapping[int, int]) -> "Node":
        """The same node where values have other numbers."""
        return replace(
            self,
            inputs=tuple(values[value] for value in self.inputs),
            varying=tuple(
                replace(each, dims=tuple((values[value], dim) for value, dim in each.dims)) for each in self.varying
            ),
        )


def sized(
    attributes: Mapping[str, AttributeValue],
    varying: Sequence[Varying],
    shapes: Sequence[Sequence[int]],
    inputs: Sequence[int],
) -> dict[str, AttributeValue]:
    """Attributes with their varying numbers worked out from the shapes of the values so far."""
    result = dict(attributes)
    for each in varying:
        number = each.at(shapes) if each.dims else shapes[inputs[0]][each.place + 1]
        old = result[each.attribute]
        result[each.attribute] = (
            (*old[: each.place], number, *old[each.place + 1 :]) if isinstance(old, tuple) else number
        )
    return result


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
            followed = [pair for each in node.varying for pair in each.dims]
            if not all(self.inputs <= value < self.inputs + position and dim >= 0 for value, dim in followed):
                raise ModelError(f"node {position} ({node.op}) follows sizes that don't exist yet: {followed}")
        if not all(0 <= value < self.inputs + len(self.nodes) for value in self.outputs):
            raise ModelError(f"the outputs {self.outputs} name values that don't exist")

    @property
    def varies(self) -> bool:
        """Whether the graph runs at more sizes than those that its inputs state."""
        return any(node.varying for node in self.nodes)

    def tensor_names(self) -> Iterator[str]:
        """The tensors the nodes read, in order of first use."""
        yield from dict.fromkeys(name for node in self.nodes for name in node.tensors if name is not None)

    def buffer_names(self) -> frozenset[str]:
        """The tensors that nodes read as statistics or masks, not as parameters."""
        return frozenset(
            name
            for node in self.nodes
            for role, name in zip(OPERATORS[node.op].tensors, node.tensors, strict=True)
            if name is not None and role in BUFFER_ROLES
        )


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


@dataclass(frozen=True, eq=False)
class TensorPrices:
    """What a coder asks for the weights of a quantized tensor, in bits, each in its live context.

    Args:
        zero: for each weight, what it costs to be zero; 0 where that goes without saying, as in a row of zeros.
        nonzero: for each weight, what it costs not to be, whichever value it has.
        value: for each symbol, what it costs a weight that is not zero to be this one; 0 for symbol 0.
        paid: for each weight, what it cost to be what it is: `zero`, or `nonzero` and the price of its value, which
            its neighbors may have made cheaper than `value`.
    """

    zero: np.ndarray
    nonzero: np.ndarray
    value: np.ndarray
    paid: np.ndarray

    def __post_init__(self) -> None:
        if not self.zero.shape == self.nonzero.shape == self.paid.shape or self.value.ndim != 1:
            raise ModelError(f"prices for weights of shapes {self.zero.shape}, {self.nonzero.shape}, {self.paid.shape}")
        for name in ("zero", "nonzero", "value", "paid"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))


@dataclass(frozen=True)
class Prices:
    """What a coder asks for a model, in bits: of its quantized tensors by name, and of all else in the file."""

    tensors: Mapping[str, TensorPrices]
    beside: float

    @property
    def bits(self) -> float:
        """What the whole file costs."""
        return self.beside + sum(float(prices.paid.sum()) for prices in self.tensors.values())


@dataclass(frozen=True, eq=False)
class Aim:
    """What the weights of a tensor are to be: it costs (w − mean)² · precision / 2 nats that one is w instead.

    Args:
        means: of the tensor's shape, in the units of its weights, scales included.
        precisions: the same; or one number for all weights.
    """

    means: np.ndarray
    precisions: np.ndarray | float

    def missed_by(self, weights: np.ndarray) -> float:
        """What it costs, in nats, that the weights are these."""
        away = weights.astype(np.float64) - self.means
        return float((0.5 * np.square(away) * self.precisions).sum())


def _frozen(array: np.ndarray) -> np.ndarray:
    """A read-only array of its own memory."""
    array = array.copy() if array.flags.writeable else array
    array.flags.writeable = False
    return array
