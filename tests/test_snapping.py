"""Symbols by what moves do together: the cost by its definition, aims as minima, a sum that never grows."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip import codec
from bayeszip.fitting import ResidentBatches
from bayeszip.fitting.statistics import undisturbed
from bayeszip.packing.curvature import Block, Curvature
from bayeszip.posterior import GaussianTensor, Posterior
from bayeszip.quantize import Quantization
from bayeszip.snapping import MoveCost, by_curvature, seen_curvatures
from bayeszip.tensors import CompressedModel, QuantizedTensor

ROWS, COLUMNS = 6, 10


def curvature(rng: np.random.Generator, bias: str | None = "b") -> Curvature:
    """Of inputs that resemble each other, in two blocks of columns; the second holds the constant."""
    inputs = rng.normal(size=(200, COLUMNS)) + 2 * rng.normal(size=(200, 1))
    blocks = []
    for columns, constant in ((slice(0, 4), False), (slice(4, COLUMNS), True)):
        part = np.column_stack([inputs[:, columns], np.ones(200)]) if constant else inputs[:, columns]
        blocks.append(Block(slice(0, ROWS), columns, constant, part.T @ part / 200))
    return Curvature(blocks, rng.uniform(0.1, 2, ROWS), bias, None, np.zeros(ROWS))


def problem(seed: int = 0, scale: float | None = None) -> tuple[dict[str, QuantizedTensor], Posterior]:
    """Weights of a layer and its bias near shared values; the weights in units of `scale`."""
    rng = np.random.default_rng(seed)
    codebook = np.array([0.0, -0.8, -0.3, 0.3, 0.8], np.float32)
    unit = None if scale is None else QuantizedTensor(np.ones(ROWS, np.uint8), np.array([0.0, scale], np.float32))
    quantized = {
        "w": QuantizedTensor(rng.integers(0, 5, (ROWS, COLUMNS)), codebook, scale=unit),
        "b": QuantizedTensor(rng.integers(0, 5, ROWS), codebook),
    }
    weights = {}
    for name, tensor in quantized.items():
        theta = tensor.dequantize() + rng.normal(0, 0.1, tensor.shape)
        weights[name] = GaussianTensor(theta.astype(np.float32), rng.uniform(-4, -1, tensor.shape).astype(np.float32))
    return quantized, Posterior(weights)


def alive(quantized: dict[str, QuantizedTensor]) -> dict[str, np.ndarray]:
    return {name: tensor.symbols != 0 for name, tensor in quantized.items()}


def by_definition(quantized: dict[str, QuantizedTensor], posterior: Posterior, seen: Curvature, share: float) -> float:
    """The formula of the module, written out."""
    moves = {name: tensor.dequantize() - posterior.weights[name].theta for name, tensor in quantized.items()}
    precision = {name: np.exp(-each.log_sigma2.astype(float)) for name, each in posterior.weights.items()}
    own = sum(0.5 * float((precision[name] * moves[name] ** 2).sum()) for name in moves)
    together, ratios = 0.0, []
    for row in range(ROWS):
        for block in seen.blocks:
            move = moves["w"][row, block.columns]
            move = np.append(move, moves["b"][row]) if block.constant else move
            together += 0.5 * seen.outputs[row] * float(move @ block.moments @ move)
            for place, column in enumerate(range(block.columns.start, block.columns.stop)):
                if quantized["w"].symbols[row, column]:
                    ratios.append(seen.outputs[row] * block.moments[place, place] / precision["w"][row, column])
        if quantized["b"].symbols[row]:
            ratios.append(seen.outputs[row] * seen.blocks[1].moments[-1, -1] / precision["b"][row])
    return (own + share * together / np.mean(ratios)) / (1 + share)


@pytest.mark.parametrize("share", [0.0, 1.0, 3.0])
def test_moves_cost_what_the_formula_says(share):
    quantized, posterior = problem()
    seen = curvature(np.random.default_rng(1))
    cost = MoveCost(posterior, {"w": seen}, share, alive(quantized))
    assert cost.of(quantized) == pytest.approx(by_definition(quantized, posterior, seen, share), rel=1e-6)


def test_an_aim_is_where_a_weight_costs_least_and_says_how_much_more_it_costs_elsewhere():
    quantized, posterior = problem()
    cost = MoveCost(posterior, {"w": curvature(np.random.default_rng(1))}, 2.0, alive(quantized))
    aims = cost.aims(quantized, {name: np.ones(tensor.shape, bool) for name, tensor in quantized.items()})
    for name, place in (("w", (2, 3)), ("w", (5, 9)), ("b", (1,))):

        def at(value: float, name: str = name, place: tuple[int, ...] = place) -> float:
            values = quantized[name].dequantize()
            values[place] = value
            own = np.unique(values[values != 0])
            symbols = np.where(values == 0, 0, np.searchsorted(own, values) + 1)
            return cost.of({**quantized, name: QuantizedTensor(symbols, np.append(np.float32(0), own))})

        mean, precision = np.float32(aims[name].means[place]), aims[name].precisions[place]
        assert at(mean + 0.25) == pytest.approx(at(mean - 0.25), rel=1e-4)
        assert at(mean + 0.5) - at(mean) == pytest.approx(0.5 * precision * 0.25, rel=1e-4)


def test_weights_that_are_held_stay():
    quantized, posterior = problem(scale=0.37)
    cost = MoveCost(posterior, {"w": curvature(np.random.default_rng(1))}, 1.0, alive(quantized))
    free = {name: np.zeros(tensor.shape, bool) for name, tensor in quantized.items()}
    chosen = codec.cheapest(CompressedModel(quantized), cost.aims(quantized, free), 100.0)
    assert chosen == CompressedModel(quantized)


@pytest.mark.parametrize("scale", [None, 0.37])
def test_better_values_cost_less(scale):
    quantized, posterior = problem(scale=scale)
    cost = MoveCost(posterior, {"w": curvature(np.random.default_rng(1))}, 2.0, alive(quantized))
    values = cost.best_values(quantized)
    assert values[0] == 0

    def at(codebook: np.ndarray) -> float:
        return cost.of(
            {name: QuantizedTensor(each.symbols, codebook, scale=each.scale) for name, each in quantized.items()}
        )

    best = at(values)
    assert best < cost.of(quantized)
    # Next to the minimum: a step along any value gains next to nothing.
    for place in range(1, 5):
        for step in (-0.01, 0.01):
            moved = values.copy()
            moved[place] += step
            assert at(moved) > best - 0.01 * cost.of(quantized)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.05, 1.0])
def test_the_sum_of_moves_and_bits_never_grows(seed, rate):
    quantized, posterior = problem(seed)
    seen = {"w": curvature(np.random.default_rng(seed))}
    how = Quantization(rate=rate, curvature=2.0, codebook_bits=16)
    cost = MoveCost(posterior, seen, how.curvature, alive(quantized))

    def total(tensors: dict[str, QuantizedTensor]) -> float:
        return cost.of(tensors) + rate * math.log(2) * codec.prices(CompressedModel(tensors)).bits

    chosen = by_curvature(quantized, posterior, seen, how)
    assert total(chosen) <= total(quantized)
    for name, tensor in chosen.items():
        assert not tensor.symbols[quantized[name].symbols == 0].any()


def test_what_one_weight_lacks_another_on_the_same_input_makes_good():
    """Two inputs that are always the same: of two halves one becomes a whole, the other nothing."""
    rows = 40
    theta = np.full((rows, 2), 0.5, np.float32) + np.array([0.02, -0.02], np.float32)
    posterior = Posterior({"w": GaussianTensor(theta, np.full(theta.shape, -1.0, np.float32))})
    quantized = {"w": QuantizedTensor(np.ones((rows, 2), np.uint8), np.array([0.0, 1.0], np.float32))}
    moments = np.ones((2, 2))
    seen = {"w": Curvature([Block(slice(0, rows), slice(0, 2), False, moments)], np.ones(rows), None, None, np.ones(0))}
    chosen = by_curvature(quantized, posterior, seen, Quantization(rate=0.05, curvature=20.0))["w"].dequantize()
    assert np.abs(chosen.sum(1) - 1).max() < 0.05
    assert np.count_nonzero(chosen) == rows


def test_the_same_is_seen_whenever_it_is_asked_and_nothing_is_disturbed():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    loader = ResidentBatches(torch.randn(60, 5), torch.arange(60) % 3, 16, shuffle=True, seed=0)
    symbols = np.arange(20).reshape(4, 5) % 3
    quantized = {"0.weight": QuantizedTensor(symbols, np.array([0.0, 0.5, -0.5], np.float32))}
    before, where = copy.deepcopy(network.state_dict()), loader.state_dict()["generator"]
    first = seen_curvatures(network, quantized, loader)
    assert torch.equal(loader.state_dict()["generator"], where)
    assert all(torch.equal(each, network.state_dict()[name]) for name, each in before.items())
    list(loader)
    second = seen_curvatures(network, quantized, loader)
    assert set(first) == {"0.weight", "2.weight"}
    for name, each in first.items():
        np.testing.assert_array_equal(each.outputs, second[name].outputs)
        np.testing.assert_array_equal(each.blocks[0].moments, second[name].blocks[0].moments)
    # The second layer has met what the quantized first one gives, in the 48 rows of whole batches.
    weight = torch.from_numpy(quantized["0.weight"].dequantize())
    with undisturbed(loader) as batches:
        rows = torch.cat([batch.inputs for batch in batches])
    hidden = torch.relu(rows @ weight.T + network[0].bias).detach().numpy()
    assert len(rows) == 48
    np.testing.assert_allclose(first["2.weight"].blocks[0].moments[:4, :4], hidden.T @ hidden / 48, rtol=1e-4)
