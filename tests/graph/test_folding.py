"""Batch norms folded into scales and biases: the same function, fewer tensors, norms back where a class has them."""

import numpy as np
import pytest
import torch
from torch import nn

import bayeszip
from bayeszip import graph
from bayeszip.graph.folding import fold_norms
from bayeszip.quantize import cluster, round_norms
from bayeszip.recipe import Coding
from bayeszip.result import Form, write_weights
from bayeszip.tensors import CompressedModel, LogGrid, QuantizedTensor, RawTensor, UniformGrid


@pytest.mark.parametrize("place", [0, 1, 2])
def test_norms_without_a_shift_are_packed(place):
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers.insert(place, nn.RMSNorm(8))
    inputs = torch.randn(4, 8)
    network = nn.Sequential(*layers).eval()
    result = bayeszip.pack(network, example_inputs=inputs, quality=99.9)
    torch.testing.assert_close(result.model(inputs), network(inputs), rtol=0.02, atol=0.02)


def test_weights_of_norms_without_a_shift_are_rounded_beside_others():
    layers = [nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.LayerNorm(16, bias=False)]
    network = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for norm in (network[1], network[3], network[4]):
            norm.weight.uniform_(0.5, 2.0)
    result = bayeszip.pack(network, example_inputs=torch.randn(4, 8), coding=Coding())
    held = {name: result.compressed.tensors[name] for name in ("1.weight", "3.weight", "4.weight")}
    assert {type(tensor.grid) for tensor in held.values()} == {LogGrid}


def without_affine() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, affine=False), nn.ReLU()]
    layers += [nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5, affine=False), nn.ReLU(), nn.BatchNorm2d(5, affine=False)]
    return nn.Sequential(*layers)


def test_norms_without_parameters_are_folded_and_come_back_as_statistics(tmp_path):
    network, inputs = lively(without_affine()), torch.randn(4, 3, 8, 8)
    result = bayeszip.pack(network, example_inputs=inputs, quality=99.9)
    # The last one has no layer before it that could take it.
    assert {name for name in result.compressed.tensors if "running" in name} == {"6.running_mean", "6.running_var"}
    torch.testing.assert_close(result.model(inputs), network(inputs), rtol=0.02, atol=0.02)
    result.save(tmp_path / "net.bayz")
    net = bayeszip.load(tmp_path / "net.bayz", into=without_affine())
    torch.testing.assert_close(net(inputs), result.model(inputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net[1].running_var, torch.full((6,), 1 - 1e-5))


def lively(network: nn.Module) -> nn.Module:
    """Norms as a training leaves them: no factor 1, no shift 0, some factors negative."""
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in network.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                assert layer.running_mean is not None
                assert layer.running_var is not None
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.2, 3.0)
                if layer.affine:
                    layer.weight.normal_()
                    layer.bias.normal_()
    return network.eval()


class Block(nn.Module):
    """Norms behind a convolution, behind one with a bias, behind a sum, and behind a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.bn3 = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False)
        self.bn4 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)
        self.bn5 = nn.BatchNorm1d(5)

    def forward(self, x):
        first = torch.relu(self.bn1(self.conv1(x)))
        hidden = torch.relu(self.bn3(first + self.bn2(self.conv2(first))))
        hidden = torch.relu(self.bn4(self.up(hidden)))
        return self.bn5(self.fc(hidden.mean((2, 3))))


def compressed(network: nn.Module, x: torch.Tensor) -> CompressedModel:
    """Matrices and kernels by shared values, everything else raw."""
    traced = graph.trace(network, (x,))
    quantized = {
        name: cluster(parameter.detach().numpy(), 16)
        for name, parameter in network.named_parameters()
        if parameter.dim() > 1
    }
    write_weights(network, quantized)
    return CompressedModel(graph.from_state(network, quantized, traced), traced)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return lively(Block())


INPUT = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(2))


def test_the_function_stays_and_norms_go(block):
    model = compressed(block, INPUT)
    folded, deviations = fold_norms(model)
    assert graph.prove_same(model, folded, (INPUT,)) < 1e-5
    ops = [node.op for node in folded.graph.nodes]
    # The one behind a sum has nothing to be folded into.
    assert sum(op.startswith("batch_norm") for op in ops) == 1
    assert set(folded.graph.tensor_names()) == {
        "conv1.weight", "bn1.bias", "conv2.weight", "bn2.bias", "up.weight", "bn4.bias", "fc.weight", "bn5.bias",
        "bn3.weight", "bn3.bias", "bn3.running_mean", "bn3.running_var",
    }  # fmt: skip
    assert set(deviations) == {f"bn{n}.bias" for n in range(1, 6)}
    assert deviations["bn4.bias"] == pytest.approx(float(block.bn4.weight.detach().square().mean().sqrt()))


def test_symbols_and_zeros_stay_what_they_are(block):
    with torch.no_grad():
        block.conv2.weight[:, ::2] = 0
    model = compressed(block, INPUT)
    folded, _ = fold_norms(model)
    for name in ("conv1.weight", "conv2.weight", "up.weight", "fc.weight"):
        assert np.array_equal(folded.tensors[name].symbols, model.tensors[name].symbols)
        assert np.array_equal(folded.tensors[name].codebook, model.tensors[name].codebook)
    scale = folded.tensors["conv2.weight"].scale.dequantize()
    norm = block.bn2
    expected = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().numpy()
    np.testing.assert_allclose(scale, expected, rtol=1e-6)
    assert folded.tensors["up.weight"].axis == 1


def test_what_cannot_be_folded_takes_two_vectors(block):
    folded, _ = fold_norms(compressed(block, INPUT))
    for name in ("bn3.running_mean", "bn3.running_var"):
        assert isinstance(folded.tensors[name], QuantizedTensor)
        assert len(np.unique(folded.tensors[name].symbols)) == 1


def test_a_norm_that_is_used_twice_takes_two_vectors():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.norm = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.norm(self.two(torch.relu(self.norm(self.one(inputs)))))

    torch.manual_seed(0)
    model = compressed(lively(Shared()), INPUT)
    folded, _ = fold_norms(model)
    assert [node.op for node in folded.graph.nodes].count("batch_norm2d") == 2
    assert isinstance(folded.tensors["norm.running_var"], QuantizedTensor)
    graph.prove_same(model, folded, (INPUT,))


def test_what_is_frozen_or_not_quantized_is_left_alone(block):
    model = compressed(block, INPUT)
    folded, deviations = fold_norms(model, frozen={"bn1.weight"})
    assert isinstance(folded.tensors["bn1.running_var"], RawTensor)
    assert "bn1.bias" not in deviations
    raw = CompressedModel(
        {
            name: RawTensor(tensor.dequantize(), "float32") if name == "conv1.weight" else tensor
            for name, tensor in model.tensors.items()
        },
        model.graph,
    )
    kept, _ = fold_norms(raw)
    # Behind a convolution that stays as it was, a norm still has two vectors.
    assert isinstance(kept.tensors["conv1.weight"], RawTensor)
    assert "bn1.running_var" in kept.tensors
    graph.prove_same(raw, kept, (INPUT,))


def test_a_norm_whose_input_others_read_too_stays():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            hidden = self.conv(x)
            return self.bn(hidden) + hidden

    network = lively(Twice())
    model = compressed(network, INPUT)
    folded, _ = fold_norms(model)
    assert any(node.op == "batch_norm2d" for node in folded.graph.nodes)
    graph.prove_same(model, folded, (INPUT,))


@pytest.mark.parametrize("error", [0.001, 0.01, 0.1])
def test_rounding_moves_as_far_as_it_may(block, error):
    folded, deviations = fold_norms(compressed(block, INPUT))
    rounded = round_norms(folded, deviations, error)
    ratios, moves = [], []
    for name, tensor in folded.tensors.items():
        other = rounded.tensors[name]
        if isinstance(tensor, QuantizedTensor) and tensor.scale is not None:
            assert isinstance(other.scale.grid, LogGrid)
            assert np.array_equal(other.symbols, tensor.symbols)
            ratios += list(other.scale.dequantize() / tensor.scale.dequantize() - 1)
        elif name in deviations:
            assert isinstance(other.grid, UniformGrid)
            # Two bytes tell the step.
            assert np.float32(other.grid.step).view(np.uint32) & 0xFFFF == 0
            moves += list((other.dequantize() - tensor.values) / deviations[name])
    assert isinstance(rounded.tensors["bn3.weight"].grid, LogGrid)
    assert np.sqrt(np.square(ratios).mean()) < 1.2 * error
    assert np.abs(ratios).max() < 2 * error
    assert np.sqrt(np.square(moves).mean()) < 2 * error
    assert round_norms(folded, deviations, 0.0) is folded


@pytest.mark.parametrize("features", [5, 7])
def test_a_norm_over_another_dimension_than_a_linear_layer_makes_is_not_folded(features):
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, features), nn.BatchNorm1d(5)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(inputs))

    torch.manual_seed(0)
    network, inputs = lively(Sequence()), torch.randn(3, 5, 4)
    model = compressed(network, inputs)
    folded, _ = fold_norms(model)
    assert [node.op for node in folded.graph.nodes][-1] == "batch_norm1d"
    graph.prove_same(model, folded, (inputs,))
    assert bayeszip.pack(network, example_inputs=(inputs,)).bytes > 0


def test_a_shift_that_no_grid_holds_stays_as_it_is(block):
    with torch.no_grad():
        block.bn1.weight.fill_(1e-3)
        block.bn1.bias.fill_(0.7)
    folded, deviations = fold_norms(compressed(block, INPUT))
    rounded = round_norms(folded, deviations, 0.004)
    assert rounded.tensors["bn1.bias"] is folded.tensors["bn1.bias"]
    assert bayeszip.pack(block, example_inputs=(INPUT,)).bytes > 0


def test_a_file_without_norms_is_smaller_and_computes_the_same(block):
    model = compressed(block, INPUT)
    quantized = {name: tensor for name, tensor in model.tensors.items() if isinstance(tensor, QuantizedTensor)}
    kept = Form(block, (INPUT,), Coding(norms="keep")).code(quantized)
    exact = Form(block, (INPUT,), Coding(norm_error=0.0)).code(quantized)
    folded = Form(block, (INPUT,), Coding()).code(quantized)
    assert folded.bytes < exact.bytes < kept.bytes
    expected = block(INPUT)
    torch.testing.assert_close(exact.model(INPUT), expected, rtol=1e-4, atol=1e-4)
    assert (folded.model(INPUT) - expected).square().mean().sqrt() < 0.03 * expected.std()
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in folded.model.modules()) == 1


def test_a_class_gets_its_norms_back(block, tmp_path):
    model = compressed(block, INPUT)
    quantized = {name: tensor for name, tensor in model.tensors.items() if isinstance(tensor, QuantizedTensor)}
    result = Form(block, (INPUT,), Coding()).code(quantized)
    result.save(tmp_path / "net.bayz")
    own = bayeszip.load(tmp_path / "net.bayz", into=Block())
    assert isinstance(own.bn1, nn.BatchNorm2d)
    torch.testing.assert_close(own.eval()(INPUT), result.model(INPUT), rtol=1e-4, atol=1e-4)


def test_dead_channels_go_with_their_scales(block):
    with torch.no_grad():
        block.conv1.weight[1:3] = 0
        block.bn1.bias[1] = -1.0  # dead behind the rectifier, whatever its input
        block.bn1.weight[1] = 0.0
    model = compressed(block, INPUT)
    quantized = {name: tensor for name, tensor in model.tensors.items() if isinstance(tensor, QuantizedTensor)}
    result = Form(block, (INPUT,), Coding(norm_error=0.0)).code(quantized)
    weight = result.compressed.tensors["conv1.weight"]
    assert weight.scale.shape == weight.shape[:1]
    torch.testing.assert_close(result.model(INPUT), block(INPUT), rtol=1e-4, atol=1e-4)


def test_clustering_keeps_norms_bit_for_bit(block):
    result = bayeszip.pack(block, example_inputs=(INPUT,), components=64)
    assert np.array_equal(result.compressed.tensors["bn1.running_var"].values, block.bn1.running_var.numpy())


SHORT = [torch.float16, torch.bfloat16]


def layered(dtype: torch.dtype) -> nn.Sequential:
    """A norm to fold, one that takes two vectors, and one of another kind."""
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.BatchNorm2d(32)]
    network = lively(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(32)))
    assert isinstance(network, nn.Sequential)
    return network.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, *SHORT])
def test_norms_of_every_type_are_folded_and_rounded(dtype, tmp_path):
    network, inputs = layered(dtype), torch.randn(4, 3, 8, 8).to(dtype)
    plain = bayeszip.pack(layered(torch.float32), example_inputs=inputs.float())
    result = bayeszip.pack(network, example_inputs=inputs)
    assert list(result.compressed.tensors) == list(plain.compressed.tensors)
    assert result.bytes < 1.05 * plain.bytes
    torch.testing.assert_close(result.network()(inputs), network(inputs), rtol=0.1, atol=0.1)
    result.save(tmp_path / "net.bayz")
    into = bayeszip.load(tmp_path / "net.bayz", into=layered(dtype))
    torch.testing.assert_close(into(inputs), result.network()(inputs), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", SHORT)
def test_short_norms_that_are_not_to_be_rounded_stay(dtype):
    network, inputs = layered(dtype), torch.randn(4, 3, 8, 8).to(dtype)
    quantized = {"0.weight": cluster(network[0].weight.detach().float().numpy(), 32)}
    result = Form(network, (inputs,), Coding(norm_error=0)).code(quantized)
    for name in ("1.weight", "1.running_var", "3.weight", "3.running_var"):
        assert result.compressed.tensors[name] == graph.to_raw(network.state_dict()[name])


def test_two_vectors_of_float64_are_as_good_as_four():
    network, inputs = layered(torch.float64), torch.randn(4, 3, 8, 8).double()
    traced = graph.trace(network, inputs)
    model = CompressedModel(graph.from_state(network, {}, traced), traced)
    folded, _ = fold_norms(model)
    assert isinstance(folded.tensors["3.running_var"], QuantizedTensor)
    assert graph.difference(model, folded, inputs).worst < 1e-14


@pytest.mark.parametrize(("dtype", "stays"), [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)])
def test_a_norm_whose_factors_float16_cannot_hold_is_not_folded_there(dtype, stays):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    with torch.no_grad():
        network[1].running_var.fill_(6e4)
        network[1].weight.fill_(1e-3)
    network.to(dtype)
    traced = graph.trace(network, torch.randn(2, 3, 8, 8).to(dtype))
    quantized = {"0.weight": cluster(network[0].weight.detach().float().numpy(), 32)}
    folded, _ = fold_norms(CompressedModel(graph.from_state(network, quantized, traced), traced))
    assert ("1.running_var" in folded.tensors) is stays


def test_norms_beyond_float32_are_left_alone():
    network, inputs = layered(torch.float64), torch.randn(4, 3, 8, 8).double()
    with torch.no_grad():
        network[1].weight[0], network[3].weight[0], network[6].weight[0] = 1e-60, 1e-60, 1e-60
    result = bayeszip.pack(network, example_inputs=inputs, quality=99.9)
    assert {"1.running_var", "3.running_var"} <= set(result.compressed.tensors)
    torch.testing.assert_close(result.network()(inputs), network(inputs), rtol=0.02, atol=0.02)
