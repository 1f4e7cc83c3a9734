"""The model that looks at neighbors: what it gains, what it leaves alone, what it must agree with."""

import numpy as np
import pytest
from agreement import agrees

from bayeszip.codec import compilation, decode, describe, encode, measure
from bayeszip.codec.evidence import log_count
from bayeszip.codec.neighbors import _least, _signs, _sizes, spread_of
from bayeszip.codec.ways import NEIGHBORS
from bayeszip.tensors import CompressedModel, QuantizedTensor, UniformGrid

ALL_NEIGHBORS = NEIGHBORS << 1


def on_grid(numbers: np.ndarray, most: int) -> CompressedModel:
    """A model of one tensor, from signed multiples of a step."""
    numbers = np.rint(numbers).clip(-most, most).astype(np.int64)
    symbols = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
    return CompressedModel({"w": QuantizedTensor.on_grid(symbols, UniformGrid(0.125, 2 * most + 1))})


def smooth(shape: tuple[int, ...], axis: int, spread: float = 2.0) -> np.ndarray:
    return spread * np.random.default_rng(0).normal(size=shape).cumsum(axis=axis)


@pytest.mark.parametrize(
    ("numbers", "share"),
    [
        (smooth((64, 128), 1), 0.96),  # like the one on the left
        (smooth((128, 64), 0), 0.7),  # like the one above
        (smooth((8, 32, 32), 1), 0.8),  # like the one in the channel before
        (np.random.default_rng(0).normal(size=(200, 64)) * np.repeat([1, 9], 32), 0.97),  # as large as those above
    ],
    ids=["left", "above", "channel", "magnitude"],
)
def test_what_resembles_its_neighbors_costs_less(numbers, share):
    model = on_grid(numbers, 60)
    assert measure(model) < share * measure(model, ways=0)
    assert describe(encode(model)).options["ways"] == ALL_NEIGHBORS


def test_noise_is_coded_as_ever():
    model = on_grid(np.random.default_rng(0).normal(size=(200, 200)) * 5, 30)
    blob = encode(model)
    assert describe(blob).options["ways"] == 0
    assert blob == encode(model, ways=0)


@pytest.mark.parametrize("most", [1, 2, 40, 700])
@pytest.mark.parametrize("shape", [(4100,), (70, 60), (16, 8, 6, 6), (4, 512, 2)])
def test_any_shape_comes_back_and_the_second_decoder_agrees(shape, most):
    model = on_grid(smooth(shape, -1, most / 20), most)
    blob = encode(model, ways=ALL_NEIGHBORS)
    assert decode(blob) == model
    agrees(blob, model)


def test_dead_rows_and_columns_and_values_all_of_one_sign():
    numbers = np.abs(smooth((80, 70), 1))
    numbers[::3] = 0
    numbers[:, 5:20] = 0
    symbols = np.rint(numbers).clip(0, 9).astype(np.int64)
    codebook = np.linspace(0, 0.9, 10, dtype=np.float32)
    for values in (codebook, 0 - codebook):
        model = CompressedModel({"w": QuantizedTensor(symbols, values)})
        blob = encode(model, ways=ALL_NEIGHBORS)
        assert decode(blob) == model
        agrees(blob, model)


def test_compiled_and_plain_loops_write_the_same(monkeypatch):
    model = on_grid(smooth((70, 60), 1), 100)
    compiled = encode(model, ways=ALL_NEIGHBORS)
    monkeypatch.setattr(compilation, "_faster", {})
    monkeypatch.setattr(compilation, "_PATIENCE", 2**60)
    assert encode(model, ways=ALL_NEIGHBORS) == compiled


def test_a_spread_is_the_logarithm_of_the_mean_magnitude():
    # Three values below zero: ranks 1, 2, 3 are −3, −2, −1; 4 is 1.
    assert spread_of(np.array([0, 1, 3, 4], dtype=np.uint8), 3, 4) == log_count(16 * (3 + 1 + 1) // 4) // 32
    assert spread_of(np.zeros(9, dtype=np.uint8), 3, 9) == 0
    assert spread_of(np.zeros(9, dtype=np.uint8), 3, 0) == 0  # a file may say that no row is live


@pytest.mark.parametrize("spread", [0, 22, 40, 127])
def test_tables_hold_what_the_page_says(spread):
    """Beyond its end, a table's last entry goes on."""
    values = 50
    for parts in (2, 9):
        table = _sizes(spread, parts, values)
        for total in range(parts * values + 1):
            expected = min(max((log_count(16 * total // parts + 1) - 32 * spread + 384) // 96, 0), 7) if total else 0
            assert table[min(total, len(table) - 1)] == expected
    signs = _signs(spread, values)
    middle = len(signs) // 2
    for number in range(-3 * values, 3 * values + 1):
        size = min(max((log_count(16 * abs(number) + 1) - 32 * spread + 760) // 224, 0), 4)
        expected = 4 + (size if number > 0 else -size if number else 0)
        assert signs[min(max(number, -middle), middle) + middle] == expected


def test_the_least_number_of_a_logarithm():
    assert _least(-5, 1, 10) == 1
    assert _least(10**6, 1, 10) == 11
    least = _least(1500, 9, 10**6)
    assert log_count(16 * least // 9 + 1) >= 1500 > log_count(16 * (least - 1) // 9 + 1)
