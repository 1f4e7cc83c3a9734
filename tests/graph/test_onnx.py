"""ONNX files: as small as the shared values allow, at all sizes, under the names one gives; onnxruntime agrees."""

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip import codec
from bayeszip.errors import ModelError
from bayeszip.graph import from_state, to_module, trace
from bayeszip.graph.onnx import to_onnx
from bayeszip.graph.onnx_tables import _gaps
from bayeszip.tensors import CompressedModel, Graph, LogGrid, Node, QuantizedTensor, RawTensor

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


def shared(
    shape: tuple[int, ...], values: int, density: float, scale: QuantizedTensor | None = None
) -> QuantizedTensor:
    dice = np.random.default_rng(values)
    symbols = dice.integers(1, values, shape) * (dice.random(shape) < density)
    codebook = np.concatenate([[0], dice.normal(size=values - 1)]).astype(np.float32)
    return QuantizedTensor(symbols, codebook, scale=scale)


def model_of(module: nn.Module, inputs: torch.Tensor, quantized: dict[str, QuantizedTensor]) -> CompressedModel:
    graph = trace(module.eval(), inputs)
    return CompressedModel(from_state(module, quantized, graph), graph)


def runs(blob: bytes, x: np.ndarray) -> np.ndarray:
    session = runtime.InferenceSession(blob, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.mark.parametrize(
    ("values", "density", "most"),
    [(14, 1.0, 0.16), (100, 1.0, 0.3), (14, 0.02, 0.04), (100, 0.02, 0.05)],
    ids=["4 bits", "8 bits", "sparse, 4 bits", "sparse, 8 bits"],
)
def test_weights_are_indices_into_a_table(values, density, most):
    weight = shared((120, 600), values, density)
    model = model_of(nn.Sequential(nn.Linear(600, 120)), torch.randn(2, 600), {"0.weight": weight})
    blob, plain = to_onnx(model), to_onnx(model, plain=True)
    onnx.checker.check_model(onnx.load_from_string(blob))
    assert len(blob) < most * weight.size * 4 < len(plain)
    x = torch.randn(3, 600)
    assert np.allclose(runs(blob, x.numpy()), to_module(model)(x).detach().numpy(), atol=1e-4)
    assert np.array_equal(runs(blob, x.numpy()), runs(plain, x.numpy()))


def test_scales_multiply_what_is_gathered():
    grid = LogGrid(0.0078125, 1.1875, 32, signed=False)
    scale = QuantizedTensor.on_grid(np.arange(64) % 31 + 1, grid)
    module = nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU())
    model = model_of(module, torch.randn(2, 32, 8, 8), {"0.weight": shared((64, 32, 3, 3), 9, 0.4, scale)})
    blob, plain = to_onnx(model), to_onnx(model, plain=True)
    assert "Mul" in {node.op_type for node in onnx.load_from_string(blob).graph.node}
    assert len(blob) < len(plain) / 4
    x = np.random.default_rng(0).normal(size=(2, 32, 8, 8)).astype(np.float32)
    assert np.array_equal(runs(blob, x), runs(plain, x))


def test_a_runtime_gathers_them_when_it_loads_the_file(tmp_path):
    weight = shared((120, 600), 14, 0.02)
    model = model_of(nn.Sequential(nn.Linear(600, 120)), torch.randn(2, 600), {"0.weight": weight})
    options = runtime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "loaded.onnx"), 3
    runtime.InferenceSession(to_onnx(model), options, providers=["CPUExecutionProvider"])
    assert {node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node} <= {"Gemm", "FusedGemm"}


def test_free_sizes_stay_free_under_the_names_one_gives():
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2))
    model = model_of(module, torch.randn(2, 3, 16, 16), {})
    blob = to_onnx(model, input_names=["image"], output_names=["map"])
    graph = onnx.load_from_string(blob).graph
    shape = [dim.dim_param or dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim]
    assert (graph.input[0].name, shape) == ("image", ["batch", 3, "image_2", "image_3"])
    assert graph.output[0].name == "map"
    x = torch.randn(5, 3, 33, 20)
    assert np.allclose(runs(blob, x.numpy()), module(x).detach().numpy(), atol=1e-5)


def test_sizes_that_do_not_stay_free_are_told(caplog):
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(2))
    model = model_of(module, torch.randn(2, 3, 16, 16), {})
    blob = to_onnx(model)
    shape = onnx.load_from_string(blob).graph.input[0].type.tensor_type.shape.dim
    free = [dim.dim_param for dim in shape[2:]] != ["", ""]
    assert ("takes inputs of the stated sizes alone" in caplog.text) is not free


def test_the_reason_that_is_told_is_the_cause(monkeypatch):
    def fails(*_given, **_more):
        raise RuntimeError("step 1/3 failed. Next steps:\n- write to the developers") from ValueError("x/2\ncan't be 3")

    model = model_of(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4), {})
    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(ModelError, match=r"can't export the network: x/2 can't be 3$"):
        to_onnx(model)


class Tagger(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.read, self.tell = layer, nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tell(self.read(x)[0])


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_a_sequence_of_outputs_is_as_long_as_its_inputs(layer, plain):
    model = model_of(Tagger(layer(8, 6, batch_first=True)), torch.randn(4, 10, 8), {})
    graph = onnx.load_from_string(to_onnx(model, plain=plain, input_names=["x"], output_names=["tags"])).graph
    taken, given = (
        [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in (graph.input[0], graph.output[0])
    )
    assert (taken, given) == (["batch", "x_1", 8], ["batch", "tags_1", 5])


class Classifier(nn.Module):
    """Reads a sequence, and says what it is by its last step, or by the last states of all layers."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.read = by, nn.LSTM(8, 6, batch_first=True, bidirectional=by == "both")
        self.tell = nn.Linear(12 if by == "both" else 6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, (states, _) = self.read(x)
        last = {"step": rows[:, -1], "state": states[-1], "both": torch.cat([states[0], states[-1]], 1)}
        return self.tell(last[self.by])


@pytest.mark.parametrize("by", ["step", "state", "both"])
def test_what_reads_the_last_step_is_exported_at_every_length(by):
    torch.manual_seed(0)
    network = Classifier(by).eval()
    model = model_of(network, torch.randn(4, 10, 8), {})
    session = runtime.InferenceSession(to_onnx(model, input_names=["x"]), providers=["CPUExecutionProvider"])
    for length in (1, 3, 10, 17):
        rows = torch.randn(2, length, 8)
        (found,) = session.run(None, {"x": rows.numpy()})
        np.testing.assert_allclose(found, network(rows).detach().numpy(), atol=1e-5)


def test_names_must_be_as_many_as_there_are():
    model = model_of(nn.Sequential(nn.Linear(3, 2)), torch.randn(2, 3), {})
    with pytest.raises(ModelError, match="has 1 inputs; 2 different names"):
        to_onnx(model, input_names=["a", "b"])


def test_long_gaps_are_filled_with_zeros():
    indices = np.zeros(2000, dtype=np.int64)
    indices[[0, 255, 256, 1021, 1999]] = [3, 1, 2, 1, 5]
    steps, entries = _gaps(indices)
    scattered = np.zeros_like(indices)
    scattered[np.cumsum(steps.astype(int))] = entries
    assert np.array_equal(scattered, indices)
    assert _gaps(np.zeros(4, dtype=np.int64)) is None


class Picks(nn.Module):
    """Rows of a table in bags, classes, the largest and what lies where they do, of tokens and a number for each."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.table, self.out = nn.EmbeddingBag(9, 4, mode="mean"), nn.Embedding(9, 6), nn.Linear(10, 3)

    def forward(self, tokens: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.table(tokens)
        own = rows.gather(1, last[:, None, None].expand(-1, 1, 6))[:, 0]
        values, places = rows.topk(2, 1)
        classes = nn.functional.one_hot(tokens, 9).to(rows.dtype).mean(1)
        return self.out(torch.cat([self.bag(tokens), own], 1)), values + rows.gather(1, places), classes


def test_what_picks_and_sorts_is_exported_and_agrees():
    torch.manual_seed(0)
    network = Picks().eval()
    inputs = torch.randint(0, 9, (4, 5)), torch.randint(0, 5, (4,))
    graph = trace(network, inputs)
    model = CompressedModel(from_state(network, graph=graph), graph)
    assert codec.decode(codec.encode(model)) == model
    blob = to_onnx(model)
    session = runtime.InferenceSession(blob, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    found = session.run(None, dict(zip(names, (each.numpy() for each in inputs), strict=True)))
    for one, other in zip(network(*inputs), found, strict=True):
        assert np.allclose(one.detach().numpy(), other, atol=1e-5)


class Last(nn.Module):
    """What lies where a sequence ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(tokens).gather(1, last[:, None, None].expand(-1, 1, 4))[:, 0])


def test_what_picks_by_an_input_is_exported_at_every_length():
    torch.manual_seed(0)
    network = Last().eval()
    graph = trace(network, (torch.randint(0, 9, (4, 12)), torch.tensor([11, 3, 0, 5])))
    assert graph.varies
    blob = to_onnx(CompressedModel(from_state(network, graph=graph), graph))
    session = runtime.InferenceSession(blob, providers=["CPUExecutionProvider"])
    tokens, last = torch.randint(0, 9, (2, 7)), torch.tensor([6, 2])
    names = [each.name for each in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, (tokens.numpy(), last.numpy()), strict=True)))
    assert np.allclose(network(tokens, last).detach().numpy(), found, atol=1e-5)


def test_numbers_that_pick_nothing_never_reach_the_exporter():
    """On these it would not end: 69 bytes of a file."""
    nodes = (
        Node("input", (0,), (), {"shape": (3,)}),
        Node("parameter", (), ("table",)),
        Node("buffer", (), ("places",)),
        Node("add_scalar", (3,), (), {"value": 2.0**60}),
        Node("cast", (4,), (), {"dtype": "int64"}),
        Node("gather", (2, 5), (), {"dim": 0}),
    )
    tensors = {
        "table": RawTensor(np.ones((3, 2), dtype=np.float32), "float32"),
        "places": RawTensor(np.zeros((1, 2), dtype=np.int64), "int64"),
    }
    with pytest.raises(ModelError, match="out of bounds"):
        to_onnx(CompressedModel(tensors, Graph(1, nodes, (6,))))
