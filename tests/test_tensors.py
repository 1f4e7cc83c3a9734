"""Quantized tensors: grids to the last bit, scales, what is equal, and what is refused."""

import struct

import numpy as np
import pytest

from bayeszip.codec import CODERS, decode, describe, encode
from bayeszip.errors import ModelError
from bayeszip.tensors import CompressedModel, LogGrid, QuantizedTensor, RawTensor, UniformGrid

SCALE = QuantizedTensor.on_grid(np.array([1, 0, 3]), LogGrid(0.5, 2.0, 4, signed=False))
SYMBOLS = np.array([[0, 1], [2, 3], [4, 0]])


def rounded(value: float) -> bytes:
    """float32 as C rounds it."""
    return struct.pack("<f", value)


def test_a_uniform_grid_by_hand():
    step = struct.unpack("<f", rounded(0.1))[0]
    values = UniformGrid(step, 6).values()
    assert values.tobytes() == b"".join(rounded(step * n) for n in (0, -1, 1, -2, 2, -3))


def test_a_logarithmic_grid_by_hand():
    base, ratio = (struct.unpack("<f", rounded(value))[0] for value in (0.01, 1.1))
    magnitudes = [base, base * ratio, base * ratio * ratio]
    assert LogGrid(base, ratio, 4, signed=False).values().tobytes() == b"".join(map(rounded, (0.0, *magnitudes)))
    signed = [0.0, -magnitudes[0], magnitudes[0], -magnitudes[1], magnitudes[1], -magnitudes[2]]
    assert LogGrid(base, ratio, 6).values().tobytes() == b"".join(map(rounded, signed))


def test_rows_are_multiplied_by_their_scales():
    tensor = QuantizedTensor.on_grid(SYMBOLS, UniformGrid(0.25, 5), SCALE)
    assert tensor.dequantize().tolist() == [[0, -0.125], [0, 0], [1.0, 0]]
    assert not np.signbit(tensor.dequantize()[tensor.dequantize() == 0]).any()
    across = QuantizedTensor.on_grid(SYMBOLS.T, UniformGrid(0.25, 5), SCALE, axis=1)
    assert np.array_equal(across.dequantize(), tensor.dequantize().T)


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_go_with_their_rows(axis):
    symbols = SYMBOLS if axis == 0 else SYMBOLS.T
    tensor = QuantizedTensor.on_grid(symbols, UniformGrid(0.25, 5), SCALE, axis)
    for places, along in (([2, 0], axis), ([1], 1 - axis), ([1, 1, 0], axis)):
        taken = tensor.take(np.array(places), along)
        assert np.array_equal(taken.dequantize(), np.take(tensor.dequantize(), places, along))
        assert taken.grid == tensor.grid
    assert tensor.take(np.array([], dtype=np.int64), axis).scale is None
    raw = RawTensor(np.arange(6, dtype="<i4").reshape(2, 3), "int32")
    assert raw.take(np.array([2, 0]), 1).values.tolist() == [[2, 0], [5, 3]]


def test_equal_only_if_all_is():
    grid = UniformGrid(0.25, 5)
    tensor = QuantizedTensor.on_grid(SYMBOLS, grid, SCALE)
    assert tensor == QuantizedTensor(SYMBOLS, grid.values(), grid, SCALE)
    others = [
        QuantizedTensor(SYMBOLS, grid.values(), None, SCALE),
        QuantizedTensor.on_grid(SYMBOLS, grid),
        QuantizedTensor.on_grid(SYMBOLS, grid, QuantizedTensor(SCALE.symbols, SCALE.codebook)),
        QuantizedTensor.on_grid(SYMBOLS, grid, SCALE.take(np.array([0, 2, 1]), 0)),
        QuantizedTensor.on_grid(SYMBOLS, UniformGrid(0.25, 6), SCALE),
    ]
    assert all(tensor != other for other in others)


@pytest.mark.parametrize("coder", CODERS)
def test_what_needs_nothing_new_is_written_as_ever(coder):
    grid = UniformGrid(0.25, 5)
    plain = CompressedModel({"w": QuantizedTensor(SYMBOLS, grid.values())})
    newer = CompressedModel({"w": QuantizedTensor.on_grid(SYMBOLS, grid)})
    both = CompressedModel(dict(plain.tensors) | {"x": QuantizedTensor.on_grid(SYMBOLS, grid, SCALE)})
    assert [describe(encode(model, coder=coder, packed=0)).version for model in (plain, newer, both)] == [1, 2, 2]
    assert decode(encode(newer, coder=coder)) != plain
    parts = describe(encode(both, coder=coder))
    assert "scales" in parts.tensors[1].parts
    assert "scales" not in parts.tensors[0].parts
    assert sum(parts.parts.values()) + sum(tensor.bytes for tensor in parts.tensors) == parts.bytes


def test_a_step_costs_less_than_its_values():
    symbols = np.random.default_rng(0).integers(0, 200, (40, 30))
    grid = UniformGrid(float(np.float32(0.013)), 200)
    by_step = len(encode(CompressedModel({"w": QuantizedTensor.on_grid(symbols, grid)})))
    assert by_step < len(encode(CompressedModel({"w": QuantizedTensor(symbols, grid.values())}))) - 300


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: UniformGrid(0.0, 5), "step"),
        (lambda: UniformGrid(-1.0, 5), "step"),
        (lambda: UniformGrid(float("nan"), 5), "step"),
        (lambda: UniformGrid(0.1, 5), "float32"),
        (lambda: UniformGrid(1e-40, 5), "step"),
        (lambda: UniformGrid(2.0**127, 4), "beyond float32"),
        (lambda: UniformGrid(1.0, 1), "symbols"),
        (lambda: UniformGrid(1.0, 2**16 + 1), "symbols"),
        (lambda: LogGrid(1.0, 1.0, 4), "above 1"),
        (lambda: LogGrid(1.0, 2.0, 400), "beyond float32"),
        (lambda: LogGrid(1.0, 1.5, 2**12 + 1), "symbols"),
        (lambda: QuantizedTensor(SYMBOLS, np.arange(5.0), UniformGrid(1.0, 5)), "grid"),
        (lambda: QuantizedTensor(SYMBOLS, np.arange(5.0), None, None, 1), "axis"),
        (lambda: QuantizedTensor(SYMBOLS, np.arange(5.0), None, SCALE, 1), "shape"),
        (lambda: QuantizedTensor(SYMBOLS, np.arange(5.0), None, SCALE, 2), "axis"),
        (lambda: QuantizedTensor(SYMBOLS[:, 0], np.arange(5.0), None, SCALE), "matrix"),
        (lambda: QuantizedTensor(np.zeros((3, 0), int), np.arange(5.0), None, SCALE), "matrix"),
        (lambda: QuantizedTensor(SYMBOLS, np.arange(5.0) * 8e37, None, SCALE), "beyond float32"),
    ],
)
def test_what_is_no_tensor_is_refused(make, fault):
    with pytest.raises(ModelError, match=fault):
        make()
