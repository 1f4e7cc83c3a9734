"""Soft weight sharing: the Gaussian-mixture prior GM_ψ on the weight means, which pulls them to a few shared values.

    cost = −Σᵢ log GM_ψ(θᵢ/uᵢ) − Σ_k log Gamma(λ_k | a, b)        eq. 5 and the hyper-prior of app. A

One component is pinned at zero. u is the unit of a weight's tensor, 1 unless the network has units by layer: then one
set of shared values serves layers of any scale. −log u, by which the density of θ differs from that of θ/u, is a
constant and left out. `mixture_sum` has the sum over all weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.errors import RecipeError
from bayeszip.schedules import geometric, ramp
from bayeszip.settings import at_least, between, check, choice, positive, setting
from bayeszip.variational.distributions import log_gamma_density, log_joint
from bayeszip.variational.divergence import survivors
from bayeszip.variational.kinds import is_norm
from bayeszip.variational.layers import VariationalWeight, variational_weights
from bayeszip.variational.mixture_sum import CHUNK, Components, Method, grid_for, log_mixture_sum, with_gradients
from bayeszip.variational.passes import add_to_gradients
from bayeszip.variational.terms import Term

__all__ = ["GaussianMixture", "MixturePrior", "MixtureSettings", "MixtureStart"]

#: Units are held to what half precision holds well.
_SMALLEST_UNIT, _LARGEST_UNIT = 2.0**-14, 2.0**15

#: Layers whose weights differ so many times in size have units of their own, with norms or without.
UNEVEN = 100

#: The share of the weights that even seeding takes for outliers, at either end.
OUTLIERS = 1e-3


@dataclass(frozen=True)
class MixtureStart:
    """Start and hyper-prior of the mixture; defaults are the paper's (app. A)."""

    components: int = setting(17, "K, the one pinned at zero included", between(1, 2**16 - 1))
    zero_proportion: float = setting(0.999, "π₀, pinned", between(0, 1))
    hyper_shape: float = setting(1e5, "α of the Gamma hyper-prior on the precisions", at_least(1))
    hyper_rate: float = setting(10.0, "β of the Gamma hyper-prior on the precisions", positive)
    units: str = setting(
        "auto",
        "shared values are in units of the whole network, or of each layer as a phase with reseed finds it; auto: of "
        "each layer if there is a normalization layer, or layers differ a hundredfold in size",
        choice("auto", "network", "layer"),
    )
    seeding: str = setting(
        "quantiles",
        "where a phase with reseed places the components: at quantiles of the weights that would survive, or evenly "
        "over their range",
        choice("quantiles", "even"),
    )

    def __post_init__(self) -> None:
        check(self, "mixture")
        if self.components > 1 and not 0 < self.zero_proportion < 1:
            raise RecipeError(f"mixture.zero_proportion must lie between 0 and 1, not {self.zero_proportion}")

    def by_layer(self, network: nn.Module) -> bool:
        """Whether the layers of a network have units of their own."""
        if self.units != "auto":
            return self.units == "layer"
        return any(map(is_norm, network.modules())) or _is_uneven(network)


@torch.no_grad()
def _is_uneven(network: nn.Module) -> bool:
    """Whether no one set of values could serve all matrices: the largest has `UNEVEN` times the smallest's weights."""
    matrices = [weight.theta for weight in variational_weights(network) if weight.theta.dim() > 1]
    sizes = [size for size in map(_root_mean_square, matrices) if size > 0]
    return bool(sizes) and max(sizes) >= UNEVEN * min(sizes)


@dataclass(frozen=True)
class MixtureSettings:
    """What a phase says of the mixture. Learning rates are those of Adam; defaults are the paper's (table 3)."""

    tau2: float = setting(0.0, "τ₂, weight of the mixture prior and its hyper-prior", at_least(0))
    tau2_ramp: float = setting(0.0, "share of the phase over which τ₂ rises linearly from 0", between(0, 1))
    rate_means: float = setting(1e-4, "learning rate of the components' means μ", at_least(0))
    rate_log_precisions: float = setting(1e-4, "learning rate of log λ", at_least(0))
    rate_log_proportions: float = setting(3e-3, "learning rate of log π", at_least(0))
    reseed: bool = setting(
        False, "first place the components anew, by the weights that would survive, as mixture.seeding says"
    )
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

    That of a prior has the component pinned at zero in front. `units` are those of tensors, by name, that are not 1:
    it is a density of θ/u.
    """

    means: np.ndarray
    log_precisions: np.ndarray
    log_proportions: np.ndarray
    units: Mapping[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.means)

    def log_joint(self, values: np.ndarray) -> np.ndarray:
        """log π_k + log N(x | μ_k, λ_k⁻¹) but for a constant, values × components; values in their units."""
        constants = self.log_proportions + 0.5 * self.log_precisions
        return constants - 0.5 * np.exp(self.log_precisions) * (values[:, None] - self.means) ** 2


class MixturePrior(Term):
    """p(θ) ∝ Π_i Σ_k π_k N(θ_i/u_i | μ_k, λ_k⁻¹), with μ₀ = 0 and π₀ pinned and a Gamma(a, b) hyper-prior on every λ_k.

    Start values are the paper's (table 3, with the proportions' denominator corrected to K−1): μ_k = kΔμ for
    k = −(K−1)/2 … (K−1)/2, log λ_k = −2 log(0.9 Δμ), π_k = (1−π₀)/(K−1), Δμ = 2 std(w)/K.

    Args:
        components: K, odd or even, at least 1 (only the zero component).
        weight_std: std(w) of the pretrained weights.
        zero_proportion: π₀, pinned.
        hyper_shape, hyper_rate: a and b of the Gamma hyper-prior.
        with_units: the tensors, by name, that have a unit of their own; 1 until a phase begins with `reseed`.
        seeding: where `reseed` places the components, a key of `SEEDINGS`.
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
        with_units: Sequence[str] = (),
        seeding: str = "quantiles",
    ) -> None:
        super().__init__()
        self.seeding = seeding
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
        self._with_units = {name: place for place, name in enumerate(with_units)}
        #: u of the tensors that have one, exact in half precision; part of the state. None: all are 1.
        self.units: Tensor | None
        self.register_buffer("units", torch.ones(len(with_units)) if with_units else None)

    @classmethod
    def start(cls, network: nn.Module, start: MixtureStart | None) -> "MixturePrior":
        """The mixture at its start values; Δμ follows the spread of the pretrained weights."""
        start, weights = start or MixtureStart(), tuple(variational_weights(network))
        theta = torch.cat([weight.theta.detach().flatten().float() for weight in weights])
        shape = (start.zero_proportion, start.hyper_shape, start.hyper_rate)
        # A bias is on the scale of activations, which a unit of the weights says nothing of.
        with_units = [w.name for w in weights if w.theta.dim() > 1] if start.by_layer(network) else []
        return cls(start.components, theta.std(correction=0).item(), *shape, with_units, start.seeding).to(theta.device)

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
            kept = {weight.name: survivors([weight]) for weight in weights}
            self.measure_units(kept)
            self.reseed(torch.cat([self._seen(values, name) for name, values in kept.items()]))

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
        mixture = self.log_prob(*(self._seen(weight.theta, weight.name) for weight in weights), scale=-tau)
        return mixture, self._hyper_cost(tau)

    def add_gradients(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            seen = [self._seen(weight.theta, weight.name) for weight in weights]
        components = self.components()
        value, by_components, slopes = with_gradients(seen, components, grid_for(seen, components, "auto"), -tau)
        # The chain rule: d/dθ = u⁻¹ d/d(θ/u).
        by_theta = [
            self._seen(slope, weight.name).to(weight.theta.dtype) for slope, weight in zip(slopes, weights, strict=True)
        ]
        add_to_gradients([weight.theta for weight in weights], by_theta)
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
        return self.assign(self._seen(weight.theta, weight.name)) > 0

    def frozen(self) -> GaussianMixture:
        held = [] if self.units is None else self.units.tolist()
        units = {name: unit for name, unit in zip(self._with_units, held, strict=True) if unit != 1}
        means, precisions, proportions = (part.detach().float().cpu().numpy().copy() for part in self.components())
        return GaussianMixture(means, precisions, proportions, units)

    @torch.no_grad()
    def measure_units(self, survivors: Mapping[str, Tensor]) -> None:
        """u = root mean square of a tensor's survivors ÷ that of all, whose scale therefore stays; 1 without any."""
        if self.units is None:
            return
        whole = _root_mean_square(torch.cat(list(survivors.values())))
        sizes = [_root_mean_square(survivors[name]) for name in self._with_units]
        ratios = [size / whole if size > 0 and whole > 0 else 1.0 for size in sizes]
        self.units.copy_(torch.tensor(ratios).clamp(_SMALLEST_UNIT, _LARGEST_UNIT).half())

    def _seen(self, theta: Tensor, name: str) -> Tensor:
        """θ/u: weights of the tensor `name` as the components see them."""
        place = self._with_units.get(name)
        return theta if self.units is None or place is None else theta.float() / self.units[place]

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
        """For each weight, in its unit, the index of its most responsible component, argmax_k π_k N(θ | μ_k, λ_k⁻¹)."""
        components = self.components()
        flat = theta.detach().float().flatten()
        step = max(1, CHUNK // len(components.means))
        parts = [log_joint(part, *components).argmax(dim=1) for part in flat.split(step)]
        return torch.cat(parts).view(theta.shape) if parts else torch.zeros_like(theta, dtype=torch.long)

    @torch.no_grad()
    def reseed(self, survivors: Tensor) -> None:
        """Place the free components where `survivors` are, as `seeding` says, with equal proportions."""
        if self.means.numel() == 0 or survivors.numel() == 0:
            return
        self.means.copy_(SEEDINGS[self.seeding](survivors.float().flatten().sort().values, self.means.numel()))
        self.log_proportions.zero_()


def _at_quantiles(ordered: Tensor, count: int) -> Tensor:
    """As many values between one component and the next, everywhere."""
    levels = (torch.arange(count, device=ordered.device) + 0.5) / count
    return ordered[(levels * ordered.numel()).long()]


def _evenly(ordered: Tensor, count: int) -> Tensor:
    """As far from one component to the next everywhere but at the ends, which lie at the smallest and largest value.

    The range that is divided leaves `OUTLIERS` out at either end: a few weights far out would make all steps wide.
    They have a component all the same, since a weight that is pulled in from there is missed more than any other.
    """
    if count == 1:
        return _at_quantiles(ordered, count)
    left_out = int(OUTLIERS * ordered.numel())
    low, high = ordered[left_out], ordered[-1 - left_out]
    means = low + (high - low) * torch.linspace(0, 1, count, device=ordered.device)
    means[0], means[-1] = ordered[0], ordered[-1]
    return means


#: How components are placed: ordered values and how many components → their means.
SEEDINGS: dict[str, Callable[[Tensor, int], Tensor]] = {"quantiles": _at_quantiles, "even": _evenly}


def _root_mean_square(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item() if values.numel() else 0.0


def _log1m(probability: float) -> float:
    return math.log1p(-probability) if probability < 1 else -math.inf
