"""Log-densities and divergences as pure functions, each beside its formula and its equation in the paper.

Symbols are those of docs/notation.md, which also lists the paper's misprints; where a formula below differs from
print, it says so.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "HALF_LOG_2PI",
    "PRUNING_LOG_ALPHA",
    "THETA2_FLOOR",
    "kl_log_uniform",
    "kl_log_uniform_slope",
    "log_alpha",
    "log_gamma_density",
    "log_joint",
    "log_mixture",
]

#: Constants of the approximation of Molchanov et al. (2017), eq. 14; quoted by the paper below its eq. 4.
K1, K2, K3 = 0.63576, 1.87320, 1.48695

#: Added to θ² inside the logarithm: without it the gradient at θ = 0 is 0·∞.
THETA2_FLOOR = 1e-20

#: log α is held within ±this, so that α and α^k₃ stay finite in float32; the divergence is flat or linear out there.
LOG_ALPHA_BOUND = 50.0
#: log σ² is held within ± this where 1/σ² is wanted, so that the product of two such is finite in float32.
LOG_SIGNAL_BOUND = 40.0

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

#: log 19: the log α at which the dropout rate σ²/(θ²+σ²) is 0.95, the paper's threshold (app. B).
PRUNING_LOG_ALPHA = math.log(19)


def log_alpha(theta: Tensor, log_sigma2: Tensor) -> Tensor:
    """log α = log σ² − log θ², the log of the noise-to-signal ratio of a weight, clipped to ±`LOG_ALPHA_BOUND`.

    Args:
        theta: θ, the posterior means.
        log_sigma2: log σ², the log of the posterior variances.
    """
    if theta.dtype.itemsize == 2:
        theta = theta.float()  # else the squares of small weights are 0, and these are noise whatever σ² is
    return (log_sigma2 - torch.log(theta.square() + THETA2_FLOOR)).clamp(-LOG_ALPHA_BOUND, LOG_ALPHA_BOUND)


def kl_log_uniform(log_alpha: Tensor) -> Tensor:
    """KL(N(θ, σ²) ‖ 1/|w|) for each weight, up to the constant that makes it vanish as α → ∞.

    KL ≈ k₁ − k₁ sigmoid(k₂ + k₃ log α) + ½ log(1 + α⁻¹)

    Eq. 4, sign corrected: what is printed there is −KL. The constant C = k₁ is chosen so that KL → 0 as α → ∞.

    >>> [round(kl, 3) for kl in kl_log_uniform(torch.tensor([-10.0, 0.0, 10.0])).tolist()]
    [5.636, 0.431, 0.0]
    """
    return K1 * torch.sigmoid(-(K2 + K3 * log_alpha)) + 0.5 * F.softplus(-log_alpha)


def kl_log_uniform_slope(log_alpha: Tensor) -> Tensor:
    """d KL / d log α of `kl_log_uniform`: −k₁k₃ s(1−s) − ½ sigmoid(−log α), with s = sigmoid(k₂ + k₃ log α)."""
    logit = K2 + K3 * log_alpha
    return -K1 * K3 * torch.sigmoid(logit) * torch.sigmoid(-logit) - 0.5 * torch.sigmoid(-log_alpha)


def log_joint(theta: Tensor, means: Tensor, log_precisions: Tensor, log_proportions: Tensor) -> Tensor:
    """log π_k + log N(θ_i | μ_k, λ_k⁻¹) for weights i (rows) and components k (columns): the terms of eq. 5's sum."""
    deviation2 = (theta.unsqueeze(-1) - means).square()
    return (log_proportions + 0.5 * log_precisions - HALF_LOG_2PI) - 0.5 * log_precisions.exp() * deviation2


def log_mixture(theta: Tensor, means: Tensor, log_precisions: Tensor, log_proportions: Tensor) -> Tensor:
    """log GM_ψ(θ_i) = log Σ_k π_k N(θ_i | μ_k, λ_k⁻¹), eq. 5's density, for each weight.

    The straightforward way, D × K in memory; `mixture.MixturePrior` evaluates its sum over all weights in O(D).
    """
    return torch.logsumexp(log_joint(theta, means, log_precisions, log_proportions), dim=-1)


def log_gamma_density(log_precision: Tensor, shape: float, rate: float | Tensor) -> Tensor:
    """log Gamma(λ | a, b) = a log b − log Γ(a) + (a−1) log λ − bλ: the hyper-prior of app. A on a precision λ.

    Args:
        log_precision: log λ.
        shape: a, the paper's α (10⁵).
        rate: b, the paper's β (10).
    """
    # In float64: at a = 10⁵ the terms are near 10⁶ and cancel to a few units.
    log_precision64 = log_precision.double()
    log_rate = rate.double().log() if isinstance(rate, Tensor) else math.log(rate)
    constant = shape * log_rate - math.lgamma(shape)
    density = constant + (shape - 1) * log_precision64 - rate * log_precision64.exp()
    return density.to(log_precision.dtype)
