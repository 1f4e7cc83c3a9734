"""A rate: the bits that the weights are expected to take in a file, at the coder's own prices, each where it stands.

    cost = ln 2 · Σᵢ [ b⁰ᵢ + pᵢ (b¹ᵢ + v − b⁰ᵢ) ],    pᵢ = 1/(1 + αᵢ)

b⁰ and b¹ are what the coder asks for a weight to be zero, and not to be, amid its neighbors (row, column, kernel): a
zero is cheap among zeros, and a lone weight dear. v is what the value of one costs. p is the probability with which
binary dropout keeps a weight if it is as noisy as this one: noise of relative variance α is dropout at the rate
α/(1+α) (Kingma et al. 2015, sec. 3). With τ = 1 the objective is a length in nats: of the labels, and of the file.
A zero is never taken to be dearer than a weight: where few are zero yet a coder would ask more for it, and a network
that is dense would be held there.

Prices are told each few epochs, by a function that is handed in at the start: training never sees bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.errors import RecipeError
from bayeszip.schedules import ramp
from bayeszip.settings import at_least, between, check, setting
from bayeszip.variational.distributions import THETA2_FLOOR, log_alpha
from bayeszip.variational.kernels import rate_with_slopes
from bayeszip.variational.layers import VariationalWeight, is_kept, variational_weights
from bayeszip.variational.passes import add_to_gradients
from bayeszip.variational.sampling import on_triton
from bayeszip.variational.terms import Term

__all__ = ["Pricing", "Rate", "RateSettings"]

#: From which weights of each tensor are not zero, what the coder asks for each to be zero, and not to be, in bits.
Pricing = Callable[[Mapping[str, np.ndarray]], Mapping[str, tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class RateSettings:
    """What a phase says of the rate."""

    tau: float = setting(0.0, "weight of the expected bits, in nats", at_least(0))
    ramp: float = setting(0.0, "share of the phase over which it rises linearly from 0", between(0, 1))
    refresh_every: int = setting(5, "each so many epochs the coder is asked for its prices", at_least(1))
    value_bits: float = setting(3.5, "what the value of a weight that is not zero is taken to cost", at_least(0))

    def __post_init__(self) -> None:
        check(self, "rate")


class Rate(Term):
    """τ ln 2 × the expected bits.

    Args:
        weights: the Gaussian weights.
        pricing: asks the coder.
    """

    name = "rate"
    Settings = RateSettings
    steered = True

    def __init__(self, weights: Sequence[VariationalWeight], pricing: Pricing) -> None:
        super().__init__()
        self._pricing = pricing
        size, device = sum(weight.theta.numel() for weight in weights), weights[0].theta.device
        #: b¹ + v − b⁰ of all weights, in their order; part of the state, as prices stay for some epochs.
        self.extra: Tensor
        self.register_buffer("extra", torch.zeros(size, device=device))
        #: Σ b⁰.
        self.least: Tensor
        self.register_buffer("least", torch.zeros((), device=device))

    @classmethod
    def start(cls, network: nn.Module, start: Pricing | None) -> "Rate":
        if start is None:
            raise RecipeError("the rate needs prices; only compress() and Compressor ask the coder for them")
        return cls(tuple(variational_weights(network)), start)

    @classmethod
    def counts(cls, settings: RateSettings) -> bool:
        return settings.tau > 0

    def dials(self, settings: RateSettings, done: float) -> tuple[float, ...]:
        return (settings.tau * ramp(done, settings.ramp),)

    @torch.no_grad()
    def renew(
        self,
        settings: RateSettings,
        epoch: int,
        weights: Sequence[VariationalWeight],
        keeps: Callable[[VariationalWeight], Tensor],
    ) -> None:
        """Ask for prices, if it is time, or if compaction has taken weights."""
        size = sum(weight.theta.numel() for weight in weights)
        if epoch % settings.refresh_every and size == self.extra.numel():
            return
        told = self._pricing({weight.name: keeps(weight).cpu().numpy() for weight in weights})
        # A layer that is to be pruned less, or more, finds its bits cheaper, or dearer.
        factors = np.concatenate([np.full(weight.theta.numel(), weight.strength) for weight in weights])
        zero, nonzero = (np.concatenate([told[weight.name][i].ravel() for weight in weights]) for i in (0, 1))
        zero = np.minimum(zero, nonzero)
        extra = torch.from_numpy(factors * (nonzero + settings.value_bits - zero)).to(self.extra)
        if size == self.extra.numel():
            # Where it lies: recorded steps read it there.
            self.extra.copy_(extra)
        else:
            self.extra = extra
        self.least.fill_(float(factors @ zero))

    def keeps(self, weight: VariationalWeight) -> Tensor:
        """It prunes by the dropout rate too, with a divergence beside it or without."""
        return is_kept(weight)

    def cost(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        return (tau * math.log(2) * self.expected_bits(weights).float(),)

    def expected_bits(self, weights: Sequence[VariationalWeight]) -> Tensor:
        """Σ b⁰ + p (b¹ + v − b⁰), in float64 where the weights are, with gradients by autograd."""
        theta = torch.cat([weight.theta.flatten() for weight in weights])
        log_sigma2 = torch.cat([weight.log_sigma2.flatten() for weight in weights])
        kept = torch.sigmoid(-log_alpha(theta, log_sigma2))
        return self.least + (kept * self.extra).sum()

    @torch.no_grad()
    def add_gradients(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        parameters = [*(weight.theta for weight in weights), *(weight.log_sigma2 for weight in weights)]
        flat = [parameter.detach().flatten().float() for parameter in parameters]
        sizes = [tensor.numel() for tensor in flat[: len(weights)]]
        by_parts = _on_cpu if self.extra.device.type == "cpu" else _as_one
        factor = tau * math.log(2)
        bits, slopes = by_parts(flat[: len(weights)], flat[len(weights) :], self.extra.split(sizes), factor)
        shaped = [slope.view(own.shape).to(own.dtype) for slope, own in zip(slopes, parameters, strict=True)]
        add_to_gradients(parameters, shaped)
        return ((self.least + bits) * factor,)


def _as_one(
    thetas: Sequence[Tensor], log_sigma2s: Sequence[Tensor], extras: Sequence[Tensor], factor: float | Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Σ p · extra, and `factor` × its gradients in each θ and then each log σ², over all weights as one vector."""
    sizes = [theta.numel() for theta in thetas]
    theta, log_sigma2, extra = torch.cat(list(thetas)), torch.cat(list(log_sigma2s)), torch.cat(list(extras))
    if on_triton(theta):
        from bayeszip.variational import gpu_kernels

        bits, by_theta, slope = gpu_kernels.rate_with_slopes(theta, log_sigma2, extra, factor)
    else:
        kept = torch.sigmoid(-log_alpha(theta, log_sigma2))
        slope = (kept - 1) * kept * extra * factor
        # d log α / dθ = −2θ/θ², with the floor that log α has.
        by_theta = slope * theta * -2 / (theta.square() + THETA2_FLOOR)
        bits = (kept * extra).sum()
    return bits, [*by_theta.split(sizes), *slope.split(sizes)]


def _on_cpu(
    thetas: Sequence[Tensor], log_sigma2s: Sequence[Tensor], extras: Sequence[Tensor], factor: float | Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The same in one pass over each tensor."""
    slopes = [torch.empty_like(theta) for theta in (*thetas, *log_sigma2s)]
    bits = 0.0
    for i, (theta, log_sigma2, extra) in enumerate(zip(thetas, log_sigma2s, extras, strict=True)):
        given = (theta.numpy(), log_sigma2.numpy(), extra.numpy(), np.float32(float(factor)))
        bits += rate_with_slopes(*given, slopes[i].numpy(), slopes[len(thetas) + i].numpy())
    return torch.tensor(bits, dtype=torch.float32), slopes
