"""Scales go with their rows: dead units leave with theirs, sorted units take theirs along, modules hold the product."""

import numpy as np
import torch
from torch import nn

from bayeszip import codec, graph
from bayeszip.graph.ordering import order_units
from bayeszip.tensors import CompressedModel, LogGrid, QuantizedTensor, UniformGrid

WEIGHTS, SCALES = UniformGrid(0.125, 9), LogGrid(0.25, 1.5, 8, signed=False)


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 81, 8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def _scaled(network: nn.Module, example: torch.Tensor) -> CompressedModel:
    """The network on a grid, with scales along its outputs; a unit of the first and of the third layer is dead."""
    noise = np.random.default_rng(0)
    quantized = {}
    for name, parameter in network.named_parameters():
        shape = tuple(parameter.shape)
        symbols = noise.integers(1, 9, shape) * (noise.random(shape) < 0.4)
        if parameter.ndim == 1:
            symbols = symbols * (np.arange(shape[0]) != 3)
            quantized[name] = QuantizedTensor.on_grid(symbols, WEIGHTS)
            continue
        axis = 1 if name == "2.weight" else 0
        if name in ("0.weight", "5.weight"):
            symbols[3] = 0
        scale = QuantizedTensor.on_grid(noise.integers(1, 8, shape[axis]), SCALES)
        quantized[name] = QuantizedTensor.on_grid(symbols, WEIGHTS, scale, axis)
    traced = graph.trace(network.eval(), (example,))
    return CompressedModel(graph.from_state(network, quantized, traced), traced)


def test_scales_survive_what_happens_to_units():
    torch.manual_seed(0)
    example = torch.randn(2, 2, 10, 10)
    model = _scaled(_network(), example)
    dropped = graph.drop_dead_units(model)
    ordered = order_units(dropped)
    for each in (dropped, ordered):
        assert graph.prove_same(model, each, (example,)) < 1e-12
        for name in ("0.weight", "2.weight", "5.weight"):
            tensor = each.tensors[name]
            assert isinstance(tensor, QuantizedTensor)
            assert tensor.scale is not None
            assert tensor.scale.shape == (tensor.shape[tensor.axis],)
            assert tensor.grid == WEIGHTS
    assert dropped.tensors["0.weight"].shape[0] == 5
    assert dropped.tensors["5.weight"].shape[0] < 8
    assert sorted(ordered.tensors["5.weight"].scale.symbols) == sorted(dropped.tensors["5.weight"].scale.symbols)


def test_a_module_holds_values_times_scales():
    torch.manual_seed(0)
    example = torch.randn(2, 2, 10, 10)
    model = codec.decode(codec.encode(_scaled(_network(), example)))
    reference = _network().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(torch.from_numpy(model.tensors[name].dequantize()))
    expected = reference(example)
    assert torch.allclose(graph.to_module(model)(example), expected, atol=1e-5)
    target = _network().eval()
    graph.load_into(graph.drop_dead_units(model), target)
    assert torch.allclose(target(example), expected, atol=1e-5)
