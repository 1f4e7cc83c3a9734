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
from bayeszip.variational.layers import VariationalWeight, on_triton
from bayeszip.variational.mixture import MixturePrior, add_to_gradients, scaled

__all__ = ["Regularizer", "add_gradients", "kl_rows_with_slopes", "kl_sum", "regularizer"]


class Regularizer(NamedTuple):
    """The parts that don't depend on data, in nats per training example, weighted and divided by N; float32."""

    kl: Tensor
    mixture: Tensor
    hyper_prior: Tensor

    @property
    def total(self) -> Tensor:
        return self.kl + self.mixture + self.hyper_prior


def regularizer(
    weights: Sequence[VariationalWeight],
    prior: MixturePrior | None,
    *,
    tau1: float | Tensor,
    tau2: float | Tensor,
    n_data: int,
) -> Regularizer:
    """(1/N) { τ₁ KL − τ₂ [ log GM + log Gamma ] } in its parts; a part whose τ is the number 0 is not evaluated.

    Args:
        weights: the Gaussian weights, each once.
        prior: the mixture over their means; None where τ₂ is 0.
        tau1, tau2: τ₁ and τ₂.
        n_data: N.
    """
    zero = weights[0].theta.new_zeros((), dtype=torch.float32)
    kl = mixture = hyper_prior = zero
    with torch.autocast(zero.device.type, enabled=False):
        if _counts(tau1):
            kl = kl_sum(weights, tau1 / n_data)
        if _counts(tau2) and prior is not None:
            mixture = prior.log_prob(*(weight.theta for weight in weights), scale=-tau2 / n_data)
            hyper_prior = prior.log_hyper_prior() * (-tau2 / n_data)
    return Regularizer(kl, mixture, hyper_prior)


def add_gradients(
    weights: Sequence[VariationalWeight],
    prior: MixturePrior | None,
    *,
    tau1: float | Tensor,
    tau2: float | Tensor,
    n_data: int,
) -> Regularizer:
    """The parts of `regularizer`, their gradients added to those of the parameters in fewer passes than autograd takes.

    Where log λ is not trained, its hyper-prior has no part in it.
    """
    zero = torch.zeros((), device=weights[0].theta.device)
    kl = mixture = hyper_prior = zero
    if _counts(tau1):
        parameters = [*(weight.theta for weight in weights), *(weight.log_sigma2 for weight in weights)]
        kl, gradients = _kl_with_gradients(parameters, tau1 / n_data)
        add_to_gradients(parameters, gradients)
    if _counts(tau2) and prior is not None:
        mixture = prior.add_gradients([weight.theta for weight in weights], -tau2 / n_data)
        if prior.log_precisions.requires_grad:
            hyper_prior = prior.log_hyper_prior() * (-tau2 / n_data)
            hyper_prior.backward()
    return Regularizer(kl, mixture, hyper_prior.detach())


def _counts(tau: float | Tensor) -> bool:
    """A tensor always does: asking a GPU for its value would make it wait."""
    return isinstance(tau, Tensor) or tau != 0


def kl_sum(weights: Sequence[VariationalWeight], scale: float | Tensor = 1.0) -> Tensor:
    """`scale` × Σᵢ KL(N(θᵢ, σᵢ²) ‖ 1/|w|) over all weights, a float32 scalar with gradients in θ and log σ²."""
    total: Tensor = _KLSum.apply(scale, *(w.theta for w in weights), *(w.log_sigma2 for w in weights))
    return total


class _KLSum(torch.autograd.Function):
    """Value and closed-form gradients in one pass, which backward only scales."""

    @staticmethod
    def forward(ctx: Any, scale: float | Tensor, *tensors: Tensor) -> Tensor:
        # Held as they are, not by `save_for_backward`: autograd then copies what it is handed, never adds to it.
        value, ctx.gradients = _kl_with_gradients(tensors, scale)
        return value

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *scaled(ctx.gradients, outputs[0]))


def _kl_with_gradients(tensors: Sequence[Tensor], scale: float | Tensor) -> tuple[Tensor, list[Tensor]]:
    """`scale` × Σ KL of the θ's, then the log σ²'s, in `tensors`, and its gradient in each."""
    count = len(tensors) // 2
    flat = [tensor.detach().flatten().float() for tensor in tensors]
    slopes = _slopes_on_cpu if tensors[0].device.type == "cpu" else _slopes
    value, gradients = slopes(flat[:count], flat[count:], scale)
    return value, [slope.view(tensor.shape).to(tensor.dtype) for slope, tensor in zip(gradients, tensors, strict=True)]


def kl_rows_with_slopes(theta: Tensor, log_sigma2: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row, with a scale of its own: `scale` × Σ KL, and its gradients in θ and log σ²."""
    if on_triton(theta):
        from bayeszip.variational import gpu_kernels

        return gpu_kernels.kl_with_slopes(theta, log_sigma2, scale)
    a = log_alpha(theta, log_sigma2)
    slope = kl_log_uniform_slope(a) * scale.unsqueeze(-1)
    # d log α / dθ = −2θ/θ², with the floor that log α has.
    by_theta = slope * theta * -2 / (theta.square() + THETA2_FLOOR)
    return kl_log_uniform(a).sum(dim=-1) * scale, by_theta, slope


def _slopes(thetas: list[Tensor], log_sigma2s: list[Tensor], scale: float | Tensor) -> tuple[Tensor, list[Tensor]]:
    """`scale` × Σ KL, and its gradients in each θ and then each log σ².

    As one vector: many small tensors would keep a GPU waiting for its next order.
    """
    sizes = [theta.numel() for theta in thetas]
    theta, log_sigma2 = torch.cat(thetas), torch.cat(log_sigma2s)
    factor = torch.as_tensor(scale, dtype=theta.dtype, device=theta.device)
    value, by_theta, slope = kl_rows_with_slopes(theta, log_sigma2, factor)
    return value, [*by_theta.split(sizes), *slope.split(sizes)]


def _slopes_on_cpu(
    thetas: list[Tensor], log_sigma2s: list[Tensor], scale: float | Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The same in one pass over each tensor."""
    scale, value = float(scale), 0.0
    gradients = [torch.empty_like(theta) for theta in (*thetas, *log_sigma2s)]
    for i, (theta, log_sigma2) in enumerate(zip(thetas, log_sigma2s, strict=True)):
        by_theta, by_log_sigma2 = gradients[i].numpy(), gradients[len(thetas) + i].numpy()
        value += kl_with_slopes(theta.numpy(), log_sigma2.numpy(), np.float32(scale), by_theta, by_log_sigma2)
    return torch.tensor(value * scale, dtype=torch.float32), gradients
