"""The rate: expected bits against enumeration, both ways to its gradients, and prices that are asked for in time."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayeszip
from bayeszip import codec
from bayeszip.compressor import Compressor
from bayeszip.ending import prices_of_zeros
from bayeszip.errors import RecipeError
from bayeszip.fitting import Course, ResidentBatches, Watcher, start_terms
from bayeszip.fitting.course import Problem
from bayeszip.fitting.keeper import Checkpointing
from bayeszip.recipe import recipe
from bayeszip.tensors import CompressedModel, QuantizedTensor
from bayeszip.variational import Rate, to_variational, variational_weights
from bayeszip.variational.distributions import PRUNING_LOG_ALPHA, log_alpha
from bayeszip.variational.rate import RateSettings


def gaussian(network: nn.Module, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple:
    to_variational(network)
    network.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for weight in variational_weights(network):
        weight.theta.data = 0.3 * torch.randn(weight.theta.shape, generator=generator, dtype=dtype)
        weight.log_sigma2.data = 2 * torch.randn(weight.theta.shape, generator=generator, dtype=dtype) - 2
    return tuple(variational_weights(network))


def kept_where_large(weight) -> Tensor:
    return weight.theta.abs() > 0.3


def priced(weights, settings: RateSettings, pricing=prices_of_zeros) -> Rate:
    rate = Rate(weights, pricing)
    rate.renew(settings, 0, weights, kept_where_large)
    return rate.to(weights[0].theta.dtype)


def test_bits_count_by_the_strength_of_their_layer():
    network = nn.Sequential(nn.Linear(3, 3))
    weights = gaussian(network)
    halved = tuple(weight._replace(strength=0.5) for weight in weights)
    whole, half = (priced(each, RateSettings(1.0)).expected_bits(each).item() for each in (weights, halved))
    assert half == pytest.approx(0.5 * whole, rel=1e-6)


def test_a_target_turns_its_weight_with_that_of_the_divergence():
    network, phase = nn.Sequential(nn.Linear(3, 3)), recipe("deep").phases[0]
    weights = gaussian(network)
    terms = start_terms(network, [phase], {Rate.name: prices_of_zeros})
    course = Course(Problem(network, weights, terms, None, nn.functional.cross_entropy, 1), phase)
    once, thrice = (course.dials_at(1.0, strength).of_terms for strength in (1, 3))
    assert [dials[0] for dials in thrice] == pytest.approx([3 * dials[0] for dials in once])
    assert len(once) == 2


@pytest.mark.parametrize("tau1", [0.0, 1.0])
def test_it_is_asked_the_prices_of_what_is_not_pruned_with_a_divergence_or_without(tau1):
    asked = []

    def pricing(kept):
        asked.append({name: float(own.mean()) for name, own in kept.items()})
        return prices_of_zeros(kept)

    network, phase = nn.Sequential(nn.Linear(30, 30)), recipe("deep").override(f"all.tau1={tau1}").phases[0]
    weights = gaussian(network, torch.float32)
    terms = start_terms(network, [phase], {Rate.name: pricing})
    course = Course(Problem(network, weights, terms, None, nn.functional.cross_entropy, 1), phase)
    course.renew(0)
    pruned = {weight.name: float((log_alpha(*weight[1:3]) < PRUNING_LOG_ALPHA).float().mean()) for weight in weights}
    assert asked == [pytest.approx(pruned)]
    assert 0 < course.share_of_zeros(930) < 1


def test_expected_bits_are_those_of_all_patterns_enumerated():
    """Σ over all 2ⁿ patterns of P(pattern) · bits(pattern), each weight dropped at its own rate."""
    weights = gaussian(nn.Sequential(nn.Linear(3, 3)))
    rate = priced(weights, RateSettings(1.0, value_bits=2.5))
    told = prices_of_zeros({w.name: kept_where_large(w).numpy() for w in weights})
    zero, nonzero = (np.concatenate([told[w.name][i].ravel() for w in weights]) for i in (0, 1))
    zero = np.minimum(zero, nonzero)
    alpha = np.concatenate([(w.log_sigma2.exp() / w.theta.square()).detach().numpy().ravel() for w in weights])
    dropped = alpha / (1 + alpha)
    expected = 0.0
    for pattern in itertools.product((False, True), repeat=len(alpha)):
        kept = np.array(pattern)
        probability = np.where(kept, 1 - dropped, dropped).prod()
        expected += probability * np.where(kept, nonzero + 2.5, zero).sum()
    assert rate.expected_bits(weights).item() == pytest.approx(expected, rel=1e-6)
    assert rate.cost(weights, 0.5)[0].item() == pytest.approx(0.5 * math.log(2) * expected, rel=1e-5)


def test_prices_of_zeros_are_the_coders_own():
    """Summed up where weights are, they are what the file of the pattern takes."""
    generator = np.random.default_rng(0)
    kept = {"a": generator.random((40, 60)) < 0.1, "b": generator.random((8, 4, 3, 3)) < 0.5}
    told = prices_of_zeros(kept)
    model = CompressedModel({n: QuantizedTensor(own.astype(np.uint8), np.arange(2.0)) for n, own in kept.items()})
    prices = codec.prices(model)
    paid = sum(float(np.where(kept[name], told[name][1], told[name][0]).sum()) for name in kept)
    values = sum(kept[name].sum() * prices.tensors[name].value[1] for name in kept)
    assert paid + values + prices.beside == pytest.approx(prices.bits, rel=0.02)
    # Zeros among zeros are cheaper than zeros among weights.
    zero, nonzero = told["a"]
    assert nonzero.mean() > 2.5 > 0.3 > zero.mean() > 0
    assert told["b"][0].mean() > zero.mean()


def test_gradients_are_those_of_finite_differences():
    weights = gaussian(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    rate = priced(weights, RateSettings(1.0))
    inputs = [parameter.detach().clone().requires_grad_() for w in weights for parameter in (w.theta, w.log_sigma2)]

    def bits(*tensors: Tensor) -> Tensor:
        pairs = zip(weights, tensors[::2], tensors[1::2], strict=True)
        return rate.expected_bits([w._replace(theta=theta, log_sigma2=own) for w, theta, own in pairs])

    assert torch.autograd.gradcheck(bits, inputs)


@pytest.mark.parametrize("fused", ["cpu", "one vector"])
def test_all_ways_to_the_gradients_agree(fused, monkeypatch):
    if fused == "one vector":
        monkeypatch.setattr("bayeszip.variational.rate._on_cpu", bayeszip.variational.rate._as_one)
    weights = gaussian(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(30, 40)), torch.float32)
    weights[0].theta.data[0] = 0.0
    weights[0].theta.data[1], weights[0].log_sigma2.data[1] = 1e15, -90.0
    weights[0].log_sigma2.data[2] = 90.0
    rate = priced(weights, RateSettings(1.0))
    parameters = [parameter for w in weights for parameter in (w.theta, w.log_sigma2)]
    (value,) = rate.cost(weights, 0.7)
    slopes = torch.autograd.grad(value, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    (found,) = rate.add_gradients(weights, 0.7)
    assert found.item() == pytest.approx(value.item(), rel=1e-5)
    for parameter, slope in zip(parameters, slopes, strict=True):
        assert parameter.grad.isfinite().all()
        torch.testing.assert_close(parameter.grad, slope + 1, rtol=1e-4, atol=1e-5)


def test_a_lone_weight_is_pushed_harder_than_one_in_company():
    weights = gaussian(nn.Sequential(nn.Linear(30, 30, bias=False)), torch.float32)
    kept = torch.zeros(30, 30, dtype=torch.bool)
    kept[:8] = torch.rand(8, 30, generator=torch.Generator().manual_seed(0)) < 0.8
    kept[20, 20] = True
    rate = Rate(weights, prices_of_zeros)
    rate.renew(RateSettings(1.0), 0, weights, lambda weight: kept)
    extra = rate.extra.view(30, 30)
    assert extra[20, 20] > extra[4][kept[4]].mean() + 2


def test_a_dense_network_is_not_held_dense():
    weights = gaussian(nn.Sequential(nn.Linear(30, 30)), torch.float32)
    rate = Rate(weights, prices_of_zeros)
    rate.renew(RateSettings(1.0, value_bits=3.0), 0, weights, lambda weight: torch.ones_like(weight.theta) > 0)
    assert rate.extra.min() >= 3
    assert rate.extra.max() < 4


def test_prices_are_asked_for_in_time_and_when_weights_are_gone():
    weights = gaussian(nn.Sequential(nn.Linear(6, 5)), torch.float32)
    asked = []

    def pricing(kept):
        asked.append({name: own.shape for name, own in kept.items()})
        return prices_of_zeros(kept)

    rate, settings = Rate(weights, pricing), RateSettings(1.0, refresh_every=3)
    for epoch in range(7):
        where = rate.extra.data_ptr()
        rate.renew(settings, epoch, weights, kept_where_large)
        assert rate.extra.data_ptr() == where  # recorded steps read it there
    assert len(asked) == 3
    weights[0].theta.data, weights[0].log_sigma2.data = weights[0].theta.data[:3], weights[0].log_sigma2.data[:3]
    rate.renew(settings, 7, weights, kept_where_large)
    assert asked[-1]["0.weight"] == (3, 6)
    assert rate.extra.numel() == 3 * 6 + 5
    assert rate.cost(weights, 1.0)[0].isfinite()


def test_it_needs_prices_and_its_settings_are_checked():
    network = nn.Sequential(nn.Linear(3, 3))
    to_variational(network)
    with pytest.raises(RecipeError, match="the rate needs prices"):
        Rate.start(network, None)
    with pytest.raises(RecipeError, match=r"rate\.refresh_every must be at least 1, not 0"):
        recipe("quick").override("all.rate.refresh_every=0")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))


def batches() -> ResidentBatches:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return ResidentBatches(inputs, (inputs[:, 0] > 0).long(), 16, shuffle=True, seed=2)


CHOSEN = ("epochs_scale=0.05", "all.distillation=0", "all.rate.tau=1", "all.groups.tau=1", "all.rate.refresh_every=2")


class Stopping(Watcher):
    """Ends a run in the middle, as a signal would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_batch(self, phase, done):
        self.after -= 1
        if not self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [3, 22, 28])
def test_all_terms_resume_bit_for_bit(tmp_path, after):
    def compressed(**options):
        options = {"watcher": Watcher(), **options}
        return bayeszip.compress(
            network(), batches(), recipe=recipe("quick").override(*CHOSEN), device="cpu", **options
        )

    expected, kept = compressed(), Checkpointing(tmp_path / "checkpoints", every="1steps")
    parts = expected.fit.history[0].parts
    assert parts["rate"] > 0
    assert parts["groups"] > 0
    with pytest.raises(KeyboardInterrupt):
        compressed(checkpoints=kept, watcher=Stopping(after))
    resumed = compressed(checkpoints=kept, resume=True)
    assert resumed.blob == expected.blob
    assert [stats.parts for stats in resumed.fit.history] == [stats.parts for stats in expected.fit.history]


def test_a_loop_of_ones_own_asks_for_prices_too():
    model = network()
    compressor = Compressor(model, recipe("quick").override(*CHOSEN), n_data=96, batch_size=16)
    rate = next(term for term in compressor.terms if isinstance(term, Rate))
    asked = []
    inner = rate._pricing
    rate._pricing = lambda kept: asked.append(compressor.stats().step) or inner(kept)
    assert rate.extra.abs().max() > 0
    optimizer = torch.optim.Adam(compressor.parameter_groups())
    compressor.set_rates_of(optimizer)
    for _ in range(compressor.total_steps // 6):
        for x, y in batches():
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(x), y) + compressor.regularizer()).backward()
            optimizer.step()
            compressor.step()
    assert asked == [12, 24]  # each second epoch of six steps, and as the second phase begins
