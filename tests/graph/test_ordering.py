"""Sorted units: the same function, a smaller file, and nothing touched that would not stay the same."""

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip import codec, graph
from bayeszip.graph.ordering import order_units, reordered
from bayeszip.tensors import CompressedModel, QuantizedTensor


def _sparse(network: nn.Module, example: torch.Tensor, density: float = 0.2) -> CompressedModel:
    """The network with a few of its weights, of four values; biases and statistics are kept raw."""
    noise = np.random.default_rng(0)
    codebook = np.array([0, -0.5, 0.25, 0.75, -1.25], dtype=np.float32)
    quantized = {
        name: QuantizedTensor(noise.integers(1, 5, tuple(p.shape)) * (noise.random(tuple(p.shape)) < density), codebook)
        for name, p in network.named_parameters()
        if p.ndim > 1
    }
    traced = graph.trace(network.eval(), (example,))
    return CompressedModel(graph.from_state(network, quantized, traced), traced)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        return self.three(x + torch.relu(self.two(x)))


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 9, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(9 * 9, 12), nn.GELU(), nn.Linear(12, 4),
    )  # fmt: skip


def _sorted_rows(tensor: QuantizedTensor) -> bool:
    rows = [tuple(row == 0) for row in tensor.symbols.reshape(tensor.shape[0], -1)]
    return rows == sorted(rows)


def test_units_are_sorted_and_the_function_stays():
    torch.manual_seed(0)
    example = torch.randn(3, 1, 12, 12)
    model = _sparse(_lenet(), example)
    ordered = order_units(model)
    assert graph.prove_same(model, ordered, (example,)) < 1e-12
    for name in ("0.weight", "4.weight", "7.weight"):
        assert not _sorted_rows(model.tensors[name])
        assert _sorted_rows(ordered.tensors[name])
    assert order_units(ordered) == ordered
    assert np.array_equal(np.sort(model.tensors["9.bias"].values), np.sort(ordered.tensors["9.bias"].values))


@pytest.mark.parametrize("between", [nn.ReLU(), nn.LogSigmoid(), nn.Hardtanh(), nn.Softplus()])
def test_units_are_sorted_before_whatever_takes_them_one_by_one(between):
    torch.manual_seed(0)
    example = torch.randn(3, 6)
    model = _sparse(nn.Sequential(nn.Linear(6, 12), between, nn.Linear(12, 3)), example)
    ordered = order_units(model)
    assert _sorted_rows(ordered.tensors["0.weight"])
    assert graph.prove_same(model, ordered, (example,)) < 1e-12


def test_the_file_gets_smaller():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(80, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 10))
    model = _sparse(network, torch.randn(2, 80), density=0.1)
    assert len(codec.encode(order_units(model))) < len(codec.encode(model)) - 20


def test_any_order_computes_the_same_and_is_sorted_alike():
    torch.manual_seed(0)
    example = torch.randn(3, 1, 12, 12)
    model = _sparse(_lenet(), example)
    noise = np.random.default_rng(1)
    other = reordered(model, lambda symbols: noise.permutation(len(symbols)))
    assert other != model
    assert torch.allclose(graph.to_module(model)(example), graph.to_module(other)(example), atol=1e-5)
    assert codec.measure(order_units(other)) == codec.measure(order_units(model))


def test_what_is_read_twice_keeps_its_order():
    model = _sparse(Residual(), torch.randn(2, 6))
    ordered = order_units(model)
    assert ordered == model


def test_tied_weights_keep_their_order():
    network = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    network[2].weight = network[0].weight
    model = _sparse(network, torch.randn(2, 5), density=0.5)
    assert order_units(model) == model


@pytest.mark.parametrize("between", [nn.Softmax(-1), nn.LayerNorm(9)])
def test_units_that_see_each_other_keep_their_order(between):
    network = nn.Sequential(nn.Linear(6, 9), between, nn.Linear(9, 3))
    model = _sparse(network, torch.randn(2, 6), density=0.5)
    assert order_units(model).tensors["0.weight"] == model.tensors["0.weight"]


def test_grouped_convolutions_keep_their_order():
    network = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4))
    model = _sparse(network, torch.randn(2, 2, 6, 6))
    assert order_units(model) == model


def test_a_model_without_a_graph_comes_back_as_it_is():
    model = CompressedModel({"w": QuantizedTensor(np.eye(3, dtype=np.int64), [0, 1.0])})
    assert order_units(model) is model
