"""Sparse variational dropout: the posterior's divergence from the log-uniform prior, which prunes what is noise.

cost = Σᵢ KL(N(θᵢ, σᵢ²) ‖ 1/|w|)        eq. 4, sign corrected
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeszip.schedules import ramp
from bayeszip.settings import at_least, between, setting
from bayeszip.variational.distributions import (
    THETA2_FLOOR,
    kl_log_uniform,
    kl_log_uniform_slope,
    log_alpha,
)
from bayeszip.variational.kernels import kl_with_slopes
from bayeszip.variational.layers import VariationalWeight, is_kept
from bayeszip.variational.passes import add_to_gradients, scaled
from bayeszip.variational.sampling import on_triton
from bayeszip.variational.terms import Term

__all__ = ["Divergence", "DivergenceSettings", "kl_sum", "survivors"]


@dataclass(frozen=True)
class DivergenceSettings:
    """What a phase says of the divergence."""

    tau1: float = setting(0.0, "τ₁, weight of the divergence from the log-uniform prior", at_least(0))
    tau1_ramp: float = setting(0.0, "share of the phase over which τ₁ rises linearly from 0", between(0, 1))


class Divergence(Term):
    """τ₁ Σ KL: the term of sparse variational dropout."""

    name = "divergence"
    Settings = DivergenceSettings
    steered = True

    @classmethod
    def counts(cls, settings: DivergenceSettings) -> bool:
        return settings.tau1 > 0

    def dials(self, settings: DivergenceSettings, done: float) -> tuple[float, ...]:
        return (settings.tau1 * ramp(done, settings.tau1_ramp),)

    def cost(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        return (_added([kl_sum(alike, scale) for scale, alike in _by_strength(weights, tau)]),)

    def add_gradients(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        values = []
        for scale, alike in _by_strength(weights, tau):
            parameters = [*(weight.theta for weight in alike), *(weight.log_sigma2 for weight in alike)]
            value, gradients = _with_gradients(parameters, scale)
            add_to_gradients(parameters, gradients)
            values.append(value)
        return (_added(values),)

    def keeps(self, weight: VariationalWeight) -> Tensor:
        return is_kept(weight)


def _by_strength(
    weights: Sequence[VariationalWeight], tau: float | Tensor
) -> Iterator[tuple[float | Tensor, list[VariationalWeight]]]:
    """The weights that have a strength in common, with τ₁ times that."""
    for strength in dict.fromkeys(weight.strength for weight in weights):
        scale = tau if strength == 1 else tau * strength
        yield scale, [weight for weight in weights if weight.strength == strength]


def _added(values: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, values)


@torch.no_grad()
def survivors(weights: Sequence[VariationalWeight]) -> Tensor:
    """The means that pruning would keep."""
    return torch.cat([weight.theta[is_kept(weight)].flatten().float() for weight in weights])


def kl_sum(weights: Sequence[VariationalWeight], scale: float | Tensor = 1.0) -> Tensor:
    """`scale` × Σᵢ KL(N(θᵢ, σᵢ²) ‖ 1/|w|) over all weights, a float32 scalar with gradients in θ and log σ²."""
    total: Tensor = _KLSum.apply(scale, *(w.theta for w in weights), *(w.log_sigma2 for w in weights))
    return total


class _KLSum(torch.autograd.Function):
    """Value and closed-form gradients in one pass, which backward only scales."""

    @staticmethod
    def forward(ctx: Any, scale: float | Tensor, *tensors: Tensor) -> Tensor:
        # Held as they are, not by `save_for_backward`: autograd then copies what it is handed, never adds to it.
        value, ctx.gradients = _with_gradients(tensors, scale)
        return value

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *scaled(ctx.gradients, outputs[0]))


def _with_gradients(tensors: Sequence[Tensor], scale: float | Tensor) -> tuple[Tensor, list[Tensor]]:
    """`scale` × Σ KL of the θ's, then the log σ²'s, in `tensors`, and its gradient in each."""
    count = len(tensors) // 2
    flat = [tensor.detach().flatten().float() for tensor in tensors]
    slopes = _slopes_on_cpu if tensors[0].device.type == "cpu" else _slopes
    value, gradients = slopes(flat[:count], flat[count:], scale)
    return value, [slope.view(tensor.shape).to(tensor.dtype) for slope, tensor in zip(gradients, tensors, strict=True)]


def _slopes(thetas: list[Tensor], log_sigma2s: list[Tensor], scale: float | Tensor) -> tuple[Tensor, list[Tensor]]:
    """`scale` × Σ KL, and its gradients in each θ and then each log σ².

    As one vector: many small tensors would keep a GPU waiting for its next order.
    """
    sizes = [theta.numel() for theta in thetas]
    theta, log_sigma2 = torch.cat(thetas), torch.cat(log_sigma2s)
    factor = torch.as_tensor(scale, dtype=theta.dtype, device=theta.device)
    if on_triton(theta):
        from bayeszip.variational import gpu_kernels

        value, by_theta, slope = gpu_kernels.kl_with_slopes(theta, log_sigma2, factor)
    else:
        a = log_alpha(theta, log_sigma2)
        slope = kl_log_uniform_slope(a) * factor
        # d log α / dθ = −2θ/θ², with the floor that log α has.
        by_theta = slope * theta * -2 / (theta.square() + THETA2_FLOOR)
        value = kl_log_uniform(a).sum() * factor
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
