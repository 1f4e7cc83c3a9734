"""Vectors that no layer owns: rounded like those of norms, unless something would make much of the error."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bayeszip
from bayeszip.graph import free_vectors, from_state, trace
from bayeszip.quantize import round_vectors
from bayeszip.recipe import Coding
from bayeszip.result import Form, Result
from bayeszip.tensors import CompressedModel, Graph, LogGrid, Node, QuantizedTensor, RawTensor, UniformGrid

ERROR = 0.004


class ChannelNorm(nn.Module):
    """ConvNeXt's own norm, over channels that come first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.randn(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(1, keepdim=True)
        x = centered / torch.sqrt(centered.pow(2).mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Network(nn.Module):
    """A norm of its own, a factor for each channel, a token, slopes, frequencies, and a vector too short to count."""

    def __init__(self, *, waves: bool = False) -> None:
        super().__init__()
        self.waves = waves
        self.stem, self.norm, self.slopes = nn.Conv2d(3, 16, 3), ChannelNorm(16), nn.PReLU(16)
        self.gamma, self.token = nn.Parameter(0.1 * torch.rand(16)), nn.Parameter(torch.randn(1, 1, 16))
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.slopes.weight.data.uniform_(0.1, 0.4)
        self.short, self.frequencies = nn.Parameter(torch.rand(4)), nn.Parameter(30 * torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.slopes(self.norm(self.stem(x))).flatten(2).transpose(1, 2)
        features = torch.cat([features, self.token.expand(x.shape[0], -1, -1)], 1)
        features = (features + self.gamma * self.mix(features)).mean(1)
        waves = torch.sin(features * self.frequencies) if self.waves else features * torch.sin(self.frequencies)
        return self.head(waves) * self.short


USES = {
    "norm.weight": "factor",
    "norm.bias": "summand",
    "slopes.weight": "factor",
    "gamma": "factor",
    "token": "summand",
}


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def filed(network: nn.Module, images: torch.Tensor, **coding: Any) -> Result:
    result = Form(network, (images,), Coding(**coding)).code({})
    assert result.without_graph is None
    return result


def model_of(network: nn.Module, images: torch.Tensor) -> CompressedModel:
    graph = trace(network, images)
    return CompressedModel(from_state(network, graph=graph), graph)


def test_uses_are_told_by_what_reads_a_vector(network, images):
    assert free_vectors(model_of(network, images)) == USES
    assert free_vectors(model_of(network, images), {"gamma"}) == {k: use for k, use in USES.items() if k != "gamma"}


def test_what_a_wave_would_magnify_is_left_alone(images):
    # All of them reach the wave, before any layer's weights have a part in it.
    assert free_vectors(model_of(Network(waves=True).eval(), images)) == {}


def test_vectors_are_rounded_in_proportion(network, images):
    tensors, state = filed(network, images).compressed.tensors, network.state_dict()
    for name, use in USES.items():
        tensor, values = tensors[name], state[name].double().numpy()
        assert isinstance(tensor, QuantizedTensor)
        assert isinstance(tensor.grid, UniformGrid if use == "summand" else LogGrid)
        size = np.sqrt(np.square(values).mean()) if use == "summand" else np.abs(values)
        moved = (tensor.dequantize() - values) / size
        # Two steps: a summand takes the next one towards zero if that has fewer bits.
        assert 0 < np.abs(moved).max() < 2 * 12**0.5 * ERROR
        assert tensor.shape == values.shape
    for name in ("short", "frequencies"):
        assert np.array_equal(tensors[name].values, state[name].numpy())


def test_a_file_of_rounded_vectors_is_smaller_and_computes_the_same(network, images, tmp_path):
    rounded, raw = filed(network, images), filed(network, images, norm_error=0)
    assert rounded.bytes < raw.bytes - 20 * len(USES)
    rounded.save(tmp_path / "net.bayz")
    for loaded in (bayeszip.load(tmp_path / "net.bayz"), bayeszip.load(tmp_path / "net.bayz", into=Network())):
        with torch.no_grad():
            expected, found = network(images), loaded.eval()(images)
        assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("coding", [{"norm_error": 0}, {"norms": "keep"}, {"keep_indices": True}])
def test_settings_that_keep_norms_keep_vectors(network, images, coding):
    tensors = filed(network, images, **coding).compressed.tensors
    for name in USES:
        assert isinstance(tensors[name], RawTensor)
        assert np.array_equal(tensors[name].values, network.state_dict()[name].numpy())


def test_a_frozen_vector_stays_bit_for_bit(network, images):
    network.gamma.requires_grad_(requires_grad=False)
    tensors = filed(network, images).compressed.tensors
    assert np.array_equal(tensors["gamma"].values, network.gamma.numpy())
    assert isinstance(tensors["token"], QuantizedTensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_vectors_of_every_type_are_rounded(network, images, dtype):
    network, images = network.to(dtype), images.to(dtype)
    result = filed(network, images)
    assert all(isinstance(result.compressed.tensors[name], QuantizedTensor) for name in USES)
    assert {parameter.dtype for parameter in result.network().parameters()} == {dtype}


@pytest.mark.parametrize("use", ["factor", "summand"])
@pytest.mark.parametrize("value", [0.0, np.inf, np.nan, 1e-42])
def test_a_vector_that_no_grid_holds_stays(use, value):
    model = CompressedModel({"gamma": RawTensor(np.full(16, value, np.float32), "float32")})
    assert round_vectors(model, {"gamma": use}, ERROR).tensors["gamma"] is model.tensors["gamma"]


def test_a_reader_that_is_met_along_many_ways_is_looked_at_once():
    """Twice as often at each step, this would never end."""
    moves = (Node("expand", (place, place)) for place in range(2, 66))
    nodes = (Node("input", (0,), (), {"shape": (16,)}), Node("parameter", (), ("token",)), *moves, Node("add", (1, 66)))
    model = CompressedModel({"token": RawTensor(np.ones((1, 16), np.float32), "float32")}, Graph(1, nodes, (67,)))
    assert free_vectors(model) == {"token": "summand"}
