"""The floating-point type that a network computed in comes back, and can be changed."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import bayeszip
from bayeszip import codec, loading
from bayeszip.cli import main
from bayeszip.errors import ModelError, RecipeError
from bayeszip.graph import drop_dead_units, from_state, prove_same, to_module, trace
from bayeszip.graph.onnx import to_onnx
from bayeszip.recipe import Coding
from bayeszip.tensors import CompressedModel, QuantizedTensor

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def image_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6)
    net = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5))
    with torch.no_grad():
        conv.weight[2] = 0
        norm.bias[2] = -1.0
    return net.to(dtype).eval()


class Tokens(nn.Module):
    """Integers in, a mask made of them: only casts and tables say anything about floating-point types."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = (tokens != 0).to(self.table.weight.dtype)
        return self.head((self.table(tokens) * seen[..., None]).sum(1) / 4)


class CastsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.bfloat16()).relu()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_network_comes_back_in_its_own_type(dtype, tmp_path):
    image = torch.randn(2, 1, 8, 8, dtype=dtype)
    net = image_network(dtype)
    result = bayeszip.pack(net, example_inputs=image, components=2000)
    result.save(tmp_path / "net.bayz")
    loaded = bayeszip.load(tmp_path / "net.bayz")
    assert {each.dtype for each in loaded.parameters()} == {dtype}
    assert {each.dtype for each in loaded.buffers() if each.is_floating_point()} == {dtype}
    with torch.no_grad():
        assert torch.equal(loaded(image), result.network()(image))
        tolerance = 16 * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
        assert torch.allclose(loaded(image), net(image), rtol=tolerance, atol=tolerance)


def test_the_usual_type_costs_nothing_and_another_a_byte():
    def size(dtype: str) -> int:
        first = replace(graph.nodes[0], attributes={**graph.nodes[0].attributes, "computes_in": dtype})
        return len(codec.encode(CompressedModel(tensors, replace(graph, nodes=(first, *graph.nodes[1:])))))

    tokens = torch.randint(0, 20, (2, 4))
    graph = trace(Tokens(), tokens)
    assert dict(graph.nodes[0].attributes) == {"shape": (4,), "dtype": "int64", "computes_in": "float32"}
    tensors = from_state(Tokens(), graph=graph)
    assert size("float32") == len(codec.encode(CompressedModel(tensors, graph)))
    assert size("bfloat16") == size("float32") + 1


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16], ids=str)
def test_a_network_of_integers_too_and_its_casts_follow(dtype, asked, tmp_path):
    tokens = torch.randint(0, 20, (3, 4))
    bayeszip.pack(Tokens().to(dtype), example_inputs=tokens).save(tmp_path / "net.bayz")
    net = bayeszip.load(tmp_path / "net.bayz", dtype=asked)
    assert net(tokens).dtype == (asked or dtype)
    assert net.double()(tokens).dtype == torch.float64


def test_shared_values_are_such_that_the_type_can_hold_them():
    for dtype in (torch.bfloat16, torch.float16):
        weights = torch.randn(40, 50).to(dtype)
        for options in ({"components": 8}, {"max_error": 0.05}):
            codebook = bayeszip.pack({"w": weights}, **options).compressed.tensors["w"].codebook
            values = torch.from_numpy(np.array(codebook))
            assert torch.equal(values, values.to(dtype).float())


def test_an_input_of_another_type_is_cast_as_the_network_did():
    x = torch.randn(3, 6)
    net = CastsItsInput()
    graph = trace(net, x)
    assert (graph.nodes[0].attributes["dtype"], graph.nodes[0].attributes["computes_in"]) == ("float32", "bfloat16")
    model = CompressedModel(from_state(net, graph=graph), graph)
    loaded = to_module(model)
    assert torch.equal(loaded(x), net(x))
    assert loaded.float()(x).dtype == torch.float32
    prove_same(model, drop_dead_units(model), x)


def test_mixed_networks_compute_in_the_type_of_most_parameters():
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    net[1].float()
    assert trace(net[0], torch.randn(2, 8).bfloat16()).nodes[0].attributes["computes_in"] == "bfloat16"
    loaded = to_module(CompressedModel(from_state(net), trace(net, torch.randn(2, 8).bfloat16())))
    assert {each.dtype for each in loaded.parameters()} == {torch.bfloat16}


def test_load_into_a_class_of_another_type(tmp_path):
    """A constant becomes the bias of a layer that had none, in that layer's type."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)).eval()
    with torch.no_grad():
        net[0].weight[1] = 0
        net[0].bias[1] = 2.0
    x = torch.randn(2, 4)
    graph = trace(net, x)
    eye = QuantizedTensor(np.array([[1, 1, 2], [2, 1, 0]]), np.array([0, 0.5, -1], dtype=np.float32))
    shrunk = drop_dead_units(CompressedModel(from_state(net, {"1.weight": eye}, graph), graph), fold="always")
    assert shrunk.tensors["1.bias"].shape == (2,)
    (tmp_path / "net.bayz").write_bytes(codec.encode(shrunk))
    target = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)).double()
    loaded = bayeszip.load(tmp_path / "net.bayz", into=target)
    assert {each.dtype for each in loaded.parameters()} == {torch.float64}
    assert torch.allclose(loaded.eval()(x.double()).float(), to_module(shrunk)(x))


def test_exports_take_a_type(tmp_path):
    file, image = tmp_path / "net.bayz", torch.randn(2, 1, 8, 8).bfloat16()
    result = bayeszip.pack(image_network(torch.bfloat16), example_inputs=image, coding=Coding(keep_indices=True))
    result.save(file)
    assert result.compressed.tensors["0.weight"].shape[0] == 5
    for options, expected in (({}, torch.bfloat16), ({"dtype": "float16"}, torch.float16)):
        for dense, channels in ((False, 5), (True, 6)):
            loading.export(file, tmp_path / "net.safetensors", dense=dense, **options)
            tensors = load_file(tmp_path / "net.safetensors")
            assert {each.dtype for each in tensors.values() if each.is_floating_point()} == {expected}
            assert tensors["0.weight"].shape[0] == channels
            assert not any(name.startswith("_kept") for name in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_onnx_is_float32_whatever_the_network_unless_asked(dtype):
    onnx = pytest.importorskip("onnx")
    image = torch.randn(2, 1, 8, 8).bfloat16()
    model = bayeszip.pack(image_network(torch.bfloat16), example_inputs=image).compressed
    blob = to_onnx(model) if dtype == torch.float32 else to_onnx(model, dtype)
    kind = onnx.load_from_string(blob).graph.input[0].type.tensor_type.elem_type
    assert onnx.TensorProto.DataType.Name(kind) == ("FLOAT" if dtype == torch.float32 else "FLOAT16")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_type_that_onnxruntime_cannot_check_is_refused(dtype):
    model = bayeszip.pack(image_network(), example_inputs=torch.randn(2, 1, 8, 8)).compressed
    with pytest.raises(ModelError, match=r"onnxruntime can't run .*float32"):
        to_onnx(model, dtype)


def test_a_type_that_is_none_is_refused(tmp_path):
    bayeszip.pack(image_network(), example_inputs=torch.randn(2, 1, 8, 8)).save(tmp_path / "net.bayz")
    for wrong in ("int8", torch.int64, "half", torch.complex64):
        with pytest.raises(RecipeError, match="dtype must be one of float32"):
            bayeszip.load(tmp_path / "net.bayz", dtype=wrong)


def test_the_command_line_takes_a_type(tmp_path, monkeypatch, capsys):
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bayeszip", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0)

    monkeypatch.chdir(tmp_path)
    bayeszip.pack(image_network(), example_inputs=torch.randn(2, 1, 8, 8)).save("net.bayz")
    assert run("export", "net.bayz", "net.safetensors", "--dtype", "bfloat16") == 0
    assert load_file("net.safetensors")["0.weight"].dtype == torch.bfloat16
    assert run("export", "net.bayz", "net.safetensors", "--dtype", "int8") == 2
    assert run("evaluate", "net.bayz", "--dtype", "text") == 2
    assert capsys.readouterr().err.count("dtype must be one of float32") == 2
