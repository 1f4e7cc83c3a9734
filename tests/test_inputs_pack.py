"""Whatever tensors, types and modules `pack` is given: they come back, or one error names the tensor."""

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayeszip
from bayeszip import codec
from bayeszip.errors import ModelError
from bayeszip.graph import to_torch


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def unpacked(state: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """What a file gives back."""
    decoded = codec.decode(bayeszip.pack(state, **options).blob)
    return {name: to_torch(tensor) for name, tensor in decoded.tensors.items()}


EXACT: dict[str, Tensor] = {
    "empty": torch.zeros(0, 3),
    "empty, of many dimensions": torch.zeros(2, 0, 4, 0),
    "0-d": torch.tensor(3.25),
    "0-d integer": torch.tensor(7),
    "one weight": torch.tensor([[0.7]]),
    "fewer weights than components": random(3, 4),
    "all zero": torch.zeros(5, 6),
    "all equal": torch.full((5, 6), -0.3),
    "one outlier among zeros": torch.zeros(30, 30).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(1e6)),
    "two distinct values": (random(20, 20) > 0).float() * 3 - 1,
    "already quantized": (random(50, 50) * 8).round() / 16,
    "a fully pruned layer": torch.zeros(10, 20, 3, 3),
    "pruned filters": random(6, 2, 3, 1) * (torch.arange(6) % 2)[:, None, None, None],
    "NaN": torch.tensor([[1.0, float("nan")], [0.0, 2.0]]),
    "infinite": torch.tensor([[1.0, float("inf")], [-float("inf"), 2.0]]),
    "denormals": torch.tensor([[1e-42, -3e-44], [0.0, 2e-40]]),
    "1e38": torch.tensor([[1e38, -3e38], [2.0, 0.0]]),
    "1e-38": torch.tensor([[1.5e-38, -1e-38], [2e-38, 0.0]]),
    "float16": random(5, 6).half(),
    "bfloat16": random(5, 6).bfloat16(),
    "a float16 that bfloat16 lacks": torch.tensor([[65504.0, 6e-8]]).half(),
    "float64 beyond float32": torch.tensor([[1e300, 1.0], [2.0, 3.0]], dtype=torch.float64),
    "float64, too close for float32": 1e9 + random(20, 20).double() * 1e-6,
    "bool": random(4, 5) > 0,
    **{
        str(dtype).removeprefix("torch."): (random(4, 5) * 50).to(dtype)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    },
    "extreme integers": torch.tensor([-(2**63), 2**63 - 1]),
    "a vector": random(50),
    "transposed": random(6, 4).t(),
    "expanded": random(1, 5).expand(7, 5),
    "sliced": random(9, 9)[1::2, ::3],
    "backwards": random(4, 5).flip(0),
    "channels last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "needs a gradient": random(3, 3).requires_grad_(),
    "computed": random(3, 3).requires_grad_() * 2,
    "negative zero in a vector": torch.tensor([-0.0, 1.0]),
    "one dimension of many": random(1, 1, 1, 1, 1, 6, 1),
}


@pytest.mark.parametrize("scale", [1e-38, 1e-40, 1e-43])
@pytest.mark.parametrize("knob", [{"max_bytes": 400}, {"quality": 90}, {}])
def test_what_has_decayed_to_nothing_costs_others_nothing(scale, knob):
    """Numbers that float32 holds by some of their bits alone."""
    torch.manual_seed(0)
    weights = {"w": torch.randn(30, 30), "v": torch.randn(50, 50)}
    usual = bayeszip.pack(weights | {"v": weights["v"] * 1e-20}, **knob)
    tiny = bayeszip.pack(weights | {"v": weights["v"] * scale}, **knob)
    assert tiny.moved < usual.moved + 0.02
    assert tiny.bytes < 1.2 * usual.bytes


def test_a_budget_that_no_weight_fits_is_told():
    result = bayeszip.pack({"w": torch.randn(30, 30)}, max_bytes=26)
    assert result.compressed.nonzero == 0
    assert result.warnings == ("every weight is zero: allow more bytes, or a higher quality",)


def test_what_is_not_a_number_is_told_in_vectors_too():
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.bias[0] = torch.nan
    assert "bias" in bayeszip.pack(layer, example_inputs=random(2, 8)).warnings[0]


@pytest.mark.parametrize("name", EXACT)
def test_a_tensor_of_few_values_comes_back_exactly(name):
    tensor = EXACT[name].detach()
    back = unpacked({name: EXACT[name]}, components=2000)[name]
    assert back.shape == tensor.shape
    assert torch.equal(back.to(tensor.dtype).nan_to_num(), tensor.nan_to_num())
    assert torch.equal(back.isnan(), tensor.isnan())
    assert back.dtype == tensor.dtype or back.dtype == torch.float32


SCALES = {"tiny": 1e-30, "small": 1e-6, "usual": 1.0, "large": 1e6, "huge": 1e30}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_weights_of_any_scale_are_clustered_alike(name, offset):
    weights = (offset + random(100, 100)) * SCALES[name]
    back = unpacked({"w": weights}, components=32)["w"]
    error = ((back.double() - weights.double()).square().mean() / weights.double().var()).sqrt()
    # The best 32 values for a Gaussian leave √(√3π/2)/32 = 0.052 of its deviation; rounding adds what float32 must.
    assert 0.02 < error < 0.056


def test_a_tensor_may_have_more_values_than_there_are_symbols():
    weights = torch.linspace(-1, 1, 90_000).view(300, 300)
    back = unpacked({"w": weights}, components=2**16 - 1)["w"]
    assert torch.allclose(back, weights, atol=1e-3)
    with pytest.raises(ModelError, match=r"^w: a bound of .* needs 90,000 shared values, more than 65,535; raise it"):
        unpacked({"w": weights}, max_error=1e-6)


def test_zeros_stay_zeros_whatever_their_sign():
    back = unpacked({"w": torch.tensor([[-0.0, 1.0], [0.0, -2.0]])})["w"]
    assert np.signbit(back.numpy()).tolist() == [[False, False], [False, True]]


def sparse(layout: Callable[[Tensor], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return layout(torch.eye(3))


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "fp8": (lambda: random(3, 3).to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn, which can't be stored"),
    "complex": (lambda: torch.ones(3, 3, dtype=torch.complex64), "has dtype torch.complex64, which can't be stored"),
    "meta": (lambda: torch.empty(3, 3, device="meta"), "is on the meta device: it has no values"),
    "sparse": (lambda: sparse(Tensor.to_sparse), "isn't a dense tensor but torch.sparse_coo"),
    "sparse rows": (lambda: sparse(Tensor.to_sparse_csr), "isn't a dense tensor but torch.sparse_csr"),
    "quantized": (
        lambda: sparse(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        "isn't a dense tensor but a quantized one",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stored_is_refused_by_name(kind):
    make, message = REFUSED[kind]
    with pytest.raises(ModelError, match=f"^layer.odd {message}"):
        bayeszip.pack({"layer.odd": make()})
    net = nn.Linear(2, 2)
    net.register_buffer("odd", make())
    with pytest.raises(ModelError, match=f"^odd {message}"):
        bayeszip.pack(net)


def test_something_else_than_a_tensor_is_refused_by_name():
    for wrong in ("text", 3, [1.0], np.ones((2, 2)), None):
        with pytest.raises(ModelError, match=r"^layer.odd is a .*, not a tensor"):
            bayeszip.pack({"fc.weight": random(2, 2), "layer.odd": wrong})
    with pytest.raises(ModelError, match="a network or tensors by name, not a list"):
        bayeszip.pack([random(2, 2)])
    with pytest.raises(ModelError, match=r"tensors are named by text, not 3"):
        bayeszip.pack({3: random(2, 2)})


@pytest.mark.parametrize(
    "name",
    ["a.b.c.d.e", "weight", "größe.重み", "x" * 1000, "with space", "0", "a..b", ".a", "a.", "café\n", "__init__"],
)
def test_any_name_comes_back(name):
    assert list(unpacked({name: random(3, 4), "other": random(2)})) == [name, "other"]


def test_a_name_that_is_too_long_is_refused():
    with pytest.raises(ModelError, match="can't be stored"):
        bayeszip.pack({"x" * 5000: random(3, 4)})


# ── modules ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


class SharedStorage(nn.Module):
    """Two parameters that are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = random(6, 4)
        self.a, self.b = nn.Parameter(memory[:3]), nn.Parameter(memory[2:5])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.t() + x @ self.b.t()


class Buffers(nn.Module):
    kept: Tensor
    unsaved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", random(4))
        self.register_buffer("unsaved", random(4), persistent=False)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x * self.kept + self.unsaved)


class Scale(nn.Module):
    """A layer of one's own, next to a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.matrix = nn.Parameter(torch.tensor(1.5)), nn.Parameter(random(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.matrix) * self.gain


class Awkward(nn.Module):
    """Names that look like something else."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("größe", nn.Linear(4, 4))
        self.add_module("weight", nn.Linear(4, 4))
        self.register_parameter("x" * 300, nn.Parameter(random(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("weight")(self.get_submodule("größe")(x)) + self.get_parameter("x" * 300)


def norm(variance: float, eps: float = 1e-5) -> nn.Module:
    norm = nn.BatchNorm1d(6, eps=eps)
    assert norm.running_var is not None
    norm.running_var[2:4] = variance
    return nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 2))


class Lengthy(nn.Module):
    """Asks for the size of a batch as Python does, which gives a number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.reshape(len(x), -1))


class OneSize(Lengthy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row) for row in x])


def training() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 2)).train()


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 60), nn.ReLU(), nn.Linear(60, 2))
    net[0].requires_grad_(False)
    return net


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied weights, padding_idx": (Tied, torch.randint(0, 9, (3, 5))),
    "shared storage": (SharedStorage, random(3, 4)),
    "buffers": (Buffers, random(3, 4)),
    "custom layer": (Scale, random(3, 4)),
    "awkward names": (Awkward, random(3, 4)),
    "variance 0": (lambda: norm(0.0), random(3, 4)),
    "variance 0, no eps": (lambda: norm(0.0, eps=0.0), random(3, 4)),
    "variance NaN": (lambda: norm(float("nan")), random(3, 4)),
    "training mode left on": (training, random(3, 4)),
    "frozen": (frozen, random(3, 4)),
    "no parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), random(3, 4)),
    "dropout only": (lambda: nn.Dropout(0.5), random(3, 4)),
    "one layer": (lambda: nn.Linear(4, 1), random(3, 4)),
    "a layer without outputs that count": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), random(3, 4)),
    "channels last": (
        lambda: nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]  # torch's stub
        random(2, 2, 6, 6),
    ),
    "float64": (lambda: nn.Linear(4, 3).double(), random(3, 4).double()),
    "the batch as a length": (Lengthy, random(3, 2, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_comes_back_with_a_graph_and_into_its_class(name, tmp_path):
    torch.manual_seed(0)
    make, x = MODULES[name]
    net = make()
    mode, state = net.training, {key: value.clone() for key, value in net.state_dict().items()}
    result = bayeszip.pack(net, example_inputs=x, components=2000)
    assert result.without_graph is None
    assert net.training == mode
    for key, value in net.state_dict().items():
        assert torch.equal(value.nan_to_num(), state[key].nan_to_num())
    result.save(tmp_path / "net.bayz")
    bayeszip.pack(net, components=2000).save(tmp_path / "tensors.bayz")
    with torch.no_grad():
        expected = net.eval()(x)
        for file, into in (("net", None), ("net", make()), ("tensors", make())):
            found = bayeszip.load(tmp_path / f"{file}.bayz", into=into).eval()(x)
            assert torch.allclose(found, expected, atol=1e-5, equal_nan=True)
    with pytest.raises(ModelError, match="holds tensors without a graph; load it with into="):
        bayeszip.load(tmp_path / "tensors.bayz")


class ControlFlow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


class Undefined(nn.Module):
    """Says of some inputs that it has no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).masked_fill(x > 30, float("nan"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ControlFlow, "torch.export can't follow ControlFlow"),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False), "batch_norm.* without running statistics, used in"),
        (Undefined, "masked_fill with NaN|NaN has no place in a file"),
        (OneSize, "OneSize takes its batch size, 3 in the example, for a constant.*take it from the input"),
    ],
)
def test_a_module_that_cannot_be_traced_is_kept_as_tensors(make, message, caplog):
    result = bayeszip.pack(make(), example_inputs=random(3, 4))
    assert result.compressed.graph is None
    assert result.without_graph is not None
    assert re.search(message, result.without_graph)
    assert list(result.compressed.tensors) == list(make().state_dict())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(3), "^weight has no values yet; run the network once"),
        (lambda: nn.Sequential(nn.Linear(4, 3, device="meta")), r"^0\.weight has no values yet"),
        (lambda: nn.Linear(4, 3, dtype=torch.complex64), "^weight has dtype torch.complex64, which can't be stored"),
    ],
)
def test_a_module_without_values_is_refused_by_name(make, message):
    for inputs in (None, random(3, 4)):
        with pytest.raises(ModelError, match=message):
            bayeszip.pack(make(), example_inputs=inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "example_inputs must be tensors whose first dimension is the batch"),
        ((torch.tensor(1.0),), "example_inputs must be tensors whose first dimension is the batch"),
        (("text",), "example_inputs must be tensors"),
        (np.ones((2, 4)), "example_inputs must be tensors, in the order of forward, not ndarray"),
        ((random(0, 4),), "the example inputs are empty"),
        ((random(2, 4), random(3, 4)), "disagree on the batch size"),
        ((random(2, 4), random(2, 4)), "doesn't take 2 example inputs"),
        ((torch.ones(2, 4, dtype=torch.complex64),), "complex64"),
    ],
)
def test_example_inputs_that_make_no_sense_are_refused(inputs, message):
    with pytest.raises(ModelError, match=message):
        bayeszip.pack(nn.Linear(4, 3), example_inputs=inputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear, "a network or tensors by name, not a type"),
        (lambda: torch.jit.trace(nn.Linear(4, 3), random(2, 4)), r"torch\.jit has scripted or traced this network"),
        (lambda: nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 3))), "scripted or traced the part 1"),
        (
            lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)), {nn.Linear}),
            r"0\.\S+ holds its weights as a \w+, not as a tensor: the network is quantized already",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_hides_its_weights_is_refused(make, message):
    with pytest.raises(ModelError, match=message):
        bayeszip.pack(make(), example_inputs=random(2, 4))
