"""Symbols by what moves do together: the cost by its definition, aims as minima, a sum that never grows."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bayeszip import codec
from bayeszip.fitting import ResidentBatches
from bayeszip.fitting.statistics import renew_statistics, undisturbed
from bayeszip.packing.curvature import Block, Curvature
from bayeszip.posterior import GaussianTensor, Posterior
from bayeszip.quantize import Quantization
from bayeszip.snapping import (
    DAMPING,
    MoveCost,
    _chosen,
    _fitted,
    by_curvature,
    curvatures_if_any,
    moments_if_any,
    seen_curvatures,
    seen_moments,
    together,
)
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


def row_costs(tensor: QuantizedTensor, theta: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """What each row's outputs move by, in the mean square."""
    moves = tensor.dequantize().astype(np.float64) - theta
    return np.einsum("ri,ij,rj->r", moves, moments, moves)


def resembling(rng: np.random.Generator, columns: int, shift: float = 0.0) -> np.ndarray:
    """E[x·xᵀ] of inputs that resemble each other, with the constant."""
    inputs = rng.normal(size=(400, columns)) + 2 * rng.normal(size=(400, 1)) + shift
    whole = np.column_stack([inputs, np.ones(400)])
    return whole.T @ whole / 400


def of_whole(moments: np.ndarray, rows: int, mean: str | None = None) -> Curvature:
    block = Block(slice(0, rows), slice(0, len(moments) - 1), True, moments)
    return Curvature([block], np.ones(rows), None, mean, np.zeros(rows))


def survivors(rng: np.random.Generator, rows: int, columns: int) -> tuple[QuantizedTensor, Posterior]:
    """Weights that take the nearest of four values, or none."""
    codebook = np.array([0.0, -0.8, -0.3, 0.3, 0.8], np.float32)
    theta = rng.uniform(-1, 1, (rows, columns)).astype(np.float32)
    nearest = 1 + np.abs(theta[..., None] - codebook[1:]).argmin(-1)
    symbols = np.where(rng.random((rows, columns)) < 0.7, nearest, 0)
    theta = np.where(symbols != 0, theta, 0).astype(np.float32)
    return QuantizedTensor(symbols, codebook), Posterior({"w": GaussianTensor(theta, np.zeros_like(theta))})


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_choose_together_move_less_and_nearly_as_little_as_they_can(seed):
    rng = np.random.default_rng(seed)
    before, posterior = survivors(rng, 12, 6)
    moments, theta = resembling(rng, 6), posterior.weights["w"].theta
    after = _chosen(before, theta, of_whole(moments, 12))
    assert np.array_equal(after.symbols == 0, before.symbols == 0)
    plain = moments[:-1, :-1]
    nearest, chosen = (row_costs(tensor, theta, plain) for tensor in (before, after))
    assert chosen.sum() < 0.6 * nearest.sum()
    best = np.zeros(12)
    for row in range(12):
        places = np.flatnonzero(before.symbols[row])
        own = plain[np.ix_(places, places)]
        every = np.array(list(itertools.product(before.codebook[1:], repeat=places.size))) - theta[row, places]
        best[row] = np.einsum("ki,ij,kj->k", every, own, every).min() if places.size else 0.0
    assert (chosen >= best - 1e-6).all()
    assert chosen.sum() < 1.6 * best.sum()


def test_no_row_moves_further_than_by_the_symbols_it_had():
    rng = np.random.default_rng(0)
    before, posterior = survivors(rng, 40, 30)
    moments, theta = resembling(rng, 30), posterior.weights["w"].theta
    after = _chosen(before, theta, of_whole(moments, 40))
    for row in range(40):
        places = np.flatnonzero(before.symbols[row])
        own = moments[np.ix_(places, places)]
        own = own + DAMPING * np.diag(own).mean() * np.eye(places.size)
        costs = [move @ own @ move for move in ((t.dequantize() - theta)[row, places] for t in (before, after))]
        assert costs[1] <= costs[0] * (1 + 1e-9)


def test_values_are_where_rows_move_least():
    rng = np.random.default_rng(1)
    before, posterior = survivors(rng, 30, 20)
    theta, seen = posterior.weights["w"].theta, {"w": of_whole(resembling(rng, 20), 30)}
    plain = seen["w"].blocks[0].moments[:-1, :-1]
    shares = 1 / np.einsum("ri,ij,rj->r", theta, plain, theta)

    def cost(values: np.ndarray) -> float:
        moves = values[before.symbols] - theta
        return float(shares @ np.einsum("ri,ij,rj->r", moves, plain, moves))

    codebook = before.codebook.astype(np.float64)
    fitted = _fitted({"w": before}, posterior, seen)
    assert fitted[0] == 0
    assert cost(fitted) < cost(codebook)

    def held(values: np.ndarray) -> float:
        return cost(values) + DAMPING * float(_bends(before, shares, plain) @ np.square(values - codebook)[1:])

    for place in range(1, 5):
        for step in (-1e-3, 1e-3):
            moved = fitted.copy()
            moved[place] += step
            assert held(moved) > held(fitted)


def _bends(tensor: QuantizedTensor, shares: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """How much the cost bends along each value alone."""
    members = [(tensor.symbols == symbol).astype(np.float64) for symbol in range(1, 5)]
    return np.array([shares @ np.einsum("ri,ij,rj->r", each, moments, each) for each in members])


def test_symbols_and_values_in_turns_lose_less_than_symbols_alone():
    rng = np.random.default_rng(4)
    before, posterior = survivors(rng, 40, 30)
    theta, seen = posterior.weights["w"].theta, {"w": of_whole(resembling(rng, 30), 40)}
    plain = seen["w"].blocks[0].moments[:-1, :-1]
    after = together({"w": before}, posterior, seen, 32)["w"]
    assert np.array_equal(after.symbols == 0, before.symbols == 0)
    alone = _chosen(before, theta, seen["w"])
    assert row_costs(after, theta, plain).sum() < row_costs(alone, theta, plain).sum()


def test_in_front_of_a_norm_a_shift_costs_nothing():
    rng = np.random.default_rng(2)
    before, posterior = survivors(rng, 8, 9)
    shifted = resembling(np.random.default_rng(3), 9, shift=5.0)
    level = resembling(np.random.default_rng(3), 9)
    theta = posterior.weights["w"].theta
    behind, alone = (_chosen(before, theta, of_whole(shifted, 8, mean)) for mean in ("running_mean", None))
    centered = level[:-1, :-1] - np.outer(level[-1, :-1], level[-1, :-1])
    assert row_costs(behind, theta, centered).sum() < row_costs(alone, theta, centered).sum()


class Stubborn(nn.Sequential):
    """Keeps its norm in `eval()`, whatever it is told."""

    def train(self, mode: bool = True) -> "Stubborn":
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("kept", ["frozen", "in eval", None])
def test_in_front_of_a_norm_that_keeps_its_statistics_a_shift_costs_as_much_as_any_move(kept):
    torch.manual_seed(0)
    rng = np.random.default_rng(2)
    before, posterior = survivors(rng, 30, 20)
    layer = nn.Linear(20, 30, bias=False)
    network = (Stubborn if kept == "in eval" else nn.Sequential)(layer, nn.BatchNorm1d(30)).eval()
    network[1].requires_grad_(kept != "frozen")
    inputs = torch.randn(1024, 4) @ torch.randn(4, 20) + 0.3 * torch.randn(1024, 20) + 5
    loader = ResidentBatches(inputs, torch.zeros(1024, dtype=torch.long), 256)
    renew_statistics(network, loader)

    def outputs(weight: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight))
            renew_statistics(network, loader)
            return network(loader.inputs)

    theta = posterior.weights["w"].theta
    whole = outputs(theta)
    seen = {"w": seen_moments(network, loader)["0.weight"]}
    assert (seen["w"].mean is None) == (kept is not None)
    after = together({"w": before}, posterior, seen, 32)["w"]
    errors = [float((outputs(tensor.dequantize()) - whole).norm()) for tensor in (before, after)]
    assert errors[1] < 0.7 * errors[0]


def test_scales_parts_of_long_rows_and_inputs_that_are_zero(monkeypatch):
    rng = np.random.default_rng(5)
    before, posterior = survivors(rng, 5, 40)
    halved = replace(before, scale=QuantizedTensor(np.ones(5, np.uint8), np.array([0.0, 0.5], np.float32)))
    theta = posterior.weights["w"].theta
    half = Posterior({"w": GaussianTensor(theta / 2, np.zeros_like(theta))})
    seen = {"w": of_whole(resembling(rng, 40), 5)}
    whole, other = (
        together({"w": tensor}, own, seen, 32)["w"] for tensor, own in ((before, posterior), (halved, half))
    )
    assert np.array_equal(other.symbols, whole.symbols)
    assert np.allclose(other.codebook, whole.codebook)
    plain = seen["w"].blocks[0].moments[:-1, :-1]
    at_once = _chosen(before, theta, seen["w"])
    monkeypatch.setattr("bayeszip.snapping.TOGETHER", 7)
    parted = _chosen(before, theta, seen["w"])
    assert row_costs(at_once, theta, plain).sum() < row_costs(parted, theta, plain).sum()
    nothing = _chosen(before, theta, of_whole(np.zeros((41, 41)), 5))
    assert np.array_equal(nothing.symbols, before.symbols)


def test_what_is_not_seen_or_all_zero_stays():
    quantized, posterior = problem()
    assert together(quantized, posterior, {}, 32) == quantized
    dead = {"w": replace(quantized["w"], symbols=np.zeros((ROWS, COLUMNS), np.uint8))}
    assert together(dead, posterior, {"w": curvature(np.random.default_rng(1))}, 32) == dead
    # A bias that nobody looks at keeps its symbols, and takes part in where values go.
    joint = together(quantized, posterior, {"w": curvature(np.random.default_rng(1))}, 32)
    assert np.array_equal(joint["b"].symbols == 0, quantized["b"].symbols == 0)
    assert np.array_equal(joint["b"].codebook, joint["w"].codebook)


def test_moments_need_no_gradients_and_are_the_same_each_time():
    network = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.ReLU(), nn.Linear(ROWS, 3))
    loader = ResidentBatches(torch.randn(64, COLUMNS), torch.zeros(64, dtype=torch.long), 16)
    first, second = (seen_moments(network, loader) for _ in range(2))
    assert set(first) == {"0.weight", "2.weight"}
    for name, found in first.items():
        assert (found.outputs == 1).all()
        for one, other in zip(found.blocks, second[name].blocks, strict=True):
            assert np.array_equal(one.moments, other.moments)
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("constant", [-0.4242, 254.3, 30000.7])
def test_inputs_that_are_always_the_same_in_front_of_a_norm_do_no_harm(constant):
    """Their covariance is rounding alone, and may come out below zero."""
    rng = np.random.default_rng(0)
    inputs = torch.randn(2048, 20, generator=torch.Generator().manual_seed(0))
    inputs[:, 12:] = constant
    network = nn.Sequential(nn.Linear(20, 30, bias=False), nn.BatchNorm1d(30))
    seen = seen_moments(network, ResidentBatches(inputs, torch.zeros(2048, dtype=torch.long), 256))["0.weight"]
    assert seen.mean == "1.running_mean"
    before, posterior = survivors(rng, 30, 20)
    symbols = before.symbols.copy()
    symbols[0, :12] = 0  # a row that lives on constants alone
    before = replace(before, symbols=symbols)
    theta = np.where(symbols != 0, posterior.weights["w"].theta, 0).astype(np.float32)
    posterior = Posterior({"w": GaussianTensor(theta, np.zeros_like(theta))})
    after = together({"w": before}, posterior, {"w": seen}, 32)["w"]
    live = np.cov(inputs[:, :12].double().numpy().T)
    costs = [row_costs(replace_columns(tensor), theta[:, :12], live).sum() for tensor in (before, after)]
    assert costs[1] < costs[0]
    assert np.abs(after.codebook).max() < 2


def replace_columns(tensor: QuantizedTensor) -> QuantizedTensor:
    """Its first twelve columns."""
    return QuantizedTensor(tensor.symbols[:, :12], tensor.codebook)


def test_what_would_take_too_long_stays(monkeypatch):
    before, posterior = survivors(np.random.default_rng(0), 5, 8)
    seen = {"w": of_whole(resembling(np.random.default_rng(1), 8), 5)}
    assert together({"w": before}, posterior, seen, 32) != {"w": before}
    for name, most in (("MOST_WEIGHTS", 3), ("MOST_VALUES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(f"bayeszip.snapping.{name}", most)
            assert together({"w": before}, posterior, seen, 32) == {"w": before}


def test_a_weight_that_two_layers_share_is_seen_in_both():
    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    second.weight = first.weight
    network = nn.Sequential(first, second, third)
    inputs = torch.randn(32, 4)
    loader = ResidentBatches(inputs, torch.zeros(32, dtype=torch.long), 16)
    seen = seen_moments(network, loader)
    assert set(seen) == {"0.weight", "2.weight"}
    with torch.no_grad():
        met = torch.cat([inputs, first(inputs)]).numpy()
    np.testing.assert_allclose(seen["0.weight"].blocks[0].moments[:4, :4], met.T @ met / 64, rtol=1e-4, atol=1e-5)


def test_encoders_with_masks_and_layers_called_by_keyword_are_looked_at():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(x, src_key_padding_mask=x[..., 0] > 1)
            return self.head(input=hidden.mean(1))

    loader = ResidentBatches(torch.randn(32, 5, 8).clamp(max=1.5), torch.zeros(32, dtype=torch.long), 16)
    assert {"encoder.layers.0.linear1.weight", "head.weight"} <= set(seen_moments(Masked(), loader))


def test_what_cannot_be_looked_at_is_told_and_costs_nothing():
    network, told = nn.Sequential(nn.Linear(3, 2)), []
    labels = torch.zeros(8, dtype=torch.long)
    infinite, finite = (
        ResidentBatches(inputs, labels, 4) for inputs in (torch.full((8, 3), torch.inf), torch.ones(8, 3))
    )
    assert moments_if_any(network, infinite, told.append) is None
    assert curvatures_if_any(network, {}, infinite, told.append) is None
    assert len(told) == 2
    assert all("takes a shared value by itself" in words for words in told)
    assert "0.weight" in told[0]
    assert set(moments_if_any(network, finite, told.append)) == {"0.weight"}
    assert set(curvatures_if_any(network, {}, finite, told.append)) == {"0.weight"}
    assert len(told) == 2
