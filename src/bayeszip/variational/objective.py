"""The loss in its named parts, and the one place that divides by N.

    loss = E_q[−log p(y|x,w)] + (1/N) · { τ₁ Σᵢ KL(θᵢ, σᵢ²) − τ₂ [ Σᵢ log GM_ψ(θᵢ) + Σ_k log Gamma(λ_k | a, b) ] }

The objective of app. A per example, to be minimized; the sign of log GM is corrected (eq. 2 is printed with +, see
docs/notation.md). The first term is the mean over a minibatch of what the training loop computes; N is the number of
training examples.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeszip.variational.distributions import THETA2_FLOOR, kl_log_uniform, kl_log_uniform_slope, log_alpha
from bayeszip.variational.kernels import kl_with_slopes
from bayeszip.variational.layers import VariationalWeight
from bayeszip.variational.mixture import MixturePrior, scaled

__all__ = ["Regularizer", "kl_sum", "regularizer"]


class Regularizer(NamedTuple):
    """The parts that don't depend on data, in nats per training example, weighted and divided by N; float32."""

    kl: Tensor
    mixture: Tensor
    hyper_prior: Tensor

    @property
    def total(self) -> Tensor:
        return self.kl + self.mixture + self.hyper_prior


def regularizer(
    weights: Sequence[VariationalWeight], prior: MixturePrior | None, *, tau1: float, tau2: float, n_data: int
) -> Regularizer:
    """(1/N) { τ₁ KL − τ₂ [ log GM + log Gamma ] } in its parts; a part whose τ is 0 is not evaluated.

    Args:
        weights: the Gaussian weights, each once.
        prior: the mixture over their means; None where τ₂ is 0.
        tau1, tau2: τ₁ and τ₂.
        n_data: N.
    """
    zero = weights[0].theta.new_zeros((), dtype=torch.float32)
    kl = mixture = hyper_prior = zero
    with torch.autocast(zero.device.type, enabled=False):
        if tau1:
            kl = kl_sum(weights, tau1 / n_data)
        if tau2 and prior is not None:
            mixture = prior.log_prob(*(weight.theta for weight in weights), scale=-tau2 / n_data)
            hyper_prior = prior.log_hyper_prior() * (-tau2 / n_data)
    return Regularizer(kl, mixture, hyper_prior)


def kl_sum(weights: Sequence[VariationalWeight], scale: float = 1.0) -> Tensor:
    """`scale` × Σᵢ KL(N(θᵢ, σᵢ²) ‖ 1/|w|) over all weights, a float32 scalar with gradients in θ and log σ²."""
    total: Tensor = _KLSum.apply(scale, *(w.theta for w in weights), *(w.log_sigma2 for w in weights))
    return total


class _KLSum(torch.autograd.Function):
    """Value and closed-form gradients in one pass, which backward only scales."""

    @staticmethod
    def forward(ctx: Any, scale: float, *tensors: Tensor) -> Tensor:
        count = len(tensors) // 2
        slopes = _slopes_on_cpu if tensors[0].device.type == "cpu" else _slopes
        value: float | Tensor = 0.0
        gradients = list(tensors)
        for i, (theta, log_sigma2) in enumerate(zip(tensors[:count], tensors[count:], strict=True)):
            part, by_theta, by_log_sigma2 = slopes(theta.detach().float(), log_sigma2.detach().float(), scale)
            value = value + part
            gradients[i], gradients[count + i] = by_theta.to(theta.dtype), by_log_sigma2.to(log_sigma2.dtype)
        # Held as they are, not by `save_for_backward`: autograd then copies what it is handed, never adds to it.
        ctx.gradients = gradients
        return torch.as_tensor(value * scale, dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *scaled(ctx.gradients, outputs[0]))


def _slopes(theta: Tensor, log_sigma2: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Σ KL and, times `scale`, its gradients in θ and log σ²."""
    a = log_alpha(theta, log_sigma2)
    slope = kl_log_uniform_slope(a) * scale
    # d log α / dθ = −2θ/θ², with the floor that log α has.
    return kl_log_uniform(a).sum(), slope * theta * -2 / (theta.square() + THETA2_FLOOR), slope


def _slopes_on_cpu(theta: Tensor, log_sigma2: Tensor, scale: float) -> tuple[float, Tensor, Tensor]:
    """The same in one pass."""
    theta, log_sigma2 = theta.contiguous(), log_sigma2.contiguous()
    by_theta, by_log_sigma2 = torch.empty_like(theta), torch.empty_like(theta)
    arrays = [tensor.view(-1).numpy() for tensor in (theta, log_sigma2, by_theta, by_log_sigma2)]
    value = kl_with_slopes(arrays[0], arrays[1], np.float32(scale), arrays[2], arrays[3])
    return value, by_theta, by_log_sigma2
