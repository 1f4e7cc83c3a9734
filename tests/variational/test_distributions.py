"""Densities and divergences against integrals, torch.distributions and finite differences."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate

from bayeszip.variational.distributions import (
    K1,
    K2,
    K3,
    PRUNING_LOG_ALPHA,
    kl_log_uniform,
    kl_log_uniform_slope,
    log_alpha,
    log_gamma_density,
    log_joint,
    log_mixture,
)


def true_kl(alpha: float) -> float:
    """KL(N(θ, σ²) ‖ 1/|w|) = E[log|ε|] − ½ log α + C with ε ~ N(1, α), by quadrature.

    As α → ∞, E[log|ε|] → ½ log α + E[log|z|] with E[log|z|] = −½(γ + log 2): that fixes C.
    """
    root = math.sqrt(alpha)
    kink = -1 / root

    def integrand(z: float) -> float:
        return math.log(abs(1 + root * z) + 1e-300) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

    points = [-12.0, *([kink] if -12 < kink < 12 else []), 12.0]
    expectation = sum(integrate.quad(integrand, a, b, limit=400)[0] for a, b in pairwise(points))
    return expectation - 0.5 * math.log(alpha) + 0.5 * (np.euler_gamma + math.log(2))


@pytest.mark.parametrize("log_alpha", [-14.0, -9.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 14.0])
def test_kl_is_the_integral_it_approximates(log_alpha):
    approximate = kl_log_uniform(torch.tensor(log_alpha, dtype=torch.float64)).item()
    assert approximate == pytest.approx(true_kl(math.exp(log_alpha)), abs=0.012)


def test_the_constants_are_those_that_were_published():
    # Molchanov et al. (2017), below eq. 14; a tenth of a percent would hide in the approximation's own error.
    assert (K1, K2, K3) == (0.63576, 1.87320, 1.48695)


def test_kl_vanishes_for_pure_noise_and_falls_with_noise():
    values = kl_log_uniform(torch.linspace(-50, 50, 2001, dtype=torch.float64))
    assert values[-1] == pytest.approx(0, abs=1e-12)
    assert (values.diff() < 0).all()


def test_kl_slope_is_its_derivative():
    points = torch.linspace(-19.9, 19.9, 399, dtype=torch.float64)
    step = 1e-5
    difference = (kl_log_uniform(points + step) - kl_log_uniform(points - step)) / (2 * step)
    torch.testing.assert_close(kl_log_uniform_slope(points), difference, atol=1e-8, rtol=1e-6)


def test_log_alpha_is_the_log_ratio_within_its_bound():
    theta = torch.tensor([0.5, -0.5, 0.0, 1e10], dtype=torch.float64)
    log_sigma2 = torch.tensor([-2.0, -2.0, -10.0, -40.0], dtype=torch.float64)
    expected = [-2 - 2 * math.log(0.5), -2 - 2 * math.log(0.5), -10 + 20 * math.log(10), -50]
    torch.testing.assert_close(log_alpha(theta, log_sigma2), torch.tensor(expected, dtype=torch.float64))


def test_the_papers_threshold_is_log_19():
    theta, log_sigma2 = torch.tensor([0.3, -0.7]).double(), torch.tensor([-1.0, -3.0]).double()
    sigma2 = log_sigma2.exp()
    torch.testing.assert_close(torch.sigmoid(log_alpha(theta, log_sigma2)), sigma2 / (theta**2 + sigma2))
    assert math.exp(PRUNING_LOG_ALPHA) / (1 + math.exp(PRUNING_LOG_ALPHA)) == pytest.approx(0.95)


def random_mixture(components: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    means, log_precisions, logits = torch.randn(3, components, dtype=torch.float64, generator=generator)
    return means, 4 + 2 * log_precisions, torch.log_softmax(logits, 0)


@pytest.mark.parametrize("components", [1, 2, 17])
def test_mixture_is_torchs(components):
    means, log_precisions, log_proportions = random_mixture(components, seed=components)
    reference = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=log_proportions),
        torch.distributions.Normal(means, (-0.5 * log_precisions).exp()),
    )
    theta = torch.linspace(-3, 3, 101, dtype=torch.float64)
    torch.testing.assert_close(log_mixture(theta, means, log_precisions, log_proportions), reference.log_prob(theta))
    joint = log_joint(theta, means, log_precisions, log_proportions)
    assert joint.shape == (101, components)


def test_mixture_integrates_to_one():
    means, log_precisions, log_proportions = random_mixture(5, seed=3)
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    density = log_mixture(x, means, log_precisions, log_proportions).exp()
    assert torch.trapezoid(density, x).item() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("shape", "rate"), [(1e5, 10.0), (2.5, 0.3)])
def test_gamma_density_is_torchs(shape, rate):
    log_precision = torch.linspace(-1, 12, 50, dtype=torch.float64)
    reference = torch.distributions.Gamma(torch.tensor(shape).double(), torch.tensor(rate).double())
    torch.testing.assert_close(log_gamma_density(log_precision, shape, rate), reference.log_prob(log_precision.exp()))


def test_gamma_density_survives_float32_and_peaks_at_the_papers_mode():
    mode = math.log((1e5 - 1) / 10)
    values = log_gamma_density(torch.tensor([mode - 0.01, mode, mode + 0.01]), 1e5, 10.0)
    exact = log_gamma_density(torch.tensor([mode - 0.01, mode, mode + 0.01]).double(), 1e5, 10.0)
    torch.testing.assert_close(values.double(), exact, atol=1e-2, rtol=0)
    assert values.argmax() == 1
    assert math.exp(-0.5 * mode) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_weights_of_16_bits_have_the_signal_they_have(dtype):
    theta = torch.tensor([1e-4, 2e-4, 1e-2], dtype=dtype)
    found = log_alpha(theta, torch.full((3,), -25.0))
    torch.testing.assert_close(found, log_alpha(theta.float(), torch.full((3,), -25.0)))
    assert (found < PRUNING_LOG_ALPHA).all()
