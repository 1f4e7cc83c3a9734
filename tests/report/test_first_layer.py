"""The picture of the first layer shows the weights that are there."""

import numpy as np
import pytest

from bayeszip import CompressedModel, QuantizedTensor, RawTensor
from bayeszip.report.first_layer import ALL_CELLS, MOST_CELLS, MOST_TILES, first_layer, values_of
from bayeszip.tensors import Graph, Node

CODEBOOK = np.array([0.0, -0.5, 0.25], dtype=np.float32)


def quantized(*shape, seed=0, density=0.3):
    rng = np.random.default_rng(seed)
    return QuantizedTensor(rng.integers(1, 3, shape) * (rng.random(shape) < density), CODEBOOK)


def linear_network(weight, image=(1, 4, 6)):
    nodes = (
        Node("input", (0,), attributes={"shape": image}),
        Node("flatten", (1,)),
        Node("linear", (2,), ("fc.weight", None)),
    )
    return CompressedModel({"fc.weight": weight}, Graph(1, nodes, (3,)))


def test_fields_lie_as_the_pixels_do():
    weight = quantized(10, 24)
    picture = first_layer(linear_network(weight))
    values = weight.dequantize().reshape(10, 4, 6)
    assert (picture.kind, picture.units, picture.tensor) == ("fields", 10, "fc.weight")
    assert np.array_equal(picture.total, np.count_nonzero(values, axis=0))
    counts = [np.count_nonzero(tile) for tile in picture.tiles]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == weight.nonzero
    assert all(any(np.array_equal(tile, unit) for unit in values) for tile in picture.tiles)


def test_units_without_weights_get_no_tile_and_many_units_are_cut():
    symbols = np.zeros((3, 24), dtype=int)
    symbols[1, 5] = 1
    assert len(first_layer(linear_network(QuantizedTensor(symbols, CODEBOOK))).tiles) == 1
    assert len(first_layer(linear_network(quantized(300, 24, density=0.9))).tiles) == MOST_TILES


def test_large_pictures_are_summed_in_blocks():
    weight = quantized(40, 90 * 200, density=0.01)
    picture = first_layer(linear_network(weight, (1, 90, 200)))
    assert {tile.shape for tile in picture.tiles} == {(MOST_CELLS, MOST_CELLS)}
    assert sum(tile.size for tile in picture.tiles) <= ALL_CELLS
    assert len(picture.tiles) < picture.units == 40
    assert picture.total.sum() == weight.nonzero


@pytest.mark.parametrize("image", [(3, 2, 4), (24,), (2, 2, 2, 3)])
def test_inputs_that_are_no_picture_give_a_map_of_the_matrix(image):
    picture = first_layer(linear_network(quantized(5, 24), image))
    assert picture.kind == "matrix"


@pytest.mark.parametrize(
    ("op", "shape", "tile"),
    [
        ("conv2d", (6, 1, 5, 3), (5, 3)),
        ("conv2d", (6, 4, 5, 5), (5, 5)),
        ("conv1d", (6, 1, 7), (1, 7)),
        ("conv3d", (6, 1, 2, 3, 4), (2, 12)),
        ("conv_transpose2d", (1, 6, 3, 3), (3, 3)),
    ],
)
def test_convolutions_show_their_kernels(op, shape, tile):
    weight = quantized(*shape, density=0.9)
    picture = first_layer(CompressedModel({"w": weight}, Graph(1, (Node(op, (0,), ("w", None)),), (1,))))
    assert (picture.kind, picture.units) == ("kernels", 6)
    assert {kernel.shape for kernel in picture.tiles} == {tile}
    assert bool(picture.note) == (4 in shape[1:2])


def test_three_channels_are_colors():
    weight = quantized(6, 3, 5, 4)
    picture = first_layer(CompressedModel({"w": weight}, Graph(1, (Node("conv2d", (0,), ("w", None)),), (1,))))
    assert (picture.kind, picture.units) == ("colors", 6)
    values = np.moveaxis(weight.dequantize(), 1, -1)
    assert all(any(np.array_equal(tile, unit) for unit in values) for tile in picture.tiles)
    assert picture.tiles[0].shape == (5, 4, 3)


def test_a_matrix_without_a_graph_becomes_a_map_of_density():
    weight = quantized(100, 7, density=0.5)
    picture = first_layer(CompressedModel({"bias": quantized(7), "w": weight}))
    (density,) = picture.tiles
    assert density.shape == (MOST_CELLS, 7)
    sizes = np.diff(np.linspace(0, 100, MOST_CELLS + 1).astype(int))
    assert (density * sizes[:, None]).sum() == pytest.approx(weight.nonzero)


def test_without_a_matrix_there_is_no_picture():
    assert first_layer(CompressedModel({"bias": quantized(7), "empty": quantized(0, 7)})) is None


def test_numbers_of_every_kind_become_finite_floats():
    bits = np.array([0x3F80, 0x7FC0, 0xFF80], dtype="<u2")  # 1.0, NaN, −∞
    assert values_of(RawTensor(bits, "bfloat16")).tolist() == [1.0, 0.0, 0.0]
    assert values_of(RawTensor(np.array([1e300, -2.0]), "float64")).tolist() == [0.0, -2.0]
