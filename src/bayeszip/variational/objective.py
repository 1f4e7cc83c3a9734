"""The loss in its named parts, and the one place that divides by N.

    loss = E_q[−log p(y|x,w)] + (1/N) · { τ₁ Σᵢ KL(θᵢ, σᵢ²) − τ₂ [ Σᵢ log GM_ψ(θᵢ) + Σ_k log Gamma(λ_k | a, b) ] }

The objective of app. A per example, to be minimized; the sign of log GM is corrected (eq. 2 is printed with +, see
docs/notation.md). The first term is the mean over a minibatch of what the training loop computes; N is the number of
training examples.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeszip.variational.distributions import THETA2_FLOOR, kl_log_uniform, kl_log_uniform_slope, log_alpha
from bayeszip.variational.kernels import kl_with_slopes
from bayeszip.variational.layers import VariationalWeight
from bayeszip.variational.mixture import MixturePrior

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
            kl = kl_sum(weights) * (tau1 / n_data)
        if tau2 and prior is not None:
            theta = torch.cat([weight.theta.flatten().float() for weight in weights])
            mixture = prior.log_prob(theta) * (-tau2 / n_data)
            hyper_prior = prior.log_hyper_prior() * (-tau2 / n_data)
    return Regularizer(kl, mixture, hyper_prior)


def kl_sum(weights: Sequence[VariationalWeight]) -> Tensor:
    """Σᵢ KL(N(θᵢ, σᵢ²) ‖ 1/|w|) over all weights, a float32 scalar with gradients in θ and log σ²."""
    total: Tensor = _KLSum.apply(*(w.theta for w in weights), *(w.log_sigma2 for w in weights))
    return total


class _KLSum(torch.autograd.Function):
    """All tensors as one vector; value and closed-form gradients in one pass, which backward only scales."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        count = len(tensors) // 2
        theta = torch.cat([tensor.flatten().float() for tensor in tensors[:count]])
        log_sigma2 = torch.cat([tensor.flatten() for tensor in tensors[count:]])
        ctx.shapes = [tensor.shape for tensor in tensors[:count]]
        ctx.dtypes = [tensor.dtype for tensor in tensors[:count]]
        if theta.device.type == "cpu":
            by_theta, by_log_sigma2 = torch.empty_like(theta), torch.empty_like(theta)
            value = kl_with_slopes(theta.numpy(), log_sigma2.numpy(), by_theta.numpy(), by_log_sigma2.numpy())
            ctx.save_for_backward(by_theta, by_log_sigma2)
            return theta.new_tensor(value)
        a = log_alpha(theta, log_sigma2)
        slope = kl_log_uniform_slope(a)
        # d log α / dθ = −2θ/θ², with the floor that log α has.
        ctx.save_for_backward(slope * theta * -2 / (theta.square() + THETA2_FLOOR), slope)
        return kl_log_uniform(a).sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        sizes = [shape.numel() for shape in ctx.shapes]
        by_theta, by_log_sigma2 = (
            [part.view(shape) for part, shape in zip((outputs[0] * flat).split(sizes), ctx.shapes, strict=True)]
            for flat in ctx.saved_tensors
        )
        by_theta = [part.to(dtype) for part, dtype in zip(by_theta, ctx.dtypes, strict=True)]
        return (*by_theta, *by_log_sigma2)
