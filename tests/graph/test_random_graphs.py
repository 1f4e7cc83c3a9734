"""Random graphs of the listed operators: shrunk, they compute the same.

A long search: BAYESZIP_GRAPHS=20 pytest tests/graph/test_random_graphs.py --hypothesis-profile=default \
--hypothesis-seed=N draws twenty times as many.
"""

import os
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bayeszip import codec
from bayeszip.errors import BayeszipError, ModelError
from bayeszip.graph import drop_dead_units, prove_same, to_module
from bayeszip.graph.families import RULES
from bayeszip.operators import AttributeValue
from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor, RawTensor

CODEBOOK = np.array([0.0, -0.75, 0.5, 1.25], dtype=np.float32)
#: How many times as many graphs to draw as in an ordinary run.
TIMES = int(os.environ.get("BAYESZIP_GRAPHS", "1"))

ACTIVATIONS = (
    "relu", "tanh", "sigmoid", "gelu", "silu", "relu6", "hardswish", "leaky_relu", "elu", "softplus", "abs", "neg",
    "cos", "hardsigmoid", "mish",
)  # fmt: skip


@dataclass
class Sketch:
    """A graph that grows: values by shape, tensors with planted zeros."""

    draw: st.DrawFn
    rng: np.random.Generator
    shapes: list[tuple[int, ...]]
    inputs: int
    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, QuantizedTensor | RawTensor] = field(default_factory=dict)

    def choose(self, *options):
        return self.draw(st.sampled_from(options))

    def value(self, *ranks: int) -> int:
        """Any value of one of these ranks whose first dimension is the batch; the latest is the likeliest."""
        fitting = [
            at
            for at, shape in enumerate(self.shapes)
            if len(shape) in ranks and shape[0] < 0 < min(shape[1:]) and self.is_number(at)
        ]
        if not fitting:
            raise ModelError("no such value yet")
        return fitting[-1 - min(self.draw(st.integers(0, 3)), len(fitting) - 1)]

    def is_number(self, at: int) -> bool:
        """Whether a value is no input, which its node stands for, and no truth value."""
        return at >= self.inputs and self.nodes[at - self.inputs].op != "compare"

    def weight(self, *shape: int) -> str:
        """A quantized tensor of which whole rows and columns are zero."""
        symbols = self.rng.integers(1, 4, shape)
        symbols[self.rng.random(shape) < 0.4] = 0
        for dim in range(min(2, len(shape))):
            symbols[(slice(None),) * dim + (self.rng.random(shape[dim]) < 0.35,)] = 0
        return self.store(QuantizedTensor(symbols, CODEBOOK))

    def vector(self, size: int, *, low: float = -1.0) -> str:
        values = self.rng.uniform(low, 1.5, size).astype(np.float32)
        if low < 0:
            values[self.rng.random(size) < 0.4] = 0
        return self.store(RawTensor(values, "float32"))

    def store(self, tensor: QuantizedTensor | RawTensor) -> str:
        self.tensors[f"t{len(self.tensors)}.weight"] = tensor
        return f"t{len(self.tensors) - 1}.weight"

    def bias(self, size: int) -> str | None:
        kind = self.choose("none", "raw", "quantized")
        return None if kind == "none" else self.vector(size) if kind == "raw" else self.weight(size)

    def emit(self, op: str, *inputs: int, tensors: tuple[str | None, ...] = (), **attributes: AttributeValue) -> int:
        node = Node(op, inputs, tensors, attributes)
        given = [None if name is None else self.tensors[name].shape for name in tensors]
        RULES[op].check_tensors(node, given)
        shape = RULES[op].shape(node, [self.shapes[each] for each in inputs], given)
        if any(size == 0 for size in shape) or np.prod(np.abs(shape)) > 4000:
            raise ModelError("too large")
        self.nodes.append(node)
        self.shapes.append(shape)
        return len(self.shapes) - 1


def convolution(s: Sketch) -> None:
    x = s.value(4)
    channels, after, kernel = s.shapes[x][1], s.draw(st.integers(1, 6)), s.choose(1, 3)
    groups = s.choose(1, 1, channels, 2)
    after = after * groups if groups > 1 else after
    tensors = (s.weight(after, max(1, channels // groups), kernel, kernel), s.bias(after))
    padding, stride = s.choose(0, kernel // 2), s.choose(1, 1, 2)
    mode = s.choose("zeros", "zeros", "circular") if padding else "zeros"
    s.emit("conv2d", x, tensors=tensors, padding=(padding,) * 2, stride=(stride,) * 2, groups=groups, padding_mode=mode)


def transposed_convolution(s: Sketch) -> None:
    x = s.value(4)
    channels, after, groups = s.shapes[x][1], s.draw(st.integers(1, 4)), s.choose(1, 2)
    tensors = (s.weight(channels, after, 2, 2), s.bias(after * groups))
    s.emit("conv_transpose2d", x, tensors=tensors, stride=(s.choose(1, 2),) * 2, groups=groups)


def norm(s: Sketch) -> None:
    x = s.value(2, 4)
    channels, rank = s.shapes[x][1], len(s.shapes[x])
    affine = (s.vector(channels), s.vector(channels)) if s.choose(True, True, False) else (None, None)
    kind = s.choose("batch", "batch", "group", "instance")
    if kind == "batch" or rank == 2:
        statistics = (s.vector(channels), s.vector(channels, low=0.5))
        s.emit("batch_norm2d" if rank == 4 else "batch_norm1d", x, tensors=(*affine, *statistics))
    elif kind == "group":
        s.emit("group_norm", x, tensors=affine, groups=s.choose(1, 2, channels))
    else:
        s.emit("instance_norm2d", x, tensors=affine, eps=0.1)


def layer_norm(s: Sketch) -> None:
    x = s.value(2, 3)
    width = s.shapes[x][-1]
    s.emit("layer_norm", x, tensors=(s.vector(width), s.vector(width)), shape=(width,), eps=0.1)


def linear(s: Sketch) -> None:
    x = s.value(2, 3)
    after = s.draw(st.integers(1, 8))
    s.emit("linear", x, tensors=(s.weight(after, s.shapes[x][-1]), s.bias(after)))


def activation(s: Sketch) -> None:
    s.emit(s.choose(*ACTIVATIONS), s.value(2, 3, 4))


def scalar(s: Sketch) -> None:
    s.emit(s.choose("add_scalar", "mul_scalar", "div_scalar"), s.value(2, 3, 4), value=s.choose(-2.0, 0.5, 3.0))


def pool(s: Sketch) -> None:
    x, kind = s.value(4), s.choose("max", "avg")
    size, stride, padding = s.choose((2, 2, 0), (3, 1, 1), (3, 2, 1))
    s.emit(f"{kind}_pool2d", x, kernel_size=(size,) * 2, stride=(stride,) * 2, padding=(padding,) * 2)


def resize(s: Sketch) -> None:
    x = s.value(4)
    if s.choose(True, False):
        s.emit("adaptive_avg_pool2d", x, output_size=(s.choose(1, 2),) * 2)
    else:
        s.emit("interpolate", x, size=(s.choose(3, 5),) * 2, mode=s.choose("nearest", "bilinear"))


def pad(s: Sketch) -> None:
    mode = s.choose("constant", "constant", "replicate")
    s.emit("pad", s.value(4), amounts=(1, 0, 1, 1), mode=mode, value=s.choose(0.0, 1.0) if mode == "constant" else 0.0)


def combine(s: Sketch) -> None:
    x = s.value(2, 3, 4)
    alike = [at for at, shape in enumerate(s.shapes) if shape == s.shapes[x] and s.is_number(at)]
    s.emit(s.choose("add", "mul", "sub", "maximum"), x, s.choose(*alike))


def excite(s: Sketch) -> None:
    x = s.value(4)
    scale = s.emit("mean", x, dims=(2, 3), keepdim=True)
    s.emit(s.choose("mul", "add"), x, s.emit("sigmoid", scale))


def concat(s: Sketch) -> None:
    x = s.value(2, 3, 4)
    dim = 2 if len(s.shapes[x]) == 3 else 1
    rest = (*s.shapes[x][:dim], *s.shapes[x][dim + 1 :])
    alike = [
        at for at, shape in enumerate(s.shapes)
        if len(shape) == len(s.shapes[x]) and (*shape[:dim], *shape[dim + 1 :]) == rest and s.is_number(at)
    ]  # fmt: skip
    s.emit("concat", x, s.choose(*alike), dim=dim)


def part(s: Sketch) -> None:
    x = s.value(2, 3, 4)
    dim = s.draw(st.integers(1, len(s.shapes[x]) - 1))
    start = s.draw(st.integers(0, s.shapes[x][dim] - 1))
    s.emit("slice", x, dim=dim, start=start, end=s.draw(st.integers(start + 1, s.shapes[x][dim])))


def select(s: Sketch) -> None:
    x = s.value(3, 4)
    dim = s.draw(st.integers(1, len(s.shapes[x]) - 1))
    s.emit("select", x, dim=dim, index=s.draw(st.integers(0, s.shapes[x][dim] - 1)))


def reduce(s: Sketch) -> None:
    x = s.value(3, 4)
    dims = s.choose((1,), (2,), (1, 2)) if len(s.shapes[x]) == 3 else s.choose((2, 3), (1,), (3,))
    s.emit(s.choose("mean", "sum", "amax"), x, dims=dims, keepdim=False)


def to_sequence(s: Sketch) -> None:
    x = s.value(4)
    flat = s.emit("flatten", x, start_dim=2)
    s.emit("permute", flat, dims=(0, 2, 1))


def flatten(s: Sketch) -> None:
    s.emit("flatten", s.value(3, 4))


def permute(s: Sketch) -> None:
    x = s.value(3, 4)
    order = s.draw(st.permutations(range(1, len(s.shapes[x]))))
    s.emit("permute", x, dims=(0, *order))


def reshape(s: Sketch) -> None:
    x = s.value(2, 3)
    width = s.shapes[x][-1]
    heads = s.choose(*(size for size in range(1, width + 1) if width % size == 0))
    leading = s.shapes[x][:-1]
    if s.choose(True, False):
        s.emit("view", s.emit("view", x, shape=(*leading, heads, width // heads)), shape=(*leading, width))
    else:
        s.emit("view", x, shape=(*leading, heads, width // heads))


def softmax(s: Sketch) -> None:
    s.emit(s.choose("softmax", "cumsum"), s.value(2, 3), dim=-1)


def take(s: Sketch) -> None:
    x = s.value(2, 3, 4)
    dim = s.draw(st.integers(1, len(s.shapes[x]) - 1))
    places = s.rng.integers(0, s.shapes[x][dim], s.draw(st.integers(1, 5)))
    s.emit("take", x, s.emit("buffer", tensors=(s.store(RawTensor(places.astype("<i8"), "int64")),)), dim=dim)


def largest(s: Sketch) -> None:
    """By themselves, or picked by their places: which of several equal ones is meant makes no difference."""
    x = s.value(2, 3, 4)
    dim = s.draw(st.integers(1, len(s.shapes[x]) - 1))
    said = {"k": s.draw(st.integers(1, s.shapes[x][dim])), "dim": dim, "largest": s.choose(True, False)}
    if s.choose(True, False):
        s.emit("topk", x, **said)
    else:
        s.emit("gather", x, s.emit("topk", x, **said, result="indices"), dim=dim)


def choice(s: Sketch) -> None:
    """One value or another, by which is larger."""
    x = s.value(2, 3, 4)
    other = s.emit("mul_scalar", x, value=s.choose(-1.0, 0.5))
    s.emit("where", s.emit("compare", x, other, relation="gt"), x, other)


def attention(s: Sketch) -> None:
    x = s.value(3)
    batch, steps, width = s.shapes[x]
    heads, features = s.choose(1, 2, 3), s.choose(1, 2)
    inner = heads * features
    split = [
        s.emit("permute", s.emit("view", value, shape=(batch, steps, heads, features)), dims=(0, 2, 1, 3))
        for value in (
            s.emit("linear", x, tensors=(s.weight(inner, width), s.bias(inner))) for _ in range(3)
        )
    ]  # fmt: skip
    if s.choose(True, False):
        mixed = s.emit("attention", *split, causal=s.choose(True, False))
    else:
        scores = s.emit("matmul", split[0], s.emit("permute", split[1], dims=(0, 1, 3, 2)))
        mixed = s.emit("matmul", s.emit("softmax", scores), split[2])
    merged = s.emit("view", s.emit("permute", mixed, dims=(0, 2, 1, 3)), shape=(batch, steps, inner))
    s.emit("linear", merged, tensors=(s.weight(width, inner), s.bias(width)))


def batch_folded(s: Sketch) -> None:
    """Time moves into the batch and out again."""
    x = s.value(3)
    _, steps, width = s.shapes[x]
    if s.choose(True, False):
        rows = s.emit("view", x, shape=(-steps, width))
        s.emit("view", s.emit("tanh", rows), shape=(-1, steps, width))
    else:
        turned = s.emit("permute", x, dims=(1, 0, 2))
        rows = s.emit("view", turned, shape=(-steps, width))
        s.emit("permute", s.emit("view", rows, shape=(steps, -1, width)), dims=(1, 0, 2))


def recurrent(s: Sketch) -> None:
    x = s.value(3)
    op, gates = s.choose(("lstm", 4), ("gru", 3), ("rnn", 1))
    units, width = s.draw(st.integers(1, 4)), s.shapes[x][2]
    biases = (s.weight(gates * units), s.weight(gates * units)) if s.choose(True, False) else (None, None)
    tensors = (s.weight(gates * units, width), s.weight(gates * units, units), *biases)
    result = {"result": "cell"} if op == "lstm" and s.choose(False, True) else {}
    rows = [place for place, shape in enumerate(s.shapes) if shape == (s.shapes[x][0], units)]
    states = tuple(s.choose(*rows) for _ in range(2 if op == "lstm" else 1)) if rows and s.choose(True, False) else ()
    op = f"{op}_from" if states else op
    s.emit(op, x, *states, tensors=tensors, reverse=s.choose(False, True), **result)


def parameter(s: Sketch) -> None:
    x = s.value(2, 3, 4)
    shape = tuple(1 if size < 0 or s.choose(False, True) else size for size in s.shapes[x])
    s.emit(s.choose("add", "mul"), x, s.emit("parameter", tensors=(s.weight(*shape),)))


def shared(s: Sketch) -> None:
    """A layer used a second time, on another value of its width."""
    layers = [node for node in s.nodes if node.op == "linear"]
    if not layers:
        raise ModelError("no layer yet")
    layer = s.choose(*layers)
    width = s.tensors[layer.tensors[0]].shape[1]
    fitting = [
        at for at, shape in enumerate(s.shapes) if s.is_number(at) and shape[-1:] == (width,) and len(shape) in (2, 3)
    ]
    s.emit("linear", s.choose(*fitting), tensors=layer.tensors)


GROWTH = (
    convolution, convolution, convolution, transposed_convolution, norm, norm, layer_norm, linear, linear, activation,
    activation, scalar, pool, resize, pad, combine, combine, excite, concat, part, select, reduce, to_sequence, flatten,
    permute, reshape, softmax, take, largest, choice, attention, batch_folded, recurrent, parameter, shared,
)  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> CompressedModel:
    shapes = [(-1, draw(st.integers(1, 4)), 5, 5), (-1, 3, draw(st.integers(1, 4)))]
    inputs = draw(st.integers(1, 2))
    first = draw(st.sampled_from([shapes, shapes[::-1]]))[:inputs]
    sketch = Sketch(draw, np.random.default_rng(draw(st.integers(0, 2**32))), [()] * inputs, inputs)
    for position, shape in enumerate(first):
        sketch.nodes.append(Node("input", (position,), (), {"shape": shape[1:]}))
        sketch.shapes.append(shape)
    for _ in range(draw(st.integers(2, 12))):
        before = len(sketch.nodes), dict(sketch.tensors)
        try:
            sketch.choose(*GROWTH)(sketch)
        except ModelError:  # this doesn't fit here: as if it had not been tried
            del sketch.nodes[before[0] :], sketch.shapes[inputs + before[0] :]
            sketch.tensors = before[1]
    last = len(sketch.shapes) - 1
    outputs = {last, draw(st.integers(inputs, last))}
    return CompressedModel(sketch.tensors, Graph(inputs, tuple(sketch.nodes), tuple(sorted(outputs))))


ODD = st.one_of(
    st.integers(-3, 3), st.just(2**40), st.booleans(), st.floats(), st.text(max_size=3),
    st.lists(st.one_of(st.integers(-2, 9), st.just(2**40)), max_size=4).map(tuple),
)  # fmt: skip


@settings(max_examples=150 * TIMES, deadline=None, suppress_health_check=list(HealthCheck))
@given(models(), st.data())
def test_a_hostile_graph_is_refused_or_harmless(model, data):
    """One attribute, input or tensor changed: one family of errors, or a module."""
    nodes = list(model.graph.nodes)
    at = data.draw(st.integers(0, len(nodes) - 1))
    node = nodes[at]
    try:
        if node.attributes and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(node.attributes)))
            nodes[at] = replace(node, attributes={**node.attributes, name: data.draw(ODD)})
        elif node.tensors and model.tensors:
            names = [data.draw(st.sampled_from([None, *model.tensors])) for _ in node.tensors]
            nodes[at] = replace(node, tensors=tuple(names))
        else:
            nodes[at] = replace(node, inputs=tuple(data.draw(st.integers(0, at)) for _ in node.inputs))
        network = to_module(replace(model, graph=replace(model.graph, nodes=tuple(nodes))))
    except BayeszipError:
        return
    assert isinstance(network, torch.nn.Module)


@settings(
    max_examples=250 * TIMES,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(models(), st.sampled_from(["always", "smaller", "never"]), st.sampled_from([1, 1, 4]))
def test_a_shrunk_graph_computes_the_same(model, fold, multiple_of):
    shrunk = drop_dead_units(model, fold=fold, multiple_of=multiple_of)
    prove_same(model, shrunk, rounding=None if fold != "never" else 1e-9)
    assert drop_dead_units(shrunk, fold=fold, multiple_of=multiple_of) == shrunk
    assert codec.decode(codec.encode(shrunk)) == shrunk
