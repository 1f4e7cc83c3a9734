"""The loss against a value computed by hand, its gradients, its one division by N, and its float32."""

import math

import pytest
import torch
from torch import nn

from bayeszip.variational import Divergence, MixturePrior, Weighed, regularizer, to_variational, variational_weights
from bayeszip.variational.distributions import K1, K2, K3, THETA2_FLOOR
from bayeszip.variational.divergence import _slopes, kl_sum
from bayeszip.variational.layers import VariationalWeight
from bayeszip.variational.objective import add_gradients


def kl_by_hand(theta: float, log_sigma2: float) -> float:
    log_alpha = log_sigma2 - math.log(theta**2 + THETA2_FLOOR)
    sigmoid = 1 / (1 + math.exp(-(K2 + K3 * log_alpha)))
    return K1 - K1 * sigmoid + 0.5 * math.log(1 + math.exp(-log_alpha))


def normal(x: float, mean: float, precision: float) -> float:
    return math.sqrt(precision / (2 * math.pi)) * math.exp(-0.5 * precision * (x - mean) ** 2)


def tiny() -> tuple[nn.Module, MixturePrior]:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.4, -0.1]]))
        layer.bias.fill_(0.02)
    network = nn.Sequential(layer)
    to_variational(network, log_sigma2=-3.0)
    prior = MixturePrior(3, weight_std=0.3, zero_proportion=0.6, hyper_shape=5.0, hyper_rate=0.2)
    return network, prior


def both(prior: MixturePrior, tau1: float, tau2: float) -> list[Weighed]:
    return [Weighed(Divergence(), tau1), Weighed(prior, tau2)]


def test_the_loss_is_its_hand_computed_value():
    network, prior = tiny()
    weights = tuple(variational_weights(network))
    parts = regularizer(both(prior, 0.7, 0.3), weights, n_data=40)
    thetas = (0.4, -0.1, 0.02)
    assert parts["divergence"].item() == pytest.approx(
        0.7 / 40 * sum(kl_by_hand(theta, -3.0) for theta in thetas), rel=1e-5
    )

    spacing = 2 * 0.3 / 3
    precision = (0.9 * spacing) ** -2
    density = [
        0.6 * normal(x, 0, precision) + 0.2 * normal(x, -spacing, precision) + 0.2 * normal(x, spacing, precision)
        for x in thetas
    ]
    assert parts["mixture"].item() == pytest.approx(-0.3 / 40 * sum(map(math.log, density)), rel=1e-5)

    gamma = 5 * math.log(0.2) - math.lgamma(5) + 4 * math.log(precision) - 0.2 * precision
    assert parts["hyper-prior"].item() == pytest.approx(-0.3 / 40 * 3 * gamma, rel=1e-5)


def test_a_part_whose_weight_is_zero_is_zero():
    network, prior = tiny()
    weights = tuple(variational_weights(network))
    assert [p.item() for p in regularizer(both(prior, 0.0, 0.0), weights, n_data=9).values()] == [0, 0, 0]
    parts = regularizer(both(prior, 1.0, 0.0), weights, n_data=9)
    assert parts["divergence"] > 0
    assert parts["mixture"] == parts["hyper-prior"] == 0
    assert list(regularizer([Weighed(Divergence(), 1.0)], weights, n_data=9)) == ["divergence"]


def test_gradients_are_finite_differences_in_float64():
    network, prior = tiny()
    weights = tuple(variational_weights(network))
    sum(regularizer(both(prior, 1.0, 0.5), weights, n_data=1).values()).backward()

    def value(theta: list[float], log_sigma2: float) -> float:
        spacing, total = 0.2, 0.0
        precision = (0.9 * spacing) ** -2
        for x in theta:
            modes = (0.6, 0.0), (0.2, -spacing), (0.2, spacing)
            total += kl_by_hand(x, log_sigma2) - 0.5 * math.log(sum(p * normal(x, m, precision) for p, m in modes))
        return total

    thetas, step = [0.4, -0.1, 0.02], 1e-6
    by_theta = [*network[0].weight.grad.flatten().tolist(), network[0].bias.grad.item()]
    for i in range(3):
        up, down = list(thetas), list(thetas)
        up[i] += step
        down[i] -= step
        assert by_theta[i] == pytest.approx((value(up, -3.0) - value(down, -3.0)) / (2 * step), rel=1e-4)
    by_log_sigma2 = network[0].weight_log_sigma2.grad.sum() + network[0].bias_log_sigma2.grad.sum()
    difference = (value(thetas, -3 + step) - value(thetas, -3 - step)) / (2 * step)
    assert by_log_sigma2.item() == pytest.approx(difference, rel=1e-4)


def test_soft_weight_sharing_alone_does_not_see_log_sigma2():
    network, prior = tiny()
    weights = tuple(variational_weights(network))
    values = []
    for level in (-20.0, 5.0):
        with torch.no_grad():
            for weight in weights:
                weight.log_sigma2.fill_(level)
        total = sum(regularizer(both(prior, 0.0, 0.5), weights, n_data=10).values())
        total.backward()
        values.append(total.item())
    assert values[0] == values[1]
    assert all(weight.log_sigma2.grad is None for weight in weights)


def test_float32_under_autocast_whatever_the_weights():
    network = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    to_variational(network)
    weights = tuple(variational_weights(network))
    with torch.autocast("cpu", torch.bfloat16):
        parts = regularizer(both(MixturePrior(17, 0.1), 1.0, 0.02), weights, n_data=100)
        total = sum(parts.values())
    assert all(part.dtype == torch.float32 for part in (*parts.values(), total))
    total.backward()
    assert network[0].weight.grad.dtype == torch.bfloat16
    assert all(torch.isfinite(parameter.grad).all() for parameter in network.parameters())


def test_both_ways_to_the_divergence_agree():
    """The compiled one of the CPU and the tensor operations of a GPU."""
    theta, log_sigma2 = torch.randn(3, 500) * 0.1, torch.empty(3, 500).uniform_(-14, 2)
    theta[0, :5] = 0
    network = nn.Linear(500, 3, bias=False)
    to_variational(network)
    network.weight.data, network.weight_log_sigma2.data = theta, log_sigma2
    value = kl_sum(tuple(variational_weights(network)), 0.25)
    (2 * value).backward()
    expected, (by_theta, by_log_sigma2) = _slopes([theta.flatten()], [log_sigma2.flatten()], 0.5)
    assert value.item() == pytest.approx(0.5 * expected.item(), rel=1e-5)
    torch.testing.assert_close(network.weight.grad.flatten(), by_theta, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(network.weight_log_sigma2.grad.flatten(), by_log_sigma2, rtol=1e-4, atol=1e-6)


def test_backward_twice_adds_up_and_transposed_weights_are_read_in_order():
    network = nn.Linear(5, 3, bias=False)
    to_variational(network)
    network.weight.data = torch.randn(5, 3).t()  # not contiguous
    network.weight_log_sigma2.data = torch.randn(3, 5)
    value = kl_sum(tuple(variational_weights(network)))
    flat = [[parameter.detach().flatten()] for parameter in (network.weight, network.weight_log_sigma2)]
    expected, (by_theta, _) = _slopes(*flat, 1.0)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for _ in range(3):
        value.backward(retain_graph=True)
    torch.testing.assert_close(network.weight.grad.flatten(), 3 * by_theta, rtol=1e-4, atol=1e-6)


def test_several_tensors_are_told_apart():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2))
    to_variational(network, log_sigma2=-6.0)
    weights = tuple(variational_weights(network))
    kl_sum(weights).backward()
    together = [(w.theta.grad.clone(), w.log_sigma2.grad.clone()) for w in weights]
    network.zero_grad()
    for weight, (by_theta, by_log_sigma2) in zip(weights, together, strict=True):
        kl_sum([weight]).backward()
        assert torch.equal(weight.theta.grad, by_theta)
        assert torch.equal(weight.log_sigma2.grad, by_log_sigma2)
    flat = [[tensor.detach().flatten() for tensor in kind] for kind in zip(*(w[1:3] for w in weights), strict=True)]
    for ours, theirs in zip(
        [g for pair in zip(*together, strict=True) for g in pair], _slopes(*flat, 1.0)[1], strict=True
    ):
        torch.testing.assert_close(ours.flatten(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trained_precisions", [True, False])
def test_gradients_added_at_once_are_autograd_s(trained_precisions):
    torch.manual_seed(0)
    weights = [
        VariationalWeight(name, nn.Parameter(torch.randn(shape) * 0.1), nn.Parameter(torch.randn(shape) - 5))
        for name, shape in (("a", (40, 30)), ("b", (30,)))
    ]
    prior = MixturePrior(5, 0.1)
    prior.log_precisions.requires_grad_(trained_precisions)
    parameters = [*(w.theta for w in weights), *(w.log_sigma2 for w in weights), *prior.parameters()]
    terms = both(prior, 0.5, 0.1)
    penalty = regularizer(terms, weights, n_data=100)
    sum(penalty.values()).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    added = add_gradients(terms, weights, n_data=100)
    assert added == {name: part.detach() for name, part in penalty.items()}
    assert (added["hyper-prior"] != 0) == trained_precisions
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, torch.ones_like(parameter) + (0 if gradient is None else gradient))
