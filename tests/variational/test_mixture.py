"""The mixture prior: start values of the paper, both ways to its sum and gradients, and what phases do to it."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bayeszip.errors import RecipeError
from bayeszip.fitting import Phase
from bayeszip.fitting.state import load_module_state, module_state
from bayeszip.variational import MixturePrior, mixture_sum, to_variational, variational_weights
from bayeszip.variational.distributions import log_gamma_density, log_mixture
from bayeszip.variational.mixture import MixtureStart
from bayeszip.variational.mixture_sum import NODE_SPACING, Components, log_mixture_sum


def test_start_values_are_table_3s():
    """μ_k = kΔμ for k = −8…8, log λ_k = −2 log(0.9Δμ), Δμ = 2 std/17, and log π_k over K−1 (the erratum)."""
    std = 0.0731
    means, log_precisions, log_proportions = (part.detach() for part in MixturePrior(17, std).components())
    spacing = 2 * std / 17
    expected = torch.tensor([0.0] + [k * spacing for k in range(-8, 9) if k])
    torch.testing.assert_close(means, expected)
    torch.testing.assert_close(log_precisions, torch.full((17,), -2 * math.log(0.9 * spacing)))
    assert log_proportions[0].item() == pytest.approx(math.log(0.999))
    torch.testing.assert_close(log_proportions[1:], torch.full((16,), math.log(0.001 / 16)), rtol=1e-5, atol=0)
    assert log_proportions.double().exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_the_hyper_prior_is_the_papers():
    prior = MixturePrior(17, 0.05)
    assert (prior.hyper_shape, prior.hyper_rate.item()) == (1e5, 10.0)
    expected = log_gamma_density(prior.log_precisions.detach().double(), 1e5, 10.0).sum()
    assert prior.log_hyper_prior().item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_zero_component_stays_pinned():
    prior = MixturePrior(5, 0.1)
    theta = torch.randn(1000) * 0.1
    optimizer = torch.optim.Adam(prior.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (-prior.log_prob(theta)).backward()
        optimizer.step()
    means, _, log_proportions = prior.components()
    assert means[0] == 0
    assert log_proportions[0].exp().item() == pytest.approx(0.999)
    assert log_proportions.exp().sum().item() == pytest.approx(1, abs=1e-6)
    assert len(set(log_proportions[1:].tolist())) == 4


@pytest.mark.parametrize("components", [1, 2, 4])
def test_any_number_of_components(components):
    prior = MixturePrior(components, 0.1)
    means, log_precisions, log_proportions = prior.components()
    assert len(means) == len(log_precisions) == len(log_proportions) == components
    assert log_proportions.exp().sum().item() == pytest.approx(1)
    prior.log_prob(torch.randn(100)).backward()
    assert torch.isfinite(prior.log_precisions.grad).all()


def test_constant_weights_start_on_the_hyper_priors_scale():
    prior = MixturePrior(17, weight_std=0.0)
    means, log_precisions, _ = prior.components()
    assert means.unique().numel() == 17
    assert (means[1:] - means[:-1]).abs().min().item() == pytest.approx(0.01, rel=1e-5)
    assert torch.isfinite(log_precisions).all()


def exact_gradients(theta: torch.Tensor, components: Components) -> tuple[float, list[torch.Tensor]]:
    """Σ log GM and its gradients in θ, μ, log λ, log π by autograd through the definition, in float64."""
    tensors = [tensor.detach().double().requires_grad_() for tensor in (theta, *components)]
    value = log_mixture(*tensors).sum()
    return value.item(), list(torch.autograd.grad(value, tensors))


def fast_gradients(
    theta: torch.Tensor, components: Components, method: mixture_sum.Method
) -> tuple[float, list[torch.Tensor]]:
    tensors = [tensor.detach().clone().requires_grad_() for tensor in (theta, *components)]
    value = log_mixture_sum(tensors[:1], Components(*tensors[1:]), method)
    return value.item(), [gradient.double() for gradient in torch.autograd.grad(value, tensors)]


@st.composite
def mixtures(draw: st.DrawFn, tightest: float) -> tuple[torch.Tensor, Components]:
    """Weights, most of them near the components, and a mixture: tight ones, wide ones, near and far."""
    free = draw(st.integers(1, 16))
    reach = draw(st.floats(0.01, 2))
    means = torch.tensor([0.0, *(reach * draw(st.floats(-1, 1)) for _ in range(free))])
    deviations = torch.tensor([draw(st.floats(tightest, 0.2)) for _ in range(free + 1)]) * reach
    zero = draw(st.floats(0.01, 0.999))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shares = torch.rand(free, generator=generator) + 1e-3
    proportions = torch.cat([torch.tensor([zero]), (1 - zero) * shares / shares.sum()])
    near = torch.randint(free + 1, (4000,), generator=generator)
    theta = means[near] + deviations[near] * torch.randn(4000, generator=generator)
    theta[:200] = reach * torch.randn(200, generator=generator)
    return theta, Components(means, -2 * deviations.log(), proportions.log())


@given(mixtures(tightest=1e-2))
@settings(max_examples=60)
def test_exact_way_is_the_definition(case):
    theta, components = case
    value, gradients = exact_gradients(theta, components)
    fast_value, fast = fast_gradients(theta, components, "exact")
    assert fast_value == pytest.approx(value, rel=1e-4, abs=0.05)
    # float32: a stray weight 300 σ away has terms near 10⁵ whose differences decide who is responsible.
    scale = (0.5 * components.log_precisions).exp().max().item()
    torch.testing.assert_close(fast[0], gradients[0], atol=2e-3 * scale, rtol=1e-2)
    torch.testing.assert_close(fast[1], gradients[1], atol=0.5 * scale, rtol=2e-3)
    torch.testing.assert_close(fast[2], gradients[2], atol=0.5, rtol=2e-3)
    torch.testing.assert_close(fast[3], gradients[3], atol=0.5, rtol=2e-3)


@given(mixtures(tightest=1e-3))
@settings(max_examples=60)
def test_grid_is_exact_to_its_tolerance(case):
    """Within 10⁻³ nats a weight; slopes within those found one node away, give or take 2 % of 1/σ; the rest 1 %."""
    theta, components = case
    value, gradients = exact_gradients(theta, components)
    fast_value, fast = fast_gradients(theta, components, "grid")
    assert fast_value == pytest.approx(value, rel=3e-5, abs=1e-3 * theta.numel())

    narrowest = (-0.5 * components.log_precisions.max()).exp().item()
    node = NODE_SPACING * narrowest
    nearby = torch.stack(
        [exact_gradients(theta.double() + shift * node, components)[1][0] for shift in (-1, -0.5, 0, 0.5, 1)]
    )
    slack = 0.02 / narrowest + 1e-3 * gradients[0].abs()
    assert (fast[0] >= nearby.min(0).values - slack).all()
    assert (fast[0] <= nearby.max(0).values + slack).all()

    count = theta.numel()
    torch.testing.assert_close(fast[1] * narrowest, gradients[1] * narrowest, atol=1e-3 * count, rtol=1e-2)
    torch.testing.assert_close(fast[2], gradients[2], atol=1e-3 * count, rtol=1e-2)
    torch.testing.assert_close(fast[3], gradients[3], atol=1e-3 * count, rtol=1e-2)


def trained_case() -> tuple[torch.Tensor, Components]:
    """As in a run: most weights at zero, the rest near 16 shared values, deviations of 0.01."""
    generator = torch.Generator().manual_seed(0)
    prior = MixturePrior(17, 0.2)
    prior.tighten(0.01)
    theta = 0.002 * torch.randn(50_000, generator=generator)
    picks = prior.means.detach()[torch.randint(16, (2000,), generator=generator)]
    theta[:2000] = picks + 0.01 * torch.randn(2000, generator=generator)
    return theta, Components(*(part.detach() for part in prior.components()))


def test_grid_in_a_run_is_within_a_few_thousandths():
    theta, components = trained_case()
    value, gradients = exact_gradients(theta, components)
    fast_value, fast = fast_gradients(theta, components, "auto")
    assert fast_value == pytest.approx(value, rel=1e-5)
    for ours, exact in zip(fast, gradients, strict=True):
        assert ((ours - exact).norm() / exact.norm()).item() < 3e-3


def test_gradients_are_float64_finite_differences():
    theta, components = trained_case()
    _, fast = fast_gradients(theta, components, "auto")
    tensors = [tensor.double() for tensor in components]
    step = 1e-6
    for position in range(3):
        for k in (0, 1, 8, 16):
            moved = []
            for sign in (1, -1):
                shifted = [tensor.clone() for tensor in tensors]
                shifted[position][k] += sign * step
                moved.append(log_mixture(theta.double(), *shifted).sum())
            difference = ((moved[0] - moved[1]) / (2 * step)).item()
            assert fast[1 + position][k].item() == pytest.approx(difference, rel=2e-3, abs=1e-3 * theta.numel())


def test_auto_takes_the_grid_where_it_pays(monkeypatch):
    taken = []
    on_grid = mixture_sum._on_grid
    monkeypatch.setattr(mixture_sum, "_on_grid", lambda *args: taken.append(args[2]) or on_grid(*args))
    theta, components = trained_case()
    log_mixture_sum([theta], components)
    assert len(taken) == 1
    log_mixture_sum([theta[:100]], components)  # fewer weights than nodes
    log_mixture_sum([theta], components, "exact")
    log_mixture_sum([torch.cat([theta, torch.tensor([1e6])])], components, "grid")  # more nodes than allowed
    assert len(taken) == 1


def test_memory_is_not_weights_times_components(monkeypatch):
    widths = []
    evaluate = mixture_sum._evaluate
    monkeypatch.setattr(mixture_sum, "_evaluate", lambda p, c: widths.append(p.numel() * 17) or evaluate(p, c))
    log_mixture_sum([torch.randn(300_000)], MixturePrior(17, 1.0).components(), "exact")
    assert max(widths) <= mixture_sum.CHUNK
    assert sum(widths) == 300_000 * 17


@pytest.mark.parametrize("method", ["auto", "exact"])
def test_several_tensors_count_as_one_and_scale_and_weights_of_the_output_apply(method):
    theta, components = trained_case()
    whole = log_mixture_sum([theta], components).item()
    parts = [part.clone().requires_grad_() for part in theta.view(100, 500).split([10, 90])]
    value = log_mixture_sum(parts, components, method, scale=-0.5)
    assert value.item() == pytest.approx(-0.5 * whole, rel=1e-5)
    (3 * value).backward()
    expected = exact_gradients(theta, components)[1][0].view(100, 500)
    assert ((parts[1].grad - -1.5 * expected[10:]).norm() / expected.norm()).item() < 5e-3


@pytest.mark.parametrize("method", ["auto", "exact"])
def test_backward_twice_adds_up(method):
    """What forward found may not be changed by the first backward."""
    theta, components = trained_case()
    theta.requires_grad_()
    value = log_mixture_sum([theta], components, method)
    value.backward(retain_graph=True)
    once = theta.grad.clone()
    value.backward(retain_graph=True)
    value.backward()
    torch.testing.assert_close(theta.grad, 3 * once)


@pytest.mark.parametrize("method", ["auto", "grid", "exact"])
def test_odd_weights(method):
    components = MixturePrior(5, 0.1).components()
    assert log_mixture_sum([torch.zeros(0)], components, method).item() == 0
    one = log_mixture_sum([torch.full((1,), 0.3)], components, method).item()
    assert one == pytest.approx(log_mixture(torch.tensor([0.3]), *components).item(), rel=1e-4)
    same = log_mixture_sum([torch.full((64,), 0.3)], components, method).item()
    assert same == pytest.approx(64 * one, rel=1e-4)
    assert math.isnan(log_mixture_sum([torch.tensor([0.1, math.nan])], components, method).item())


def test_assign_is_the_most_responsible_component():
    prior = MixturePrior(17, 0.1)
    theta = torch.linspace(-0.5, 0.5, 999).view(27, 37)
    joint = torch.stack(
        [
            p + torch.distributions.Normal(m, (-0.5 * precision).exp()).log_prob(theta)
            for m, precision, p in zip(*prior.components(), strict=True)
        ]
    )
    assert torch.equal(prior.assign(theta), joint.argmax(0))
    assert prior.assign(torch.zeros(0, 3)).shape == (0, 3)


def test_tighten_moves_components_and_the_hyper_priors_mode():
    prior = MixturePrior(17, 0.1)
    prior.tighten(0.002)
    assert (-0.5 * prior.log_precisions).exp().tolist() == pytest.approx([0.002] * 17, rel=1e-4)
    prior.log_hyper_prior().backward()
    assert prior.log_precisions.grad.abs().max() < 0.1  # a stationary point; the terms are near 10⁵
    again = MixturePrior(17, 0.1)
    again.load_state_dict(prior.state_dict())
    assert torch.equal(again.log_hyper_prior(), prior.log_hyper_prior())


def test_reseed_places_components_at_quantiles():
    prior = MixturePrior(5, 0.1)
    prior.log_proportions.data.normal_()
    survivors = torch.randperm(1000).float()
    prior.reseed(survivors)
    assert prior.means.tolist() == [125, 375, 625, 875]
    assert prior.log_proportions.tolist() == [0] * 4
    before = prior.means.clone()
    prior.reseed(torch.zeros(0))
    assert torch.equal(prior.means, before)


def test_even_seeding_divides_the_range_and_leaves_no_tail_without_a_component():
    prior = MixturePrior(9, 0.1, seeding="even")
    prior.log_proportions.data.normal_()
    survivors = torch.randn(10000, generator=torch.Generator().manual_seed(0)).double()
    survivors[:2] = torch.tensor([-40.0, 50.0])
    prior.reseed(survivors[torch.randperm(10000)])
    means = prior.means.double()
    assert (means[0], means[-1]) == (-40, 50)
    steps = means[1:-1].diff()
    assert torch.allclose(steps, steps.mean())  # two outliers have a component each, and don't widen the steps
    low, high = survivors.sort().values[[10, -11]]
    assert steps.mean().item() == pytest.approx((high - low).item() / 7)
    assert prior.log_proportions.tolist() == [0] * 8


def test_even_seeding_is_even_to_the_ends_where_there_are_no_outliers():
    prior = MixturePrior(5, 0.1, seeding="even")
    prior.reseed(torch.randperm(101).float())
    assert prior.means.tolist() == pytest.approx([0, 100 / 3, 200 / 3, 100])
    one = MixturePrior(2, 0.1, seeding="even")
    one.reseed(torch.arange(100.0))
    assert one.means.tolist() == [50]


def test_the_recipe_says_how_components_are_seeded():
    network = nn.Sequential(nn.Linear(10, 10))
    to_variational(network, log_sigma2=-20.0)
    weights = tuple(variational_weights(network))
    prior = MixturePrior.start(network, MixtureStart(components=9, seeding="even"))
    prior.begin(Phase(name="sws", tau2=1.0, reseed=True), weights)
    theta = torch.cat([weight.theta.detach().flatten() for weight in weights])
    assert (prior.means[0], prior.means[-1]) == (theta.min(), theta.max())
    with pytest.raises(RecipeError, match=r"mixture\.seeding must be one of quantiles, even, not 'odd'"):
        MixtureStart(seeding="odd")


RESEED = Phase(name="sws", tau2=1.0, reseed=True)


def layered(factor: float = 20.0, units: str = "layer") -> tuple[nn.Module, tuple, MixturePrior]:
    """Two layers alike, but that the weights of the second are so many times larger."""
    torch.manual_seed(0)
    first, second = nn.Linear(30, 40), nn.Linear(40, 30)
    network = nn.Sequential(first, nn.ReLU(), second)
    with torch.no_grad():
        first.weight.normal_(0, 0.05)
        second.weight.copy_(factor * first.weight.T)
    to_variational(network, log_sigma2=-20.0)
    weights = tuple(variational_weights(network))
    return network, weights, MixturePrior.start(network, MixtureStart(components=9, zero_proportion=0.5, units=units))


def units_of(prior: MixturePrior) -> dict[str, float]:
    return dict(prior.frozen().units)


def test_units_are_sizes_of_layers_and_leave_the_whole_at_its_size():
    _, weights, prior = layered()
    assert units_of(prior) == {}  # until a phase begins with reseed
    prior.begin(Phase(name="sws", tau2=1.0), weights)
    assert units_of(prior) == {}
    prior.begin(RESEED, weights)
    units = units_of(prior)
    assert set(units) == {"0.weight", "2.weight"}
    assert units["2.weight"] / units["0.weight"] == pytest.approx(20, rel=1e-3)
    prior.begin(RESEED, weights[::2])  # without biases, which have no units
    units = units_of(prior)
    whole = torch.cat([weight.theta.detach().flatten() for weight in weights[::2]])
    seen = torch.cat([(weight.theta.detach() / units[weight.name]).flatten() for weight in weights[::2]])
    assert seen.square().mean().item() == pytest.approx(whole.square().mean().item(), rel=2e-3)
    assert all(float(np.float16(unit)) == unit for unit in units.values())


def test_tensors_without_survivors_and_tiny_or_huge_ones_have_units_that_half_precision_holds():
    network, weights, prior = layered()
    with torch.no_grad():
        network[0].weight.zero_()
    prior.begin(RESEED, weights)
    assert prior.units.tolist()[0] == 1
    with torch.no_grad():
        network[0].weight.fill_(1e-12)
        network[0].weight_log_sigma2.fill_(-80)
    prior.begin(RESEED, weights)
    assert prior.units.tolist()[0] == 2**-14
    with torch.no_grad():
        for weight in weights:
            weight.theta.zero_()
    prior.begin(RESEED, weights)
    assert prior.units.tolist() == [1, 1]


NORMS = [
    nn.BatchNorm1d(3), nn.SyncBatchNorm(3), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.RMSNorm(3)
]  # fmt: skip


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_networks_with_norms_have_units_by_themselves(norm):
    network = nn.Sequential(nn.Linear(4, 3), nn.Sequential(norm), nn.Linear(3, 2))
    to_variational(network)
    assert MixturePrior.start(network, None).units.tolist() == [1, 1]
    assert MixturePrior.start(network, MixtureStart(units="network")).units is None
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    to_variational(plain)
    assert MixturePrior.start(plain, None).units is None
    assert MixturePrior.start(plain, MixtureStart(units="layer")).units.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["cost", "add_gradients"])
def test_cost_and_gradients_in_units_are_those_of_the_plain_formula(way, dtype):
    """−τ Σ log GM(θ/u), by autograd in float64."""
    network, weights, prior = layered()
    prior.begin(RESEED, weights)
    network.to(dtype)
    units, tau = units_of(prior), 0.3
    if way == "cost":
        value = prior.cost(weights, tau)[0]
        value.backward()
    else:
        value = prior.add_gradients(weights, tau)[0]
    thetas = [weight.theta.detach().double().requires_grad_() for weight in weights]
    components = [part.detach().double().requires_grad_() for part in prior.components()]
    seen = [theta / units.get(weight.name, 1.0) for theta, weight in zip(thetas, weights, strict=True)]
    expected = -tau * log_mixture(torch.cat([part.flatten() for part in seen]), *components).sum()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-3
    for theta, weight in zip(thetas, weights, strict=True):
        assert weight.theta.grad.dtype == dtype
        size = theta.grad.abs().max().item()
        torch.testing.assert_close(weight.theta.grad.double(), theta.grad, rtol=rtol, atol=rtol * size)
    torch.testing.assert_close(prior.means.grad.double(), components[0].grad[1:], rtol=1e-3, atol=1e-2)


def test_units_of_one_are_no_units_bit_for_bit():
    for factor in (1.0, 20.0):
        (network, weights, prior), (other, others, plain) = layered(factor), layered(factor, "network")
        one, two = prior.add_gradients(weights, 0.3), plain.add_gradients(others, 0.3)
        assert one == two
        for a, b in zip(
            (*network.parameters(), *prior.parameters()), (*other.parameters(), *plain.parameters()), strict=True
        ):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)
        assert all(torch.equal(prior.keeps(a), plain.keeps(b)) for a, b in zip(weights, others, strict=True))


def test_the_scale_of_a_layer_makes_no_difference_in_units():
    """Up to the common factor by which the size of the whole changes."""
    found = []
    for factor in (1.0, 16.0):
        _, weights, prior = layered(factor)
        weights = weights[::2]  # without biases, which have no units
        prior.begin(RESEED, weights)
        size = math.sqrt((1 + factor**2) / 2)
        prior.tighten(0.004 * size)
        found.append((prior.means.detach() / size, [prior.keeps(weight) for weight in weights]))
    (means, kept), (others, others_kept) = found
    torch.testing.assert_close(means, others, rtol=2e-3, atol=0)
    for one, other in zip(kept, others_kept, strict=True):
        assert 0 < one.sum() < one.numel()
        assert (one == other).float().mean() > 0.995
    assert (kept[0].float().mean() - kept[1].float().mean()).abs() < 0.005


def test_units_are_saved_loaded_and_copied_with_the_term():
    network, weights, prior = layered()
    prior.begin(RESEED, weights)
    loaded = MixturePrior.start(network, MixtureStart(components=9, zero_proportion=0.5, units="layer"))
    load_module_state(loaded, copy.deepcopy(module_state(prior)))
    for other in (loaded, copy.deepcopy(prior)):
        assert units_of(other) == units_of(prior) != {}
        assert torch.equal(other.cost(weights, 0.1)[0], prior.cost(weights, 0.1)[0])


@pytest.mark.parametrize(("factor", "own"), [(1.0, False), (20.0, False), (1e3, True), (1e-4, True)])
def test_layers_that_differ_a_hundredfold_have_units_of_their_own(factor, own):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        network[4].weight.copy_(network[2].weight[:2, :8] * factor)
        network[0].weight.copy_(network[2].weight.t() * 0.5)
    to_variational(network)
    assert MixtureStart().by_layer(network) == own
    assert not MixtureStart(units="network").by_layer(network)
    assert (MixturePrior.start(network, MixtureStart()).units is not None) == own
