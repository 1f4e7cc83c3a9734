"""Codebooks after units have gone: of the values in use, shared as before, the weights the same to the bit."""

import numpy as np
import torch
from torch import nn

from bayeszip.graph import drop_unused_values, to_module
from bayeszip.quantize import cluster
from bayeszip.recipe import Coding
from bayeszip.result import Form
from bayeszip.tensors import CompressedModel, LogGrid, QuantizedTensor, RawTensor, UniformGrid

VALUES = np.array([0, 3, -1, 2, 0.5, 7], np.float32)


def compacted(*tensors: QuantizedTensor) -> list[QuantizedTensor]:
    """The tensors of a model without unused values, every weight of them what it was."""
    model = CompressedModel({str(place): tensor for place, tensor in enumerate(tensors)})
    small = [each for each in drop_unused_values(model).tensors.values() if isinstance(each, QuantizedTensor)]
    for old, new in zip(tensors, small, strict=True):
        assert new.dequantize().tobytes() == old.dequantize().tobytes()
        assert new.codebook[0] == 0
    return small


def test_values_in_use_stay_in_their_order():
    (small,) = compacted(QuantizedTensor(np.array([[5, 2], [2, 3]]), VALUES))
    assert small.codebook.tolist() == [0, -1, 2, 7]
    assert small.symbols.tolist() == [[3, 1], [1, 2]]


def test_tensors_that_share_a_codebook_go_on_sharing_it():
    scale = QuantizedTensor(np.array([1, 1]), VALUES)
    first = QuantizedTensor(np.array([[5, 0], [0, 5]]), VALUES, scale=scale)
    one, two = compacted(first, QuantizedTensor(np.array([2, 0]), VALUES))
    assert one.codebook.tolist() == two.codebook.tolist() == [0, 3, -1, 7]
    assert one.scale is not None
    assert one.scale.codebook.tolist() == [0, 3, -1, 7]


def test_a_grid_ends_with_the_last_value_in_use():
    on_grid = QuantizedTensor.on_grid
    even, ratios, zeros = compacted(
        on_grid(np.array([0, 4, 2]), UniformGrid(0.5, 100)),
        on_grid(np.array([0, 3]), LogGrid(0.5, 2.0, 9)),
        on_grid(np.array([0, 0]), UniformGrid(0.25, 7)),
    )
    assert (even.grid, ratios.grid) == (UniformGrid(0.5, 5), LogGrid(0.5, 2.0, 4))
    assert zeros.grid == UniformGrid(0.25, 2)


def test_what_is_all_in_use_or_raw_is_left_alone():
    tensors = {"full": QuantizedTensor(np.arange(6), VALUES), "raw": RawTensor(VALUES, "float32")}
    assert drop_unused_values(CompressedModel(tensors)) == CompressedModel(tensors)


def test_values_that_only_dead_units_had_are_not_in_the_file():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 3)).eval()
    with torch.no_grad():
        network[2].weight[:, 1:] = 0
    x = torch.randn(4, 8)
    quantized = {"0.weight": cluster(network[0].weight.detach().numpy(), 142)}
    result = Form(network, (x,), Coding()).code(quantized)
    weight = result.compressed.tensors["0.weight"]
    assert isinstance(weight, QuantizedTensor)
    assert (weight.shape, weight.codebook.size) == ((1, 8), 9)
    assert result.whole is not None
    assert torch.allclose(result.network()(x), to_module(result.whole)(x), atol=1e-6)
