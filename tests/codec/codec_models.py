"""Models for the codec's tests: LeNet-like ones, and hypothesis strategies for any."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bayeszip.tensors import (
    RAW_DTYPES,
    CompressedModel,
    Graph,
    LogGrid,
    Node,
    QuantizedTensor,
    RawTensor,
    UniformGrid,
    Varying,
)

__all__ = ["compressed_models", "graph_of_chain", "lenet", "newer_tensors", "quantized_tensors", "raw_tensors"]


def lenet(seed: int = 0, density: float = 0.015, values: int = 16) -> CompressedModel:
    """LeNet-300-100 with random weights, graph included."""
    random = np.random.default_rng(seed)
    codebook = np.concatenate([[0.0], random.normal(size=values)]).astype(np.float16).astype(np.float32)
    tensors = {}
    for number, (rows, columns) in enumerate([(300, 784), (100, 300), (10, 100)], 1):
        for name, shape in (("weight", (rows, columns)), ("bias", (rows,))):
            symbols = random.integers(1, values + 1, size=shape) * (random.random(shape) < density)
            tensors[f"fc{number}.{name}"] = QuantizedTensor(symbols, codebook)
    return CompressedModel(tensors, graph_of_chain(["fc1", "fc2", "fc3"]), original_parameters=266_610)


def graph_of_chain(layers: list[str]) -> Graph:
    """flatten, then linear layers with ReLU between them."""
    nodes = [Node("flatten", (0,))]
    for layer in layers:
        nodes.append(Node("linear", (len(nodes),), (f"{layer}.weight", f"{layer}.bias")))
        nodes.append(Node("relu", (len(nodes),)))
    return Graph(1, tuple(nodes[:-1]), (len(nodes) - 1,))


_SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


@st.composite
def quantized_tensors(draw: st.DrawFn) -> QuantizedTensor:
    values = draw(st.sampled_from([0, 1, 2, 3, 16, 255, 256, 300]))
    widths: tuple[Literal[16, 32], ...] = (16, 32)
    width = draw(st.sampled_from(widths))
    finite = st.floats(allow_nan=False, allow_infinity=False, width=width)
    codebook = np.zeros(values + 1, dtype=np.float32)
    codebook[1:] = draw(hnp.arrays(np.float32, values, elements=finite, fill=finite))
    symbols = draw(hnp.arrays(np.int64, draw(_SHAPES), elements=st.integers(0, values), fill=st.just(0)))
    return QuantizedTensor(symbols, codebook)


@st.composite
def grids(draw: st.DrawFn) -> UniformGrid | LogGrid:
    size = draw(st.sampled_from([2, 3, 4, 17, 256, 257, 700]))
    step = draw(st.floats(2**-20, 2**10, width=draw(st.sampled_from([16, 32]))))
    if draw(st.booleans()):
        return UniformGrid(step, size)
    ratio = draw(st.sampled_from([2**0.03125, 1.0078125]))
    return LogGrid(step, float(np.float32(ratio)), size, signed=draw(st.booleans()))


@st.composite
def symbols_of(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> np.ndarray:
    return draw(hnp.arrays(np.int64, shape, elements=st.integers(0, size - 1), fill=st.just(0)))


@st.composite
def newer_tensors(draw: st.DrawFn) -> QuantizedTensor:
    """Tensors that version 1 can't hold: on a grid, with scales, or both."""
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5))
    grid = draw(grids())
    axis = draw(st.sampled_from([None, 0, 1]))
    if axis is None:
        return QuantizedTensor.on_grid(draw(symbols_of(shape, grid.size)), grid)
    along = draw(grids())
    scale = QuantizedTensor.on_grid(draw(symbols_of((shape[axis],), along.size)), along)
    if draw(st.booleans()):
        scale = QuantizedTensor(scale.symbols, scale.codebook)
    if draw(st.booleans()):
        return QuantizedTensor(draw(symbols_of(shape, 3)), np.array([0, 1.5, -0.25]), None, scale, axis)
    return QuantizedTensor.on_grid(draw(symbols_of(shape, grid.size)), grid, scale, axis)


@st.composite
def raw_tensors(draw: st.DrawFn) -> RawTensor:
    dtype = draw(st.sampled_from(sorted(RAW_DTYPES)))
    held = RAW_DTYPES[dtype]
    shape = draw(_SHAPES)
    count = int(np.prod(shape)) * held.itemsize
    octets = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8)
    if dtype == "bool":
        octets = octets & np.uint8(1)
    return RawTensor(octets.view(held).reshape(shape), dtype)


_NAMES = st.one_of(
    st.text(max_size=8),
    st.builds(
        "{}{}.{}".format,
        st.sampled_from(["fc", "layer1.0.conv", "", "features."]),
        st.integers(0, 12),
        st.sampled_from(["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]),
    ),
)


@st.composite
def compressed_models(draw: st.DrawFn) -> CompressedModel:
    names = draw(st.lists(_NAMES, max_size=6, unique=True))
    tensors = {name: draw(st.one_of(quantized_tensors(), raw_tensors(), newer_tensors())) for name in names}
    nodes = []
    inputs = draw(st.integers(1, 3))
    for position in range(draw(st.integers(0, 6))):
        op = draw(st.sampled_from(["linear", "conv2d", "max_pool2d", "relu", "reshape"]))
        owned = tuple(draw(st.sampled_from([None, *names])) for _ in range(2 if op in ("linear", "conv2d") else 0))
        attributes = draw(st.fixed_dictionaries({}, optional=_ATTRIBUTES.get(op, {})))
        node = Node(op, (draw(st.integers(0, inputs + position - 1)),), owned, attributes)
        nodes.append(replace(node, varying=draw(_varying(node, inputs, inputs + position - 1))))
    values = st.integers(0, inputs + len(nodes) - 1)
    graph = draw(st.one_of(st.none(), st.builds(Graph, st.just(inputs), st.just(tuple(nodes)), st.tuples(values))))
    original = draw(st.one_of(st.none(), st.integers(0, 2**40)))
    return CompressedModel(tensors, graph, original)


@st.composite
def _varying(draw: st.DrawFn, node: Node, inputs: int, newest: int) -> tuple[Varying, ...]:
    """Numbers of the node's last attribute that follow earlier values, if there are any."""
    name, value = list(node.attributes.items())[-1] if node.op == "reshape" else ("", ())
    if newest < inputs or not isinstance(value, tuple) or not value:
        return ()
    dims = st.lists(st.tuples(st.integers(inputs, newest), st.integers(0, 4)), min_size=1, max_size=4).map(tuple)
    numbers = st.tuples(st.integers(-9, 2**20), st.integers(1, 300), st.integers(-(2**40), 2**40))
    places = sorted(draw(st.sets(st.integers(0, len(value) - 1), max_size=3)))
    return tuple(Varying(name, place, draw(dims), *draw(st.one_of(st.just((1, 1, 0)), numbers))) for place in places)


_INTS = st.tuples(st.integers(-9, 9), st.integers(0, 2**40))
_ATTRIBUTES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "conv2d": {
        "stride": _INTS,
        "groups": st.integers(1, 99),
        "padding_mode": st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    },
    "max_pool2d": {"kernel_size": _INTS, "ceil_mode": st.booleans()},
    "reshape": {"shape": st.lists(st.integers(-1, 9), max_size=5).map(tuple)},
}
