"""Prices are what the coder writes; choices by them make the sum of distance and bits smaller."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from codec_models import compressed_models, lenet
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeszip import codec
from bayeszip.errors import ModelError
from bayeszip.tensors import Aim, CompressedModel, QuantizedTensor, RawTensor

#: A file ends in whole bytes, zeros at its end left out.
LAST_BYTES = 2

VALUES = np.array([0.0, -2.0, -1.0, 1.0, 2.0, 3.0])


def quick(seed: int = 0) -> CompressedModel:
    """A tensor that the quick model codes."""
    random = np.random.default_rng(seed)
    symbols = random.integers(1, 6, size=(400, 1400)) * (random.random((400, 1400)) < 0.03)
    return CompressedModel({"weight": QuantizedTensor(symbols, VALUES)})


def with_scales() -> CompressedModel:
    random = np.random.default_rng(0)
    symbols = random.integers(1, 6, size=(20, 30)) * (random.random((20, 30)) < 0.2)
    scale = QuantizedTensor(1 + np.arange(20) % 3, np.array([0, 0.5, 1, 2]))
    return CompressedModel({"weight": QuantizedTensor(symbols, VALUES, scale=scale)})


def noisy_aims(model: CompressedModel, noise: float = 0.3) -> dict[str, Aim]:
    random = np.random.default_rng(1)
    return {
        name: Aim(tensor.dequantize() + random.normal(scale=noise, size=tensor.shape), noise**-2)
        for name, tensor in model.tensors.items()
        if isinstance(tensor, QuantizedTensor)
    }


def cost(model: CompressedModel, aims: dict[str, Aim], strength: float) -> float:
    missed = 0.0
    for name, aim in aims.items():
        tensor = model.tensors[name]
        missed += aim.missed_by(tensor.dequantize()) if isinstance(tensor, QuantizedTensor) else math.inf
    return missed + strength * math.log(2) * codec.prices(model).bits


@pytest.mark.parametrize("model", [lenet(), lenet(1, density=0.3, values=200), quick(), with_scales()])
def test_the_prices_of_a_file_add_up_to_its_bytes(model):
    prices = codec.prices(model)
    described = {tensor.name: tensor.parts["weights"] for tensor in codec.describe(codec.encode(model)).tensors}
    assert abs(prices.bits - 8 * codec.measure(model)) < 8 * LAST_BYTES
    for name, tensor in prices.tensors.items():
        assert abs(tensor.paid.sum() - 8 * described[name]) <= 8 * LAST_BYTES


@given(model=compressed_models())
@settings(max_examples=30)
def test_the_prices_of_any_file_add_up_to_its_bytes(model):
    # A stream that happens to end in zero bytes is shorter than its bits.
    assert -8 * LAST_BYTES < codec.prices(model).bits - 8 * codec.measure(model) < 8 * 5


def test_what_is_paid_is_all_that_a_row_of_weights_costs_but_its_density():
    random = np.random.default_rng(0)
    symbols = random.integers(1, 9, size=5000) * (random.random(5000) < 0.1)
    empty = CompressedModel({"v": QuantizedTensor(np.zeros(5000, int), np.arange(9.0))})
    model = CompressedModel({"v": QuantizedTensor(symbols, np.arange(9.0))})
    density_bits = 5  # the rest of a tenth of a bit is what intervals lose when they are split at integers
    assert codec.prices(model).beside == pytest.approx(codec.prices(empty).bits + density_bits, abs=0.1)


@pytest.mark.parametrize("model", [lenet(), quick()])
def test_prices_are_those_of_probabilities(model):
    for name, prices in codec.prices(model).tensors.items():
        symbols = model.tensors[name].symbols
        coded = prices.zero > 0
        assert coded[symbols != 0].all()
        assert not prices.paid[~coded].any()
        np.testing.assert_allclose((2**-prices.zero + 2**-prices.nonzero)[coded], 1)
        np.testing.assert_allclose((2 ** -prices.value[1:]).sum(), 1)
        np.testing.assert_array_equal(prices.paid[symbols == 0], prices.zero[symbols == 0])
        assert (prices.paid >= prices.nonzero)[symbols != 0].all()
        assert prices.nonzero[~coded].min(initial=99) >= prices.nonzero.max()
        assert prices.value[0] == 0


def test_zeros_are_cheap_among_zeros():
    random = np.random.default_rng(0)
    busy = np.arange(100)[:, None] % 5 == 0
    symbols = (random.random((100, 200)) < np.where(busy, 0.5, 0.01)).astype(int)
    prices = codec.prices(CompressedModel({"w": QuantizedTensor(symbols, [0, 1.0])})).tensors["w"]
    there, elsewhere = busy[:, 0], ~busy[:, 0]
    assert prices.zero[there, 100:].mean() > 10 * prices.zero[elsewhere, 100:].mean()
    assert prices.nonzero[there, 100:].mean() < 0.5 * prices.nonzero[elsewhere, 100:].mean()


def test_an_empty_tensor_has_prices():
    model = CompressedModel(
        {"none": QuantizedTensor(np.zeros((0, 3), int), [0, 1.0]), "raw": RawTensor(np.ones(3), "float64")}
    )
    prices = codec.prices(model)
    assert prices.tensors["none"].paid.shape == (0, 3)
    assert "raw" not in prices.tensors
    assert abs(prices.bits - 8 * codec.measure(model)) < 8 * LAST_BYTES


@pytest.mark.parametrize("strength", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("model", [lenet(2), quick(), with_scales()])
def test_choices_make_the_sum_of_distance_and_bits_smaller(model, strength):
    aims = noisy_aims(model)
    chosen = codec.cheapest(model, aims, strength)
    assert cost(chosen, aims, strength) < cost(model, aims, strength)
    assert all(chosen.tensors[name].codebook is tensor.codebook for name, tensor in model.tensors.items())


@given(model=compressed_models(), strength=st.floats(1e-3, 10))
@settings(max_examples=30)
def test_choices_never_make_it_larger(model, strength):
    aims = {
        name: Aim(tensor.dequantize().astype(np.float64), 1.0)
        for name, tensor in model.tensors.items()
        if isinstance(tensor, QuantizedTensor)
    }
    chosen = codec.cheapest(model, aims, strength)
    assert cost(chosen, aims, strength) <= cost(model, aims, strength)


def test_where_bits_are_worth_nothing_weights_take_the_nearest_value():
    model = lenet(3, density=0.5)
    aims = noisy_aims(model)
    chosen = codec.cheapest(model, aims, 1e-9)
    for name, tensor in chosen.tensors.items():
        distance = np.abs(tensor.codebook - aims[name].means[..., None])
        live = model.tensors[name].symbols != 0
        np.testing.assert_array_equal(tensor.symbols[live], distance.argmin(axis=-1)[live])


def test_weights_stay_where_zeros_are_dear():
    """Even those that are nearer to zero: beside a tensor that gains much by zeros, too."""
    random = np.random.default_rng(0)
    dense, book = np.ones((64, 64), dtype=np.int64), np.array([0.0, 1.0])
    few = random.random(dense.shape) < 0.05
    model = CompressedModel({
        "dense": QuantizedTensor(dense, book),
        "sparse": QuantizedTensor((random.random(dense.shape) < 0.5).astype(np.int64), book),
    })  # fmt: skip
    aims = {"dense": Aim(np.where(few, 0.45, 1.0), 1.0), "sparse": Aim(random.normal(0, 0.3, dense.shape), 1.0)}
    chosen = codec.cheapest(model, aims, 1.0)
    # The first few come before the coder knows that zeros are dear.
    assert (chosen.tensors["dense"].symbols == 1).mean() > 0.995
    assert chosen.tensors["sparse"].nonzero < 100


def test_where_bits_are_worth_everything_nothing_is_left():
    model = lenet(4)
    assert codec.cheapest(model, noisy_aims(model), 1e6).nonzero == 0


@pytest.mark.parametrize("strength", [0.2, 0.5, 1.0, 2.0, 4.0])
def test_the_choice_of_a_last_weight_is_that_of_enumeration(strength):
    symbols = np.array([1, 0, 2, 0, 0, 1, 1, 0, 0, 0, 1, 1])
    aim = Aim(np.array([-1, 0, 1, 0, 0, -1, -1, 0, 0, 0, -1, 0.6]), np.array([1e9] * 11 + [2.0]))

    def ending_in(symbol: int) -> CompressedModel:
        return CompressedModel({"v": QuantizedTensor(np.append(symbols[:-1], symbol), np.array([0, -1.0, 1.0]))})

    costs = [cost(ending_in(symbol), {"v": aim}, strength) for symbol in range(3)]
    for start in range(3):
        assert codec.cheapest(ending_in(start), {"v": aim}, strength) == ending_in(int(np.argmin(costs)))


def test_tensors_without_an_aim_stay_as_they_are():
    model = lenet(5)
    aims = {"fc2.weight": noisy_aims(model)["fc2.weight"]}
    chosen = codec.cheapest(model, aims, 1.0)
    changed = [name for name, tensor in model.tensors.items() if chosen.tensors[name] != tensor]
    assert changed == ["fc2.weight"]


@pytest.mark.parametrize(
    ("aims", "strength", "message"),
    [
        ({"raw": Aim(np.zeros(3), 1.0)}, 1.0, "not raw"),
        ({"other": Aim(np.zeros(3), 1.0)}, 1.0, "not other"),
        ({}, 0.0, "positive and finite, not 0"),
        ({}, math.inf, "positive and finite, not inf"),
    ],
)
def test_what_can_not_be_chosen_is_refused(aims, strength, message):
    model = CompressedModel({"raw": RawTensor(np.ones(3), "float64")})
    with pytest.raises(ModelError, match=message):
        codec.cheapest(model, aims, strength)


_CHOOSING = """
import json, sys
import numpy as np
from bayeszip import codec
from bayeszip.tensors import Aim, CompressedModel, QuantizedTensor
random = np.random.default_rng(0)
symbols = random.integers(1, 9, size=(40, 60)) * (random.random((40, 60)) < 0.2)
tensor = QuantizedTensor(symbols, np.linspace(0, 2, 9))
model = CompressedModel({"w": tensor})
aim = Aim(tensor.dequantize() + random.normal(scale=0.2, size=tensor.shape), 25.0)
chosen = codec.cheapest(model, {"w": aim}, 0.5)
print(json.dumps([codec.prices(chosen).bits, chosen.tensors["w"].symbols.tolist(), "numba" in sys.modules]))
"""


def test_compiled_loops_choose_as_plain_ones_do():
    found = []
    for how in "01":
        environment = os.environ | {"BAYESZIP_COMPILE": how}
        command = [sys.executable, "-c", _CHOOSING]
        run = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        found.append(json.loads(run.stdout))
    plain, compiled = found
    assert (plain[2], compiled[2]) == (False, True)
    assert plain[0] == pytest.approx(compiled[0], abs=1e-6)
    assert plain[1] == compiled[1]
