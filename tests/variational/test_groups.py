"""The prior on units: its divergence against integrals and finite differences, what is coupled, and units that die."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

import bayeszip
from bayeszip import graph
from bayeszip.errors import RecipeError
from bayeszip.fitting import ResidentBatches, Watcher
from bayeszip.recipe import recipe
from bayeszip.tensors import CompressedModel
from bayeszip.variational import GroupPrior, to_variational, variational_weights
from bayeszip.variational.compaction import compact
from bayeszip.variational.distributions import PRUNING_LOG_ALPHA, kl_log_uniform
from bayeszip.variational.groups import GroupSettings, scale_divergence
from bayeszip.variational.selection import Selection, Strength


def integral(density, low: float, high: float) -> float:
    """In pieces around 0, where the logarithm of a scale has its pole."""
    points = sorted({low, *(point for point in (-0.1, 0.0, 0.1, 1.0) if low < point < high), high})
    return sum(integrate.quad(density, a, b, limit=400)[0] for a, b in itertools.pairwise(points))


def along_the_ray(theta: np.ndarray, sigma: np.ndarray):
    """q(w) at w = zθ, as a density of z that is not normalized."""
    return lambda z: math.exp(-0.5 * float((((z - 1) * theta / sigma) ** 2).sum()))


RAYS = [([0.3], [0.1]), ([0.5, -0.2, 0.1], [0.3, 0.4, 0.2]), ([0.05, 0.02], [0.3, 0.4]), ([1.0, -2.0], [0.1, 0.2])]


@pytest.mark.parametrize(("theta", "sigma"), RAYS)
def test_the_divergence_is_the_integral_along_the_ray(theta, sigma):
    theta, sigma = np.array(theta), np.array(sigma)
    signal = float((theta**2 / sigma**2).sum())
    reach = 12 / math.sqrt(signal)
    density = along_the_ray(theta, sigma)
    mass = integral(density, 1 - reach, 1 + reach)
    variance = integral(lambda z: (z - 1) ** 2 * density(z) / mass, 1 - reach, 1 + reach)
    assert variance == pytest.approx(1 / signal)  # N(z | 1, α) with 1/α = Σ θ²/σ²
    entropy = -integral(lambda z: density(z) / mass * math.log(density(z) / mass + 1e-300), 1 - reach, 1 + reach)
    expected_log = integral(lambda z: density(z) / mass * math.log(abs(z) + 1e-300), 1 - reach, 1 + reach)
    # Of pure noise, z = √α ε, the divergence is E log|ε| − H(ε): the constant that makes it vanish there.
    of_noise = -0.5 * (np.euler_gamma + math.log(2)) - 0.5 * math.log(2 * math.pi * math.e)
    exact = expected_log - entropy - of_noise
    signals = torch.tensor([[signal, 1.0]], dtype=torch.float64)
    found = scale_divergence(signals, torch.tensor([[True, False]])).item()
    assert found == pytest.approx(exact, abs=0.012)  # of which eq. 4 is an approximation


@pytest.mark.parametrize(("made", "read"), [(0.1, 0.2), (3.0, 0.01), (2.0, 5.0)])
def test_the_scale_of_a_unit_is_a_product(made, read):
    """Var(z₁z₂) for independent z with mean 1, by integration."""

    def normal(z: float, variance: float) -> float:
        return math.exp(-0.5 * (z - 1) ** 2 / variance) / math.sqrt(2 * math.pi * variance)

    def second_moment(variance: float) -> float:
        reach = 12 * math.sqrt(variance)
        return integral(lambda z: z * z * normal(z, variance), 1 - reach, 1 + reach)

    variance = second_moment(made) * second_moment(read) - 1
    signals = torch.tensor([[1 / made, 1 / read]], dtype=torch.float64)
    expected = kl_log_uniform(torch.tensor(math.log(variance), dtype=torch.float64)).item()
    assert scale_divergence(signals, torch.ones(1, 2, dtype=torch.bool)).item() == pytest.approx(expected)


def test_a_unit_is_dead_as_soon_as_one_side_is_and_extremes_stay_finite():
    signals = torch.tensor([[1e3, 0.0], [0.0, 1e3], [0.0, 0.0], [1e38, 1e38]], requires_grad=True)
    both = torch.ones(4, 2, dtype=torch.bool)
    costs = [scale_divergence(signals[i : i + 1], both[i : i + 1]).item() for i in range(4)]
    assert costs[:3] == pytest.approx([0, 0, 0], abs=1e-12)
    assert 15 < costs[3] < 25
    scale_divergence(signals, both).backward()
    assert signals.grad is not None
    assert signals.grad.isfinite().all()


class Residual(nn.Module):
    """Channels of a sum, read by a flattened map; one weight tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        self.inner = nn.Conv2d(3, 4, 3, padding=1)
        self.outer = nn.Conv2d(4, 3, 3, padding=1, bias=False)
        self.up = nn.ConvTranspose2d(3, 5, 2, stride=2)
        self.first, self.second = nn.Linear(45, 6), nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.third.weight = self.second.weight
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.outer(torch.relu(self.inner(x))))
        x = torch.nn.functional.max_pool2d(torch.relu(self.up(x)), 2).flatten(1)
        x = torch.relu(self.first(x))
        return self.head(torch.relu(self.third(torch.relu(self.second(x)))))


def gaussian(
    network: nn.Module, dtype: torch.dtype = torch.float64, seed: int = 0, selection: Selection | None = None
) -> tuple:
    """Its Gaussian weights, with variances of all sizes."""
    to_variational(network, selection=selection)
    network.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for weight in variational_weights(network):
        weight.theta.data = 0.3 * torch.randn(weight.theta.shape, generator=generator, dtype=dtype)
        weight.log_sigma2.data = torch.randn(weight.theta.shape, generator=generator, dtype=dtype) - 2
    return tuple(variational_weights(network))


def units_of(network: nn.Module, inputs: Tensor):
    traced = graph.trace(network.eval(), (inputs,))
    return graph.coupled_units(CompressedModel(graph.from_state(network, {}, traced), traced, 0))


def residual(dtype: torch.dtype = torch.float64) -> tuple[Residual, tuple, GroupPrior]:
    torch.manual_seed(0)
    network = Residual()
    units = units_of(network, torch.zeros(2, 1, 3, 3))
    weights = gaussian(network, dtype)
    return network, weights, GroupPrior.start(network, units)


def test_sides_hold_all_that_is_coupled():
    """By hand: channels of the sum together, blocks of a flattened map, both dimensions of a tied square."""
    network, weights, term = residual()
    ratio = {w.name: (w.theta.square() * (-w.log_sigma2).exp()).detach() for w in weights}

    def kl(made: Tensor, read: Tensor) -> Tensor:
        return kl_log_uniform(torch.log((1 + 1 / made) * (1 + 1 / read) - 1)).sum()

    def sums(name: str, dim: int) -> Tensor:
        return ratio[name].transpose(0, dim).flatten(1).sum(1)

    stream_made = sums("stem.weight", 0) + ratio["stem.bias"] + sums("outer.weight", 0)
    stream_read = sums("inner.weight", 1) + sums("up.weight", 0)
    expected = kl(stream_made, stream_read)
    expected += kl(sums("inner.weight", 0) + ratio["inner.bias"], sums("outer.weight", 1))
    expected += kl(sums("up.weight", 1) + ratio["up.bias"], sums("first.weight", 1).view(5, 9).sum(1))
    # The tied weight makes and reads the units before, between and behind its two uses.
    square = ratio["second.weight"]
    made = sums("first.weight", 0) + ratio["first.bias"] + ratio["second.bias"] + ratio["third.bias"] + square.sum(1)
    expected += kl(made, square.sum(0) + sums("head.weight", 1))
    assert term.divergence(weights).item() == pytest.approx(expected.item())
    assert {name for name, _ in network.named_parameters()} >= set(ratio)


def test_gradients_are_those_of_finite_differences():
    _, weights, term = residual()
    inputs = [parameter.detach().clone().requires_grad_() for w in weights for parameter in (w.theta, w.log_sigma2)]

    def divergence(*tensors: Tensor) -> Tensor:
        for weight, theta, log_sigma2 in zip(weights, tensors[::2], tensors[1::2], strict=True):
            weight.theta.data, weight.log_sigma2.data = theta.detach(), log_sigma2.detach()
        held = [w._replace(theta=t, log_sigma2=s) for w, t, s in zip(weights, tensors[::2], tensors[1::2], strict=True)]
        return term.divergence(_keyed(held, weights, term))

    assert torch.autograd.gradcheck(divergence, inputs, fast_mode=True)


def _keyed(held, weights, term):
    """Stand-ins are of the layers that the weights are of."""
    for stand_in, weight in zip(held, weights, strict=True):
        term._layer_of[id(stand_in.theta)] = term._layer_of[id(weight.theta)]
    return held


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_to_the_gradients_agree(coupled, dtype):
    network, weights, term = residual(dtype)
    if not coupled:
        term = GroupPrior.start(network, None)
    parameters = [parameter for w in weights for parameter in (w.theta, w.log_sigma2)]
    (value,) = term.cost(weights, 0.7)
    slopes = torch.autograd.grad(value, parameters, allow_unused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    (fused,) = term.add_gradients(weights, torch.tensor(0.7))
    assert fused.dtype == value.dtype == torch.float32
    assert fused.item() == pytest.approx(value.item(), rel=1e-6)
    for parameter, slope in zip(parameters, slopes, strict=True):
        wanted = torch.ones_like(parameter) if slope is None else slope + 1
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


class Attentive(nn.Module):
    """Attention between two maps, whose packed weights are sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def test_a_head_of_attention_is_a_unit():
    network = Attentive()
    units = units_of(network, torch.zeros(2, 4, 8))
    weights = gaussian(network)
    ratio = {w.name: (w.theta.square() * (-w.log_sigma2).exp()).detach() for w in weights}
    assert set(ratio) == {"attention.in_proj_weight", "attention.out_proj.weight", "head.weight", "head.bias"}
    made = ratio["attention.in_proj_weight"].view(3, 2, 4, 8).sum((0, 2, 3))
    read = ratio["attention.out_proj.weight"].view(8, 2, 4).sum((0, 2))
    heads = kl_log_uniform(torch.log((1 + 1 / made) * (1 + 1 / read) - 1)).sum()
    # What attention gives to the head of the network is a unit for each of its outputs.
    outputs = ratio["attention.out_proj.weight"].sum(1), ratio["head.weight"].sum(0)
    between = kl_log_uniform(torch.log((1 + 1 / outputs[0]) * (1 + 1 / outputs[1]) - 1)).sum()
    found = GroupPrior.start(network, units).divergence(weights).item()
    assert found == pytest.approx((heads + between).item())


def test_without_a_graph_rows_and_columns_are_by_themselves():
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    weights = gaussian(network)
    expected = 0.0
    for weight in weights[::2]:
        ratio = (weight.theta.square() * (-weight.log_sigma2).exp()).detach()
        expected += sum(kl_log_uniform(-ratio.sum(dim).log()).sum().item() for dim in (0, 1))
    assert GroupPrior.start(network, None).divergence(weights).item() == pytest.approx(expected)


def strengthened(dtype: torch.dtype, **strengths: float) -> tuple:
    """Weights and term of the same network, where what is named has another strength."""
    torch.manual_seed(0)
    network = Residual()
    units = units_of(network, torch.zeros(2, 1, 3, 3))
    chosen = tuple(Strength(pattern, factor) for pattern, factor in strengths.items())
    return gaussian(network, dtype, selection=Selection(strengths=chosen)), GroupPrior.start(network, units)


def test_a_strength_of_all_weights_is_a_factor_on_the_cost():
    names = [name for name, _ in Residual().named_children()]
    _, weights, term = residual()
    weak, of_weak = strengthened(torch.float64, **dict.fromkeys(names, 0.01))
    assert of_weak.cost(weak, 1.0)[0].item() == pytest.approx(0.01 * term.cost(weights, 1.0)[0].item())


def test_a_unit_has_the_mean_strength_of_its_weights():
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    units = units_of(plain, torch.zeros(2, 4))
    weights = gaussian(plain)
    expected = GroupPrior.start(plain, units).divergence(weights).item()
    for layer in (plain[0], plain[2]):
        layer.strengths = {"weight": 0.1, "bias": 0.1} if layer is plain[2] else {}
    weights = tuple(variational_weights(plain))
    # Four weights and a bias make a unit, and two weights read it.
    found = GroupPrior.start(plain, units).divergence(weights).item()
    assert found == pytest.approx((5 + 2 * 0.1) / 7 * expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_have_the_strengths_too(dtype):
    weights, term = strengthened(dtype, stem=0.1, second=3.0)
    parameters = [parameter for w in weights for parameter in (w.theta, w.log_sigma2)]
    slopes = torch.autograd.grad(term.cost(weights, 0.7)[0], parameters, allow_unused=True)
    (fused,) = term.add_gradients(weights, 0.7)
    assert fused.item() == pytest.approx(term.cost(weights, 0.7)[0].item(), rel=1e-6)
    for parameter, slope in zip(parameters, slopes, strict=True):
        wanted = torch.zeros_like(parameter) if slope is None else slope
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)


def test_nothing_that_could_go_costs_nothing():
    network = nn.Sequential(nn.Linear(4, 2))
    units = units_of(network, torch.zeros(2, 4))
    weights = gaussian(network, torch.float32)
    term = GroupPrior.start(network, units)
    assert term.cost(weights, 3.0)[0].item() == 0
    assert term.add_gradients(weights, 3.0)[0].item() == 0
    assert all(weight.theta.grad.eq(0).all() for weight in weights)


def test_compaction_takes_what_it_leaves_out_and_no_more():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    units = units_of(network, torch.zeros(2, 8))
    weights = gaussian(network, torch.float32)
    term = GroupPrior.start(network, units)
    with torch.no_grad():
        for layer, rows, columns in ((network[0], [1, 4], [0, 2, 7]), (network[2], [3], [1, 4]), (network[4], [], [3])):
            layer.weight[rows], layer.bias[rows] = 1e-12, 1e-12
            layer.weight[:, columns] = 1e-12
            layer.weight_log_sigma2[rows], layer.bias_log_sigma2[rows] = 4.0, 4.0
            layer.weight_log_sigma2[:, columns] = 4.0
    before = term.cost(weights, 1.0)[0].item()
    assert compact(network, PRUNING_LOG_ALPHA, lambda parameter, selection: None)
    assert network[2].weight.shape[0] < 5
    assert term.cost(weights, 1.0)[0].item() == pytest.approx(before, rel=1e-5)
    assert term.add_gradients(weights, 1.0)[0].item() == pytest.approx(before, rel=1e-5)


def test_its_settings_are_checked():
    chosen = recipe("quick").override("all.groups.tau=5", "vd.groups.ramp=0.5")
    assert chosen.phases[0].terms == {"groups": GroupSettings(5.0, 0.5)}
    with pytest.raises(RecipeError, match=r"groups\.tau must be at least 0, not -1"):
        chosen.override("vd.groups.tau=-1")


def test_units_die_and_the_loaded_network_is_smaller(tmp_path):
    """A network far too wide for its task, compressed with and without the prior on units."""
    inputs = torch.randn(1024, 10, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, 0] + inputs[:, 1] > 0).long() + 2 * (inputs[:, 2] > 0).long()

    def compressed(*settings: str):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
        batches = ResidentBatches(inputs, targets, 64, shuffle=True, seed=2)
        chosen = recipe("quick").override("epochs_scale=0.25", "all.tau1=0.3", *settings)
        return bayeszip.compress(
            network, batches, val_loader=batches, recipe=chosen, device="cpu", watcher=Watcher(), pretrain=True
        )

    def widths(result) -> list[int]:
        result.save(tmp_path / "net.bayz")
        return [p.shape[0] for p in bayeszip.load(tmp_path / "net.bayz").parameters() if p.dim() > 1]

    without, with_it = compressed(), compressed("all.groups.tau=3")
    assert sum(widths(with_it)) < 0.75 * sum(widths(without))
    assert with_it.bytes < 0.8 * without.bytes
    assert with_it.accuracy >= without.accuracy - 0.06
    parts = [stats.parts for stats in with_it.fit.history if stats.phase in ("vd", "vd+sws")]
    assert all(part["groups"] > 0 for part in parts)


def test_a_layer_with_a_forward_of_its_own_makes_what_its_kind_makes():
    """A transposed convolution reads by its rows and makes by its columns, however it is sampled."""

    class Own(nn.ConvTranspose2d):
        def forward(self, inputs):
            return super().forward(inputs)

    found = []
    for kind in (nn.ConvTranspose2d, Own):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), kind(4, 1, 3))
        traced = graph.trace(network.eval(), torch.randn(2, 1, 8, 8))
        units = graph.coupled_units(CompressedModel(graph.from_state(network, graph=traced), traced))
        to_variational(network, log_sigma2=-8.0)
        with torch.no_grad():
            network[0].weight_log_sigma2.fill_(12.0)
            network[0].bias_log_sigma2.fill_(12.0)
        found.append(GroupPrior(network, units).divergence(tuple(variational_weights(network))).item())
    assert found == pytest.approx([0, 0], abs=1e-4)  # all that makes the four channels is noise
