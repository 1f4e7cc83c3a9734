"""The header: everything about a model but its weights, in as few bytes as it takes.

    CompressedModel ──outline_of──► Outline ──fields_of──► Header ──HEADER.write──► bytes
    CompressedModel ◄── payload ─── Outline ◄──outline── Header ◄──HEADER.read─── bytes

`Outline` is what a model is; `Header` is how a file says so, with whatever can be derived left out.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from bayeszip.codec.sizes import VARIED, Varied, varied_of, varying
from bayeszip.codec.syntax import (
    DuplicateName,
    Field,
    InvalidField,
    InvalidGraph,
    Many,
    NotCanonical,
    Number,
    Octets,
    Reader,
    Real,
    Record,
    Signed,
    Text,
    Tuple,
)
from bayeszip.errors import FormatError, ModelError, shown
from bayeszip.limits import STEPS_PER_BYTE, Budget
from bayeszip.operators import OPERATOR_OF_OPCODE, OPERATORS, Attribute, AttributeValue, Operator
from bayeszip.tensors import (
    MAX_SYMBOLS,
    RAW_DTYPES,
    CompressedModel,
    Graph,
    Grid,
    LogGrid,
    Node,
    QuantizedTensor,
    UniformGrid,
)

__all__ = [
    "OPTION_BITS",
    "Outline",
    "TensorOutline",
    "codebook_length",
    "outline_of",
    "outline_parts",
    "read_outline",
    "scaled",
    "write_outline",
]

#: the order is part of the format: a dtype's number is its place here
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
#: kinds of tensor below this number are raw dtypes, from it on codebooks
FIRST_CODEBOOK = 16
#: what follows the last dot in the names of a layer's tensors; None: the name is not of this form. Part of the format.
MEMBERS: tuple[tuple[str | None, ...], ...] = (
    ("weight", "bias"),
    ("weight",),
    ("bias",),
    ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
    ("weight", "bias", "running_mean", "running_var"),
    (None,),
)
_LONGEST_FIRST = tuple(sorted(range(len(MEMBERS)), key=lambda code: -len(MEMBERS[code])))
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**48
_MOST_ITEMS = 2**16
_LONGEST_NAME = 1000
#: Steps of decoding that a tensor takes whatever its size, a twentieth of a millisecond or so.
_STEPS_OF_TENSOR = 2**12

HAS_GRAPH, HAS_ORIGINAL, HAS_ENDS, HAS_OPTION, HAS_SCALES = 1, 2, 4, 8, 16
#: a coder's option is below 2 to the power of this
OPTION_BITS = 1 << 13
READS, OWNS = 1, 2
_ATTRIBUTE_BITS = 2


@dataclass(frozen=True)
class TensorOutline:
    """A tensor without its weights: `dtype` of a raw one, or `codebook` of a quantized one.

    `scale` outlines the scales along `axis`, under the tensor's own name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None
    codebook: int | None = None
    scale: "TensorOutline | None" = None
    axis: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Outline:
    """A model without its weights. `option` is the coder's own number.

    A codebook is a grid, or the bits of its values as float32.
    """

    tensors: tuple[TensorOutline, ...]
    codebooks: tuple[bytes | Grid, ...]
    graph: Graph | None
    original_parameters: int
    option: int = 0

    @property
    def elements(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def memory(self) -> int:
        """Bytes that the decoded tensors take, scales and codebooks included."""
        scales = (tensor.scale for tensor in self.tensors if tensor.scale is not None)
        quantities = sum(tensor.size * self.itemsize(tensor) for tensor in (*self.tensors, *scales))
        return quantities + 4 * sum(map(codebook_length, self.codebooks))

    @property
    def version(self) -> int:
        """The version of the format that can say all this, whatever the coder: 2 for grids, scales, sizes that vary."""
        grids = any(not isinstance(codebook, bytes) for codebook in self.codebooks)
        varies = self.graph is not None and self.graph.varies
        return 2 if grids or varies or any(tensor.scale is not None for tensor in self.tensors) else 1

    def charge(self, budget: Budget, size: int) -> None:
        """Take what a file of `size` bytes asks for from a budget, before any of it is decoded.

        Empty dimensions count as one: a shape of (2⁴⁰, 0) holds nothing, but says something large.
        """
        every = [*self.tensors, *(tensor.scale for tensor in self.tensors if tensor.scale is not None)]
        budget.charge("elements", sum(math.prod(max(1, each) for each in tensor.shape) for tensor in every))
        budget.charge("memory", self.memory)
        used: set[int] = set()
        for tensor in every:
            values = self.symbols(tensor)
            if tensor.codebook in used:
                budget.charge("codebooks", values)
            elif tensor.codebook is not None:
                used.add(tensor.codebook)
        steps = sum(_STEPS_OF_TENSOR + tensor.size * self._steps(tensor) for tensor in every)
        budget.charge("work", max(0, steps - STEPS_PER_BYTE * size))

    def _steps(self, tensor: TensorOutline) -> int:
        """What decoding an element takes: eight decisions a raw byte, some levels of a tree for a symbol."""
        if tensor.dtype is not None:
            return 8 * self.itemsize(tensor)
        return 2 + self.symbols(tensor).bit_length() // 2

    def itemsize(self, tensor: TensorOutline) -> int:
        if tensor.dtype is not None:
            return RAW_DTYPES[tensor.dtype].itemsize
        return 1 if self.symbols(tensor) <= 2**8 else 2

    def symbols(self, tensor: TensorOutline) -> int:
        """How many shared values a quantized tensor may take, 0.0 included."""
        return codebook_length(self.codebooks[tensor.codebook]) if tensor.codebook is not None else 0

    def values(self, tensor: TensorOutline) -> np.ndarray:
        """The shared values of a quantized tensor."""
        codebook = self.codebooks[tensor.codebook or 0]
        return np.frombuffer(codebook, dtype="<f4") if isinstance(codebook, bytes) else codebook.values()

    def grid(self, tensor: TensorOutline) -> Grid | None:
        """The grid of its shared values, if they have one."""
        codebook = self.codebooks[tensor.codebook or 0]
        return None if isinstance(codebook, bytes) else codebook


def codebook_length(codebook: bytes | Grid) -> int:
    """How many values a codebook has."""
    return len(codebook) // 4 if isinstance(codebook, bytes) else codebook.size


def outline_of(model: CompressedModel, option: int = 0) -> Outline:
    """A model's outline; equal codebooks become one, those of scales are numbered after those of tensors."""
    codebooks: dict[bytes | Grid, int] = {}
    tensors = []

    def quantized(name: str, tensor: QuantizedTensor) -> TensorOutline:
        codebook = tensor.grid or tensor.codebook.astype("<f4").tobytes()
        return TensorOutline(name, tensor.shape, codebook=codebooks.setdefault(codebook, len(codebooks)))

    for name, tensor in model.tensors.items():
        if isinstance(tensor, QuantizedTensor):
            tensors.append(quantized(name, tensor))
        else:
            tensors.append(TensorOutline(name, tensor.shape, dtype=tensor.dtype))
    for place, (name, tensor) in enumerate(model.tensors.items()):
        if isinstance(tensor, QuantizedTensor) and tensor.scale is not None:
            tensors[place] = replace(tensors[place], scale=quantized(name, tensor.scale), axis=tensor.axis)
    original = model.original_parameters
    if original is None:
        raise ModelError("a model without a count of original parameters can't be coded")
    return Outline(tuple(tensors), tuple(codebooks), model.graph, original, option)


def scaled(tensor: QuantizedTensor, scale: QuantizedTensor, axis: int) -> QuantizedTensor:
    """A tensor that was read, with the scales that were."""
    try:
        return replace(tensor, scale=scale, axis=axis)
    except ModelError as error:
        raise InvalidField(str(error)) from error


# ── the header as it stands in the file ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Layer:
    """Tensors that follow one another and share a prefix: "fc1" for "fc1.weight" and "fc1.bias".

    `head` = 8·step + number in `MEMBERS`. A step adds to the last number in the layer's name before; step 0: the
    name is that one's first `shared` bytes, then `text`. `rank` = 2·dimensions + 1 if a dimension is the chained one.
    """

    head: int
    shared: int | None
    text: bytes | None
    rank: int
    dimensions: tuple[int, ...]


@dataclass(frozen=True)
class Codebook:
    """`head` = 4·(values but the first, which is 0.0) + number of their format.

    Without values, 1 to 3 are the kinds of grids; then `extent` = 4·(values but the first) + number of the format in
    which the grid's one or two numbers are.
    """

    head: int
    extent: int | None
    values: bytes


@dataclass(frozen=True)
class Step:
    """A node: `head` = 2·opcode + 1 if anything isn't as usual; then `mask` says what, and only that follows."""

    head: int
    mask: int | None
    inputs: tuple[int, ...] | None
    tensors: tuple[int, ...] | None
    attributes: tuple[Any, ...] | None
    varied: tuple[Varied, ...] | None


@dataclass(frozen=True)
class Header:
    flags: int
    option: int | None
    original: int | None
    layers: tuple[Layer, ...]
    kinds: tuple[tuple[int, int], ...]
    scales: tuple[tuple[int, int], ...] | None
    codebooks: tuple[Codebook, ...]
    steps: tuple[Step, ...] | None
    inputs: int | None
    outputs: tuple[int, ...] | None


@dataclass(frozen=True)
class _Runs:
    """(kind, length) pairs until `total` tensors have a kind."""

    total: int

    _PAIR = Tuple((Number("kind of tensor"), Number("run of kinds")))

    def write(self, out: bytearray, value: tuple[tuple[int, int], ...]) -> None:
        for kind, length in value:
            self._PAIR.write(out, (kind, length - 1))

    def read(self, source: Reader) -> tuple[tuple[int, int], ...]:
        runs, covered = [], 0
        while covered < self.total:
            kind, length = self._PAIR.read(source)
            covered += length + 1
            runs.append((kind, length + 1))
        if covered > self.total:
            raise InvalidField(f"{covered} tensors have a kind, but there are {self.total}")
        return tuple(runs)


def _dimensions(layer: Any) -> Field:
    rank, chained = divmod(layer.rank, 2)
    if chained and not rank:
        raise InvalidField("a tensor without dimensions has none that is chained")
    return Tuple((Number("dimension", _MOST_ELEMENTS),) * (rank - chained))


def _members(head: int) -> tuple[str | None, ...]:
    if head % 8 >= len(MEMBERS):
        raise InvalidField(f"a layer has members of kind {head % 8}, which doesn't exist")
    return MEMBERS[head % 8]


LAYER = Record(
    Layer,
    {
        "head": Number("layer"),
        "shared": lambda layer: Number("shared part of a name") if layer.head < 8 else None,
        "text": lambda layer: Text("name") if layer.head < 8 else None,
        "rank": Number("number of dimensions", 2 * _MOST_DIMENSIONS + 1),
        "dimensions": _dimensions,
    },
)

FLOAT16, BFLOAT16, FLOAT32, NARROW = range(4)
MOST_NARROW = 256


@dataclass(frozen=True)
class _Narrow:
    """`count` floats of few bits: a byte each for the fraction's bits, the exponent's bits, and the lowest exponent;
    then sign, exponent above the lowest, and fraction of each, most significant bit first, filled with zeros."""

    count: int

    def write(self, out: bytearray, value: bytes) -> None:
        out += value

    def read(self, source: Reader) -> bytes:
        if self.count > MOST_NARROW:
            raise InvalidField(f"a codebook has {self.count} floats of few bits, more than {MOST_NARROW}")
        widths = source.take(3, "codebook")
        if widths[0] > 23 or widths[1] > 8:
            raise InvalidField(f"a codebook has floats of {widths[1]} + {widths[0]} bits, which float32 lacks")
        return widths + source.take((self.count * (1 + widths[0] + widths[1]) + 7) // 8, "codebook")


#: kinds of grids, by the heads of codebooks that have no values and a format
UNIFORM, LOGARITHMIC, POSITIVE = 1, 2, 3


def _values(book: Any) -> Field:
    count, number = divmod(book.head, 4)
    if book.extent is not None:
        count, number = 1 if book.head == UNIFORM else 2, book.extent % 4
        if number == NARROW:
            raise InvalidField("the numbers of a grid are not floats of few bits")
    return _Narrow(count) if number == NARROW else Octets("codebook", count * (4 if number == FLOAT32 else 2))


CODEBOOK = Record(
    Codebook,
    {
        "head": Number("codebook", 4 * MAX_SYMBOLS - 1),
        "extent": lambda book: Number("extent of a grid", 4 * MAX_SYMBOLS - 1) if 0 < book.head < 4 else None,
        "values": _values,
    },
)


def _operator(step: Any) -> Operator:
    operator = OPERATOR_OF_OPCODE.get(step.head // 2)
    if operator is None:
        raise InvalidGraph(f"opcode {step.head // 2} is not in the closed list of operators")
    return operator


def _step_inputs(step: Any) -> Field | None:
    if not step.mask or not step.mask & READS:
        return None
    count = _operator(step).inputs
    distance = Number("distance to an input")
    return Many("inputs", distance) if count < 0 else Tuple((distance,) * count)


def _step_tensors(step: Any) -> Field | None:
    if not step.mask or not step.mask & OWNS:
        return None
    return Tuple((Number("tensor of a node"),) * len(_operator(step).tensors))


def _step_attributes(step: Any) -> Field | None:
    attributes = _operator(step).attributes
    mask = (step.mask or 0) >> _ATTRIBUTE_BITS
    if mask >> len(attributes) > bool(attributes):
        raise InvalidGraph(f"{_operator(step).name} has {len(attributes)} attributes, the mask {mask} names more")
    return Tuple(tuple(_attribute_field(attribute) for i, attribute in enumerate(attributes) if mask >> i & 1))


def _varies(operator: Operator) -> int:
    """The bit of a node's mask that says that some of its numbers vary: the one behind those of its attributes."""
    return 1 << _ATTRIBUTE_BITS + len(operator.attributes)


def _step_varied(step: Any) -> Field | None:
    return Many("numbers that vary", VARIED) if (step.mask or 0) & _varies(_operator(step)) else None


def _attribute_field(attribute: Attribute) -> Field:
    if attribute.kind == "bool":  # only what differs from the default is written, and a bool differs in one way
        return Tuple(())
    if attribute.kind == "int":
        return Signed(attribute.name)
    if attribute.kind == "ints":
        return Many(attribute.name, Signed(attribute.name))
    if attribute.kind == "choice":
        return Number(attribute.name, len(attribute.choices) - 1)
    return Real(attribute.name)


STEP = Record(
    Step,
    {
        "head": Number("node"),
        "mask": lambda step: Number("mask of a node") if step.head % 2 else None,
        "inputs": _step_inputs,
        "tensors": _step_tensors,
        "attributes": _step_attributes,
        "varied": _step_varied,
    },
)


def _links(step: Step) -> int:
    """What a node counts for: itself, or as much as it reads and follows."""
    return max(1, len(step.inputs or ())) + sum(1 + len(each.dims) for each in step.varied or ())


_STEPS = Many("nodes", STEP, _MOST_ITEMS, "nodes", _links)
_OUTPUTS = Many("outputs", Number("output"), charged="nodes")

HEADER = Record(
    Header,
    {
        "flags": Number("flags", HAS_GRAPH | HAS_ORIGINAL | HAS_ENDS | HAS_OPTION | HAS_SCALES),
        "option": lambda header: (
            Number("option of the coder", 2**OPTION_BITS - 1) if header.flags & HAS_OPTION else None
        ),
        "original": lambda header: Number("original parameters") if header.flags & HAS_ORIGINAL else None,
        "layers": Many("layers", LAYER, _MOST_ITEMS, "tensors", lambda layer: len(_members(layer.head))),
        "kinds": lambda header: _Runs(sum(len(_members(layer.head)) for layer in header.layers)),
        "scales": lambda header: _Runs(sum(_may_scale(header))) if header.flags & HAS_SCALES else None,
        "codebooks": lambda header: Tuple((CODEBOOK,) * _codebook_count(header.kinds, header.scales or ())),
        "steps": lambda header: _STEPS if header.flags & HAS_GRAPH else None,
        "inputs": lambda header: Number("inputs of the graph", _MOST_ITEMS) if header.flags & HAS_ENDS else None,
        "outputs": lambda header: _OUTPUTS if header.flags & HAS_ENDS else None,
    },
)


def _may_scale(header: Any) -> Iterator[bool]:
    """For each tensor, whether it may have scales: a quantized one of two dimensions or more."""
    kinds = (kind for kind, length in header.kinds for _ in range(length))
    for layer in header.layers:
        for place in range(len(_members(layer.head))):
            yield next(kinds) >= FIRST_CODEBOOK and place == 0 and layer.rank >= 4


def _codebook_count(kinds: tuple[tuple[int, int], ...], scales: tuple[tuple[int, int], ...]) -> int:
    """Codebooks are numbered by first use, those of scales last, so each is at most one above all before it."""
    count = 0
    for kind, _ in kinds:
        if kind - FIRST_CODEBOOK > count or len(DTYPES) <= kind < FIRST_CODEBOOK:
            raise InvalidField(f"a tensor is of kind {kind}, which doesn't exist")
        count = max(count, kind - FIRST_CODEBOOK + 1)
    for scale, _ in scales:
        if (scale - 1) // 2 > count:
            raise InvalidField(f"scales are of kind {scale}, which doesn't exist")
        count = max(count, (scale - 1) // 2 + 1)
    return count


# ── to the file ───────────────────────────────────────────────────────────────────────────────────────────────────────


def write_outline(outline: Outline) -> bytes:
    """The header's bytes. An outline that the format can't hold is refused with a ModelError."""
    out = bytearray()
    try:
        HEADER.write(out, _fields_of(outline))
    except FormatError as error:
        raise ModelError(f"the model can't be stored: {error}") from error
    return bytes(out)


def outline_parts(outline: Outline) -> dict[str, int]:
    """The header's bytes by what they tell: names and shapes ("header"), the shared values, the graph."""
    told = {"codebooks": "codebooks", "steps": "graph", "inputs": "graph", "outputs": "graph"}
    parts = {"header": 0, "codebooks": 0, "graph": 0}
    for field, size in HEADER.sizes(_fields_of(outline)).items():
        parts[told.get(field, "header")] += size
    return parts


def _fields_of(outline: Outline) -> Header:
    graph = outline.graph
    ends = graph is not None and (graph.inputs != 1 or graph.outputs != (len(graph.nodes),))
    original = outline.original_parameters if outline.original_parameters != outline.elements else None
    flags = (
        HAS_GRAPH * (graph is not None)
        | HAS_ORIGINAL * (original is not None)
        | HAS_ENDS * ends
        | HAS_OPTION * (outline.option != 0)
        | HAS_SCALES * any(tensor.scale is not None for tensor in outline.tensors)
    )
    return Header(
        flags=flags,
        option=outline.option or None,
        original=original,
        layers=tuple(_layers_of(outline.tensors)),
        kinds=tuple(_runs(map(_kind, outline.tensors))),
        scales=tuple(
            _runs(_scale_kind(each) for each in outline.tensors if each.dtype is None and len(each.shape) > 1)
        ),
        codebooks=tuple(map(_codebook_of, outline.codebooks)),
        steps=None if graph is None else tuple(_steps_of(graph, [tensor.name for tensor in outline.tensors])),
        inputs=graph.inputs if ends and graph is not None else None,
        outputs=graph.outputs if ends and graph is not None else None,
    )


def _layers_of(tensors: tuple[TensorOutline, ...]) -> Iterator[Layer]:
    position, previous, chain = 0, "", None
    while position < len(tensors):
        code, prefix = _match(tensors, position)
        shape = tensors[position].shape
        step = _step_between(previous, prefix)
        shared, text = _shared(previous, prefix) if step is None else (None, None)
        chained = _chained_dimension(shape)
        is_chained = chained is not None and shape[chained] == chain
        yield Layer(
            head=8 * (step or 0) + code,
            shared=shared,
            text=text,
            rank=2 * len(shape) + is_chained,
            dimensions=tuple(size for axis, size in enumerate(shape) if not (is_chained and axis == chained)),
        )
        position += len(MEMBERS[code])
        previous = prefix
        chain = shape[0] if len(shape) > 1 else chain


def _match(tensors: tuple[TensorOutline, ...], start: int) -> tuple[int, str]:
    """The largest kind of layer whose members are the tensors from `start` on, and their prefix."""
    first = tensors[start]
    prefix, dot, last = first.name.rpartition(".")
    for code in _LONGEST_FIRST:
        roles = MEMBERS[code]
        if roles[0] != last or (dot and not prefix):
            continue
        given = tensors[start : start + len(roles)]
        expected = [(_joined(prefix, role), _member_shape(first.shape, role, roles)) for role in roles]
        if [(tensor.name, tensor.shape) for tensor in given] == expected:
            return code, prefix
    return MEMBERS.index((None,)), first.name


def _joined(prefix: str, role: str | None) -> str:
    if role is None:
        return prefix
    return f"{prefix}.{role}" if prefix else role


def _member_shape(first: tuple[int, ...], role: str | None, roles: tuple[str | None, ...]) -> tuple[int, ...]:
    """The shape of a layer's member, from that of its first: one number for each of its units."""
    if role == "num_batches_tracked":
        return ()
    return first if role == roles[0] else first[:1]


def _chained_dimension(shape: tuple[int, ...]) -> int | None:
    """Which dimension is as long as the layer before has units, as a rule."""
    return min(1, len(shape) - 1) if shape else None


def _step_between(before: str, name: str) -> int | None:
    """What must be added to the last number in `before` to get `name`, if that is all there is to it."""
    start, end = _last_number(before)
    if start == end:
        return None
    head, tail = before[:start], before[end:]
    middle = name[len(head) : len(name) - len(tail)] if len(name) >= len(head) + len(tail) else ""
    if name != head + middle + tail or not middle.isascii() or not middle.isdigit() or len(middle) > 18:
        return None
    step = int(middle) - int(before[start:end])
    return step if step > 0 and _stepped(before, step) == name else None


def _stepped(before: str, step: int) -> str:
    start, end = _last_number(before)
    if start == end:
        raise InvalidField(f"a name counts on from {shown(before)}, which has no number")
    return f"{before[:start]}{int(before[start:end]) + step}{before[end:]}"


def _last_number(name: str) -> tuple[int, int]:
    """Where the last run of ASCII digits is (its last 18 digits, should it be longer)."""
    end = len(name)
    while end and not "0" <= name[end - 1] <= "9":
        end -= 1
    start = end
    while start and "0" <= name[start - 1] <= "9" and end - start < 18:
        start -= 1
    return start, end


def _shared(before: str, name: str) -> tuple[int, bytes]:
    """How many bytes two names share at the front, and the rest of the second."""
    old, new = _utf8(before), _utf8(name)
    shared = 0
    while shared < min(len(old), len(new)) and old[shared] == new[shared]:
        shared += 1
    return shared, new[shared:]


def _utf8(name: str) -> bytes:
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ModelError(f"the tensor name {shown(name)} is not valid Unicode") from error
    if len(encoded) > _LONGEST_NAME:
        raise InvalidField(
            f"the tensor name {shown(name)} has {len(encoded)} bytes, at most {_LONGEST_NAME} are allowed"
        )
    return encoded


def _kind(tensor: TensorOutline) -> int:
    return FIRST_CODEBOOK + (tensor.codebook or 0) if tensor.dtype is None else DTYPES.index(tensor.dtype)


def _scale_kind(tensor: TensorOutline) -> int:
    """0 without scales, else 1 + 2·(number of their codebook) + axis."""
    return 0 if tensor.scale is None else 1 + 2 * (tensor.scale.codebook or 0) + tensor.axis


def _runs(kinds: Iterable[int]) -> Iterator[tuple[int, int]]:
    for kind, run in groupby(kinds):
        yield kind, len(list(run))


def _codebook_of(codebook: bytes | Grid) -> Codebook:
    """A codebook, or the numbers of its grid, in the shortest format that holds every value exactly."""
    if isinstance(codebook, bytes):
        values = np.frombuffer(codebook, dtype="<f4")[1:]
        number, stored = _shortest(values, MOST_NARROW)
        return Codebook(4 * values.size + number, None, stored)
    if isinstance(codebook, UniformGrid):
        kind, numbers = UNIFORM, [codebook.step]
    else:
        kind, numbers = LOGARITHMIC if codebook.signed else POSITIVE, [codebook.base, codebook.ratio]
    number, stored = _shortest(np.array(numbers, dtype="<f4"), most_narrow=0)
    return Codebook(kind, 4 * (codebook.size - 1) + number, stored)


def _shortest(values: np.ndarray, most_narrow: int) -> tuple[int, bytes]:
    """The number of the shortest format that holds the values, and their bytes in it."""
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    formats = {FLOAT32: values.tobytes()}
    if values.size <= most_narrow:
        formats[NARROW] = _narrowed(values.view("<u4"))
    if halves.astype("<f4").tobytes() == values.tobytes():
        formats[FLOAT16] = halves.tobytes()
    if not (values.view("<u4") & 0xFFFF).any():
        formats[BFLOAT16] = (values.view("<u4") >> 16).astype("<u2").tobytes()
    number = min(sorted(formats), key=lambda number: len(formats[number]))
    return number, formats[number]


def _narrowed(bits: np.ndarray) -> bytes:
    """Floats in as few bits for exponent and fraction as hold them all."""
    exponents = (bits >> 23 & 0xFF).astype(np.int64)
    lowest = int(exponents.min(initial=255))
    exponent_width = (int(exponents.max(initial=lowest)) - lowest).bit_length()
    used = int(np.bitwise_or.reduce(bits & 0x7FFFFF, initial=0))
    fraction_width = 23 - ((used & -used).bit_length() - 1 if used else 23)
    words = (bits >> 31).astype(np.int64) << exponent_width | exponents - lowest
    words = words << fraction_width | (bits & 0x7FFFFF).astype(np.int64) >> 23 - fraction_width
    places = np.arange(exponent_width + fraction_width, -1, -1)
    packed = np.packbits((words[:, None] >> places & 1).astype(np.uint8))
    return bytes([fraction_width, exponent_width, lowest]) + packed.tobytes()


def _widened(stored: bytes, count: int) -> np.ndarray:
    """Undoes `_narrowed`: the bits of float32."""
    fraction_width, exponent_width, lowest = stored[:3]
    width = 1 + exponent_width + fraction_width
    unpacked = np.unpackbits(np.frombuffer(stored, dtype=np.uint8, offset=3), count=count * width)
    words = unpacked.reshape(count, width).astype(np.int64) @ (1 << np.arange(width - 1, -1, -1, dtype=np.int64))
    exponents = (words >> fraction_width & (1 << exponent_width) - 1) + lowest
    if exponents.max(initial=0) > 254:
        raise InvalidField("a codebook holds a value that is not finite")
    fractions = (words & (1 << fraction_width) - 1) << 23 - fraction_width
    return (words >> width - 1 << 31 | exponents << 23 | fractions).astype("<u4")


def _steps_of(graph: Graph, names: list[str]) -> Iterator[Step]:
    places = {name: place for place, name in enumerate(names)}
    owners, cursor = _Owners(names), 0
    for position, node in enumerate(graph.nodes):
        operator = OPERATORS[node.op]
        newest = graph.inputs + position - 1
        usual = owners.usual(operator, cursor)
        tensors = tuple(0 if name is None else places[name] + 1 for name in node.tensors)
        cursor = max(cursor, *tensors) if tensors else cursor
        inputs = tuple(newest - value for value in node.inputs)
        _check_input_count(operator, len(inputs))
        values = {attribute.name: _checked(operator, attribute, node) for attribute in operator.attributes}
        changed = [attribute for attribute in operator.attributes if values[attribute.name] != attribute.default]
        mask = READS * (inputs != _usual_inputs(operator)) | OWNS * (tensors != usual)
        for attribute in changed:
            mask |= 1 << _ATTRIBUTE_BITS + operator.attributes.index(attribute)
        mask |= _varies(operator) * bool(node.varying)
        yield Step(
            head=2 * operator.opcode + (mask != 0),
            mask=mask or None,
            inputs=inputs,
            tensors=tensors,
            attributes=tuple(_stored(attribute, values[attribute.name]) for attribute in changed),
            varied=varied_of(node, operator, newest),
        )


def _usual_inputs(operator: Operator) -> tuple[int, ...]:
    """The newest values, as distances from the newest."""
    return tuple(range(abs(operator.inputs)))[::-1]


class _Owners:
    """Which tensors a node owns as a rule: the layer of the first tensor, from a cursor on, with one of its roles."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.places = {name: place for place, name in enumerate(names)}
        self.following: dict[str, list[int]] = {}

    def usual(self, operator: Operator, cursor: int) -> tuple[int, ...]:
        """Tensors as numbers from 1; 0: none."""
        if not operator.tensors:
            return ()
        if operator.name not in self.following:
            self.following[operator.name] = self._following(operator)
        place = self.following[operator.name][cursor]
        if place == len(self.names):
            return (0,) * len(operator.tensors)
        prefix = self.names[place].rpartition(".")[0]
        return tuple(self.places.get(_joined(prefix, role), -1) + 1 for role in operator.tensors)

    def _following(self, operator: Operator) -> list[int]:
        """For every cursor the next place of a tensor with one of the operator's roles, found once for all nodes."""
        following = [len(self.names)] * (len(self.names) + 1)
        for place in range(len(self.names) - 1, -1, -1):
            fits = self.names[place].rpartition(".")[2] in operator.tensors
            following[place] = place if fits else following[place + 1]
        return following


def _check_input_count(operator: Operator, count: int) -> None:
    if count != operator.inputs and not (operator.inputs < 0 and count > 0):
        raise InvalidGraph(f"{operator.name} reads {count} values, must read {operator.inputs}")


def _checked(operator: Operator, attribute: Attribute, node: Node) -> AttributeValue:
    """An attribute's value, if it is of the attribute's kind."""
    value = node.attributes[attribute.name]
    kinds: dict[str, Any] = {"int": int, "bool": bool, "float": (int, float), "choice": str, "ints": (tuple, list)}
    fits = isinstance(value, kinds[attribute.kind]) and (attribute.kind == "bool" or not isinstance(value, bool))
    if fits and isinstance(value, (tuple, list)):
        fits = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        value = tuple(value)
    if fits and attribute.kind == "choice":
        fits = value in attribute.choices
    if not fits:
        raise ModelError(f"{operator.name}'s {attribute.name} can't be {shown(value)}: {attribute.kind} expected")
    return value


def _stored(attribute: Attribute, value: AttributeValue) -> Any:
    """An attribute's value as its field holds it."""
    if attribute.kind == "bool":
        return ()
    return attribute.choices.index(str(value)) if attribute.kind == "choice" else value


# ── from the file ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_outline(source: Reader, version: int = 1) -> Outline:
    """Reads a header and checks that it is the one that `write_outline` writes, in a file of that version."""
    start = source.position
    header = HEADER.read(source)
    grids, varies = (
        any(book.extent is not None for book in header.codebooks),
        any(step.varied for step in header.steps or ()),
    )
    if version < 2 and (header.flags & HAS_SCALES or grids or varies):
        raise InvalidField(f"the file has grids, scales or sizes that vary, which version {version} lacks")
    source.budget.charge("nodes", header.inputs or 0)
    tensors = tuple(_tensors(header, source.budget))
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise DuplicateName("two tensors have the same name")
    outline = Outline(
        tensors=tensors,
        codebooks=tuple(map(_codebook, header.codebooks)),
        graph=_graph(header, tensors),
        original_parameters=0,
        option=header.option or 0,
    )
    if len(set(outline.codebooks)) != len(outline.codebooks):
        raise NotCanonical("two codebooks are equal")
    elements = outline.elements
    if elements > _MOST_ELEMENTS:
        raise InvalidField(f"the tensors have {elements} elements, more than any file may hold")
    original = elements if header.original is None else header.original
    outline = Outline(outline.tensors, outline.codebooks, outline.graph, original, outline.option)
    try:
        canonical = write_outline(outline)
    except ModelError as error:
        raise InvalidField(str(error)) from error
    if canonical != source.data[start : source.position]:
        raise NotCanonical("the header is not written in the shortest way")
    return outline


def _tensors(header: Header, budget: Budget) -> Iterator[TensorOutline]:
    """The tensors, with their scales."""
    scales = (scale for scale, length in header.scales or () for _ in range(length))
    for tensor, may_scale in zip(_unscaled(header, budget), _may_scale(header), strict=True):
        scale = next(scales, 0) if may_scale else 0
        if scale:
            codebook, axis = divmod(scale - 1, 2)
            if not tensor.size:
                raise InvalidField("an empty tensor has scales")
            vector = TensorOutline(tensor.name, tensor.shape[axis : axis + 1], codebook=codebook)
            tensor = replace(tensor, scale=vector, axis=axis)
        yield tensor


def _unscaled(header: Header, budget: Budget) -> Iterator[TensorOutline]:
    kinds = (kind for kind, length in header.kinds for _ in range(length))
    previous, chain = "", None
    for layer in header.layers:
        prefix = _name(layer, previous)
        shape = _shape(layer, chain)
        roles = _members(layer.head)
        budget.charge("names", len(roles) * len(prefix.encode()) + sum(len(role or "") + 1 for role in roles))
        for role in roles:
            kind = next(kinds)
            yield TensorOutline(
                name=_joined(prefix, role),
                shape=_member_shape(shape, role, roles),
                dtype=DTYPES[kind] if kind < len(DTYPES) else None,
                codebook=kind - FIRST_CODEBOOK if kind >= FIRST_CODEBOOK else None,
            )
        previous = prefix
        chain = shape[0] if len(shape) > 1 else chain


def _name(layer: Layer, previous: str) -> str:
    if layer.shared is None or layer.text is None:
        return _stepped(previous, layer.head // 8)
    front = _utf8(previous)
    if layer.shared > len(front):
        raise InvalidField(f"a name shares {layer.shared} bytes with one of {len(front)}")
    if layer.shared + len(layer.text) > _LONGEST_NAME:
        raise InvalidField(f"a name has {layer.shared + len(layer.text)} bytes, at most {_LONGEST_NAME} are allowed")
    try:
        return (front[: layer.shared] + layer.text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField("a tensor's name is not UTF-8") from error


def _shape(layer: Layer, chain: int | None) -> tuple[int, ...]:
    if layer.rank % 2 == 0:
        shape = layer.dimensions
    elif chain is None:
        raise InvalidField("a dimension is chained to a layer before, but there is none")
    else:
        place = min(1, len(layer.dimensions))
        shape = (*layer.dimensions[:place], chain, *layer.dimensions[place:])
    if math.prod(max(dimension, 1) for dimension in shape) > _MOST_ELEMENTS:
        raise InvalidField(f"a tensor of shape {shown(shape)} is larger than any file may hold")
    return shape


def _codebook(book: Codebook) -> bytes | Grid:
    """A codebook as its grid, or as the bits of its values as float32."""
    if book.extent is None:
        return bytes(4) + _bits(book.values, *divmod(book.head, 4))
    numbers = np.frombuffer(_bits(book.values, 1 if book.head == UNIFORM else 2, book.extent % 4), dtype="<f4").tolist()
    size = book.extent // 4 + 1
    try:
        if book.head == UNIFORM:
            return UniformGrid(numbers[0], size)
        return LogGrid(numbers[0], numbers[1], size, signed=book.head == LOGARITHMIC)
    except ModelError as error:
        raise InvalidField(str(error)) from error


def _bits(stored: bytes, count: int, form: int) -> bytes:
    """Values of a format as the bits of float32."""
    if form == FLOAT16:
        values = np.frombuffer(stored, dtype="<f2").astype("<f4")
    elif form == BFLOAT16:
        values = (np.frombuffer(stored, dtype="<u2").astype("<u4") << 16).view("<f4")
    elif form == NARROW:
        values = _widened(stored, count).view("<f4")
    else:
        values = np.frombuffer(stored, dtype="<f4")
    if not np.isfinite(values).all():
        raise InvalidField("a codebook holds a value that is not finite")
    return values.tobytes()


def _graph(header: Header, tensors: tuple[TensorOutline, ...]) -> Graph | None:
    if header.steps is None:
        if header.flags & HAS_ENDS:
            raise InvalidGraph("the file has inputs and outputs but no graph")
        return None
    inputs = 1 if header.inputs is None else header.inputs
    outputs = (len(header.steps),) if header.outputs is None else header.outputs
    try:
        return Graph(inputs, tuple(_nodes(header.steps, inputs, [tensor.name for tensor in tensors])), outputs)
    except ModelError as error:
        raise InvalidGraph(str(error)) from error


def _nodes(steps: tuple[Step, ...], inputs: int, names: list[str]) -> Iterator[Node]:
    owners, cursor = _Owners(names), 0
    for position, step in enumerate(steps):
        operator = _operator(step)
        tensors = owners.usual(operator, cursor) if step.tensors is None else step.tensors
        cursor = max(cursor, *tensors) if tensors else cursor
        if cursor > len(names):
            raise InvalidGraph(f"node {position} reads tensor {cursor}, but there are {len(names)}")
        distances = _usual_inputs(operator) if step.inputs is None else step.inputs
        _check_input_count(operator, len(distances))
        yield Node(
            operator.name,
            tuple(inputs + position - 1 - distance for distance in distances),
            tuple(names[number - 1] if number else None for number in tensors),
            dict(_attributes(operator, step)),
            varying(step.varied or (), operator, inputs + position - 1),
        )


def _attributes(operator: Operator, step: Step) -> Iterator[tuple[str, AttributeValue]]:
    mask = (step.mask or 0) >> _ATTRIBUTE_BITS
    changed = [attribute for i, attribute in enumerate(operator.attributes) if mask >> i & 1]
    for attribute, value in zip(changed, step.attributes or (), strict=True):
        if attribute.kind == "bool":
            yield attribute.name, not attribute.default
        else:
            yield attribute.name, attribute.choices[value] if attribute.kind == "choice" else value
