"""Values that depend on each other: the machine, what is coded of them, and what is refused."""

import numpy as np
import pytest
from agreement import agrees

from bayeszip.codec import cheapest_path, compilation, container, contexts, decode, describe, encode, measure
from bayeszip.codec.checksum import crc32c
from bayeszip.codec.matrix import view_of
from bayeszip.codec.neighbors import lag_of
from bayeszip.codec.syntax import InvalidField, NotCanonical
from bayeszip.codec.trellis import STATES, depends, index_of, next_state, number_of, states_along
from bayeszip.codec.ways import DEPENDENT
from bayeszip.errors import FormatError, ModelError
from bayeszip.tensors import CompressedModel, QuantizedTensor, UniformGrid

ALL_DEPENDENT = DEPENDENT << 1


def on_path(shape: tuple[int, ...], spread: float) -> CompressedModel:
    """A model of one tensor of dependent multiples."""
    numbers = cheapest_path(np.random.default_rng(0).normal(scale=spread, size=shape), 0.35)
    symbols = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
    return CompressedModel({"w": QuantizedTensor.on_grid(symbols, UniformGrid(0.125, int(symbols.max()) + 1))})


def repaired(body: bytes) -> bytes:
    return body + crc32c(body).to_bytes(4, "little")


def test_even_states_have_even_multiples_and_odd_states_odd_ones_and_zero():
    assert [number_of(index, 0) for index in (-2, -1, 0, 1, 2)] == [-4, -2, 0, 2, 4]
    assert [number_of(index, 1) for index in (-2, -1, 0, 1, 2)] == [-3, -1, 0, 1, 3]
    for quantizer in (0, 1):
        assert all(index_of(number_of(index, quantizer), quantizer) == index for index in range(-9, 10))


def test_either_parity_leads_elsewhere_and_every_state_is_reached_from_two():
    ways = [(state, next_state(state, parity)) for state in range(STATES) for parity in (0, 1)]
    assert len(set(ways)) == 2 * STATES
    assert sorted(after for _, after in ways) == sorted([*range(STATES)] * 2)
    assert next_state(0, 0) == 0  # zeros lead nowhere else


@pytest.mark.parametrize("spread", [0.9, 3.0, 300.0])
@pytest.mark.parametrize("shape", [(4100,), (70, 60), (16, 32, 3, 3), (8, 512, 2)])
def test_any_shape_comes_back_and_the_second_decoder_agrees(shape, spread):
    model = on_path(shape, spread)
    blob = encode(model)
    assert describe(blob).options["ways"] == ALL_DEPENDENT
    assert decode(blob) == model
    assert encode(model, ways=ALL_DEPENDENT) == blob
    agrees(blob, model)


def test_dead_rows_and_columns_are_no_part_of_a_path():
    ratios = np.random.default_rng(0).normal(scale=3.0, size=(80, 70))
    ratios[::3] = 0
    ratios[:, 5:20] = 0
    numbers = cheapest_path(ratios, 0.35)
    assert not numbers[::3].any()
    assert not numbers[:, 5:20].any()
    assert depends(numbers.ravel(), view_of(numbers.shape))
    live = numbers[numbers.any(axis=1)][:, numbers.any(axis=0)]
    assert depends(live.ravel(), view_of(live.shape))


@pytest.mark.parametrize("size", [5, 4])
def test_a_grid_of_few_values_has_no_more_in_either_kind_of_state(size):
    """With four symbols there is −2 in even states, but no 2."""
    random, state, numbers = np.random.default_rng(1), 0, []
    for _ in range(4800):
        index = int(random.integers(-1, 2 if size == 5 or state & 1 else 1))
        numbers.append(number_of(index, state & 1))
        state = next_state(state, index)
    symbols = np.array([-2 * number - 1 if number < 0 else 2 * number for number in numbers]).reshape(80, 60)
    model = CompressedModel({"w": QuantizedTensor.on_grid(symbols, UniformGrid(0.5, size))})
    blob = encode(model)
    assert describe(blob).options["ways"] == ALL_DEPENDENT
    assert decode(blob) == model
    agrees(blob, model)


def test_what_depends_costs_less_than_the_same_numbers_by_themselves():
    model = on_path((120, 80), 4.0)
    assert measure(model) < 0.85 * measure(model, ways=0)


def test_compiled_and_plain_loops_write_the_same(monkeypatch):
    compiled = on_path((70, 60), 5.0)
    blob = encode(compiled)
    monkeypatch.setattr(compilation, "_faster", {})
    monkeypatch.setattr(compilation, "_PATIENCE", 2**60)
    assert on_path((70, 60), 5.0) == compiled
    assert encode(compiled) == blob


def test_numbers_that_no_path_leads_to_are_coded_by_themselves():
    numbers = np.random.default_rng(0).integers(-5, 6, (70, 60))
    assert not depends(numbers.ravel(), view_of(numbers.shape))
    symbols = np.where(numbers < 0, -2 * numbers - 1, 2 * numbers)
    model = CompressedModel({"w": QuantizedTensor.on_grid(symbols, UniformGrid(0.5, 11))})
    assert describe(encode(model)).options["ways"] >> 1 & 3 != DEPENDENT
    with pytest.raises(ModelError, match="no path"):
        encode(model, ways=ALL_DEPENDENT)


def test_few_weights_may_be_on_a_path_by_chance():
    numbers = np.zeros(5000, dtype=np.int64)
    numbers[7] = 2
    assert states_along(numbers, view_of((5000,))) is not None
    assert not depends(numbers, view_of((5000,)))
    # Coded so all the same, where the way is told: whatever a file decodes to can be written as it was.
    model = CompressedModel({"w": QuantizedTensor.on_grid(2 * numbers, UniformGrid(0.5, 11))})
    blob = encode(model, ways=ALL_DEPENDENT)
    assert decode(blob) == model
    assert encode(decode(blob), **describe(blob).options) == blob != encode(model)


def test_only_a_tensor_with_a_step_can_depend():
    values = np.array([0, 0.5, 0.75], dtype=np.float32)
    model = CompressedModel({"w": QuantizedTensor(np.ones((70, 60), dtype=np.uint8), values)})
    with pytest.raises(ModelError, match="has a step"):
        encode(model, ways=ALL_DEPENDENT)
    blob = encode(model, ways=4, packed=0)
    assert blob[6] == 4
    with pytest.raises(InvalidField, match="has a step"):
        decode(repaired(blob[:6] + bytes([ALL_DEPENDENT]) + blob[7:-4]))


def test_every_damaged_file_is_refused_or_means_multiples_of_the_grid():
    blob = encode(on_path((70, 60), 2.0))
    random, refused = np.random.default_rng(0), 0
    for _ in range(60):
        body = bytearray(blob[:-4])
        body[random.integers(20, len(body))] ^= 1 << random.integers(8)
        try:
            model = decode(repaired(bytes(body)))
        except FormatError:
            refused += 1
        else:
            symbols = model.tensors["w"].symbols.astype(np.int64).ravel()
            numbers = np.where(symbols % 2, -(symbols + 1) // 2, symbols // 2)
            assert states_along(numbers, view_of((70, 60))) is not None
    assert refused > 30


def test_a_lag_is_where_large_numbers_recur():
    ratios = np.random.default_rng(0).normal(size=(50, 140)) * np.tile([1.0] * 6 + [9.0], 20)
    numbers = np.rint(ratios).astype(np.int64).ravel()
    ranks = np.where(numbers, numbers + 60 + (numbers < 0), 0)
    assert lag_of(ranks, 60, view_of((50, 140))) % 7 == 0
    assert lag_of(np.zeros(90, dtype=np.uint8), 3, view_of((30, 3))) == 0


def test_a_lag_that_the_weights_do_not_show_is_refused():
    """The lag stands behind a bit, five bits of density, the flags, and the spread; flags and all else stay."""
    model = on_path((70, 60), 4.0)
    original = contexts.lag_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contexts, "lag_of", lambda *arguments: original(*arguments) ^ 1)
        blob = container._write(model, container._coder("context", {"ways": ALL_DEPENDENT}), "context", None)
    with pytest.raises(NotCanonical, match="lag"):
        decode(blob)
