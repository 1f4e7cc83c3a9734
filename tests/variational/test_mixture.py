"""The mixture prior: start values of the paper, both ways to its sum and gradients, and what phases do to it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeszip.variational import MixturePrior, mixture_sum
from bayeszip.variational.distributions import log_gamma_density, log_mixture
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
