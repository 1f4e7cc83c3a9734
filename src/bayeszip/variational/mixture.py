"""Soft weight sharing: the Gaussian-mixture prior GM_ψ on the weight means, which pulls them to a few shared values.

    cost = −Σᵢ log GM_ψ(θᵢ) − Σ_k log Gamma(λ_k | a, b)        eq. 5 and the hyper-prior of app. A

One component is pinned at zero. `mixture_sum` has the sum over all weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.errors import RecipeError
from bayeszip.schedules import geometric, ramp
from bayeszip.settings import at_least, between, check, positive, setting
from bayeszip.variational.distributions import log_gamma_density, log_joint
from bayeszip.variational.divergence import survivors
from bayeszip.variational.layers import VariationalWeight
from bayeszip.variational.mixture_sum import CHUNK, Components, Method, grid_for, log_mixture_sum, with_gradients
from bayeszip.variational.passes import add_to_gradients
from bayeszip.variational.terms import Term

__all__ = ["GaussianMixture", "MixturePrior", "MixtureSettings", "MixtureStart"]


@dataclass(frozen=True)
class MixtureStart:
    """Start and hyper-prior of the mixture; defaults are the paper's (app. A)."""

    components: int = setting(17, "K, the one pinned at zero included", between(1, 2**16 - 1))
    zero_proportion: float = setting(0.999, "π₀, pinned", between(0, 1))
    hyper_shape: float = setting(1e5, "α of the Gamma hyper-prior on the precisions", at_least(1))
    hyper_rate: float = setting(10.0, "β of the Gamma hyper-prior on the precisions", positive)

    def __post_init__(self) -> None:
        check(self, "mixture")
        if self.components > 1 and not 0 < self.zero_proportion < 1:
            raise RecipeError(f"mixture.zero_proportion must lie between 0 and 1, not {self.zero_proportion}")


@dataclass(frozen=True)
class MixtureSettings:
    """What a phase says of the mixture. Learning rates are Adam's; defaults are the paper's (table 3)."""

    tau2: float = setting(0.0, "τ₂, weight of the mixture prior and its hyper-prior", at_least(0))
    tau2_ramp: float = setting(0.0, "share of the phase over which τ₂ rises linearly from 0", between(0, 1))
    rate_means: float = setting(1e-4, "learning rate of the components' means μ", at_least(0))
    rate_log_precisions: float = setting(1e-4, "learning rate of log λ", at_least(0))
    rate_log_proportions: float = setting(3e-3, "learning rate of log π", at_least(0))
    reseed: bool = setting(False, "first place the components at quantiles of the weights that would survive")
    std_first: float = setting(
        0.0,
        "hold the components at this standard deviation at the start (0: λ is learnt under its hyper-prior)",
        at_least(0),
    )
    std_last: float = setting(
        0.0, "…and tighten them evenly in ratio to this at the end (0: hold them to the end)", at_least(0)
    )


@dataclass(frozen=True)
class GaussianMixture:
    """GM_ψ frozen: means, log-precisions and log-proportions of K components, as arrays.

    That of a prior has the component pinned at zero in front.
    """

    means: np.ndarray
    log_precisions: np.ndarray
    log_proportions: np.ndarray

    def __len__(self) -> int:
        return len(self.means)

    def log_joint(self, values: np.ndarray) -> np.ndarray:
        """log π_k + log N(x | μ_k, λ_k⁻¹) but for a constant, values × components."""
        constants = self.log_proportions + 0.5 * self.log_precisions
        return constants - 0.5 * np.exp(self.log_precisions) * (values[:, None] - self.means) ** 2


class MixturePrior(Term):
    """p(θ) = Π_i Σ_k π_k N(θ_i | μ_k, λ_k⁻¹), with μ₀ = 0 and π₀ pinned and a Gamma(a, b) hyper-prior on every λ_k.

    Start values are the paper's (table 3, with the proportions' denominator corrected to K−1): μ_k = kΔμ for
    k = −(K−1)/2 … (K−1)/2, log λ_k = −2 log(0.9 Δμ), π_k = (1−π₀)/(K−1), Δμ = 2 std(w)/K.

    Args:
        components: K, odd or even, at least 1 (only the zero component).
        weight_std: std(w) of the pretrained weights.
        zero_proportion: π₀, pinned.
        hyper_shape, hyper_rate: a and b of the Gamma hyper-prior.
    """

    name = "mixture"
    parts = ("mixture", "hyper-prior")
    Settings = MixtureSettings

    def __init__(
        self,
        components: int = 17,
        weight_std: float = 0.05,
        zero_proportion: float = 0.999,
        hyper_shape: float = 1e5,
        hyper_rate: float = 10.0,
    ) -> None:
        super().__init__()
        # Constant weights have std 0: fall back on the hyper-prior's own scale, so that components stay apart.
        spacing = 2 * weight_std / components if weight_std > 0 else (hyper_shape / hyper_rate) ** -0.5
        self.zero_proportion = zero_proportion if components > 1 else 1.0
        self.hyper_shape = hyper_shape
        #: b, which `tighten` changes: part of the state.
        self.hyper_rate: Tensor
        self.register_buffer("hyper_rate", torch.tensor(hyper_rate, dtype=torch.float64))
        positions = torch.arange(components) - (components - 1) // 2
        self.means = nn.Parameter((positions[positions != 0] * spacing).float())
        self.log_precisions = nn.Parameter(torch.full((components,), -2 * math.log(0.9 * spacing)))
        #: Unnormalized log π_k of the free components; they share 1 − π₀.
        self.log_proportions = nn.Parameter(torch.zeros(components - 1))

    @classmethod
    def start(cls, weights: Sequence[VariationalWeight], start: MixtureStart | None) -> "MixturePrior":
        """The mixture at its start values; Δμ follows the spread of the pretrained weights."""
        start = start or MixtureStart()
        theta = torch.cat([weight.theta.detach().flatten().float() for weight in weights])
        shape = (start.zero_proportion, start.hyper_shape, start.hyper_rate)
        return cls(start.components, theta.std(correction=0).item(), *shape).to(theta.device)

    @classmethod
    def counts(cls, settings: MixtureSettings) -> bool:
        return settings.tau2 > 0

    def dials(self, settings: MixtureSettings, done: float) -> tuple[float, ...]:
        """τ₂, and the standard deviation at which the components are held, if they are."""
        tau = settings.tau2 * ramp(done, settings.tau2_ramp)
        first, last = settings.std_first, settings.std_last or settings.std_first
        return (tau, geometric(done, first, last)) if first else (tau,)

    def enter(self, settings: MixtureSettings) -> None:
        """What is held is not trained."""
        self.log_precisions.requires_grad_(not settings.std_first)

    def begin(self, settings: MixtureSettings, weights: Sequence[VariationalWeight]) -> None:
        if settings.reseed:
            self.reseed(survivors(weights))

    def turn(self, *dials: float | Tensor) -> None:
        for std in dials:
            self.tighten(std)

    def components(self) -> Components:
        """ψ with the pinned component in front and the proportions normalized."""
        zero = self.means.new_zeros(1)
        free = torch.log_softmax(self.log_proportions, dim=-1) + _log1m(self.zero_proportion)
        pinned = zero + math.log(self.zero_proportion)
        return Components(torch.cat([zero, self.means]), self.log_precisions, torch.cat([pinned, free]))

    def log_prob(self, *thetas: Tensor, method: Method = "auto", scale: float | Tensor = 1.0) -> Tensor:
        """`scale` × Σ_i log GM_ψ(θ_i) over all tensors, a float32 scalar, differentiable in θ and ψ."""
        return log_mixture_sum(thetas, self.components(), method, scale)

    def cost(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        mixture = self.log_prob(*(weight.theta for weight in weights), scale=-tau)
        return mixture, self._hyper_cost(tau)

    def add_gradients(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        thetas, components = [weight.theta for weight in weights], self.components()
        grid = grid_for(thetas, components, "auto")
        value, by_components, by_theta = with_gradients(thetas, components, grid, -tau)
        add_to_gradients(thetas, by_theta)
        trained = [part.requires_grad for part in components]
        torch.autograd.backward(
            [part for part, wanted in zip(components, trained, strict=True) if wanted],
            [slope for slope, wanted in zip(by_components, trained, strict=True) if wanted],
        )
        hyper_cost = self._hyper_cost(tau)
        if hyper_cost.requires_grad:
            hyper_cost.backward()
        return value, hyper_cost.detach()

    def _hyper_cost(self, tau: float | Tensor) -> Tensor:
        """The hyper-prior's part; where log λ is not trained it has none."""
        if not self.log_precisions.requires_grad:
            return self.log_precisions.new_zeros(())
        return self.log_hyper_prior() * -tau

    def keeps(self, weight: VariationalWeight) -> Tensor:
        """Those whose most responsible component is not the one at zero."""
        return self.assign(weight.theta) > 0

    def frozen(self) -> GaussianMixture:
        return GaussianMixture(*(part.detach().float().cpu().numpy().copy() for part in self.components()))

    def log_hyper_prior(self) -> Tensor:
        """Σ_k log Gamma(λ_k | a, b)."""
        return log_gamma_density(self.log_precisions, self.hyper_shape, self.hyper_rate).sum()

    @torch.no_grad()
    def tighten(self, std: float | Tensor) -> None:
        """Move all components, and the hyper-prior's mode, to precision 1/std²; its relative spread a^-½ stays."""
        self.hyper_rate.fill_((self.hyper_shape - 1) * std**2)
        self.log_precisions.fill_(-2 * (std.log() if isinstance(std, Tensor) else math.log(std)))

    @torch.no_grad()
    def assign(self, theta: Tensor) -> Tensor:
        """For each weight the index of its most responsible component, argmax_k π_k N(θ | μ_k, λ_k⁻¹)."""
        components = self.components()
        flat = theta.detach().float().flatten()
        step = max(1, CHUNK // len(components.means))
        parts = [log_joint(part, *components).argmax(dim=1) for part in flat.split(step)]
        return torch.cat(parts).view(theta.shape) if parts else torch.zeros_like(theta, dtype=torch.long)

    @torch.no_grad()
    def reseed(self, survivors: Tensor) -> None:
        """Place the free components at evenly spaced quantiles of `survivors`, with equal proportions."""
        free = self.means.numel()
        if free == 0 or survivors.numel() == 0:
            return
        levels = (torch.arange(free, device=survivors.device) + 0.5) / free
        ordered = survivors.float().flatten().sort().values
        self.means.copy_(ordered[(levels * ordered.numel()).long()])
        self.log_proportions.zero_()


def _log1m(probability: float) -> float:
    return math.log1p(-probability) if probability < 1 else -math.inf
