"""The Gaussian-mixture prior GM_ψ on the weight means: one component pinned at zero, a hyper-prior on the precisions.

Its log-density summed over all D weights is the costly term of the objective. Two ways to get it, with all gradients:

- `exact`: every component at every weight, in chunks: O(D·K) time, O(D) memory;
- `grid`: GM is a function of one variable, so it is evaluated at evenly spaced nodes only. Each weight reads its value
  and slope off the nearest node's second-order expansion, and leaves its weight on the three nodes around it (exact for
  quadratics) from which the gradients of μ, λ, π follow: O(D + G·K). On a CPU; a GPU is faster the exact way.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.variational.distributions import log_gamma_density, log_joint
from bayeszip.variational.kernels import read_grid

__all__ = ["Components", "MixturePrior", "log_mixture_sum"]

Method = Literal["auto", "grid", "exact"]

#: Distance of grid nodes in units of the smallest standard deviation among the components.
NODE_SPACING = 1 / 8
#: More nodes than this, or than a quarter of the weights, and the exact way is taken.
MAX_NODES = 2**16
#: Weights × components evaluated at once by the exact way.
CHUNK = 2**20


class Components(NamedTuple):
    """The mixture's parameters ψ, K values each; index 0 is the component pinned at zero."""

    means: Tensor
    log_precisions: Tensor
    log_proportions: Tensor


class MixturePrior(nn.Module):
    """p(θ) = Π_i Σ_k π_k N(θ_i | μ_k, λ_k⁻¹), with μ₀ = 0 and π₀ pinned and a Gamma(a, b) hyper-prior on every λ_k.

    Start values are the paper's (table 3, with the proportions' denominator corrected to K−1): μ_k = kΔμ for
    k = −(K−1)/2 … (K−1)/2, log λ_k = −2 log(0.9 Δμ), π_k = (1−π₀)/(K−1), Δμ = 2 std(w)/K.

    Args:
        components: K, odd or even, at least 1 (only the zero component).
        weight_std: std(w) of the pretrained weights.
        zero_proportion: π₀, pinned.
        hyper_shape, hyper_rate: a and b of the Gamma hyper-prior.
    """

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
        self.hyper_shape, self.hyper_rate = hyper_shape, hyper_rate
        positions = torch.arange(components) - (components - 1) // 2
        self.means = nn.Parameter((positions[positions != 0] * spacing).float())
        self.log_precisions = nn.Parameter(torch.full((components,), -2 * math.log(0.9 * spacing)))
        #: Unnormalized log π_k of the free components; they share 1 − π₀.
        self.log_proportions = nn.Parameter(torch.zeros(components - 1))

    def components(self) -> Components:
        """ψ with the pinned component in front and the proportions normalized."""
        zero = self.means.new_zeros(1)
        free = torch.log_softmax(self.log_proportions, dim=0) + _log1m(self.zero_proportion)
        pinned = zero + math.log(self.zero_proportion)
        return Components(torch.cat([zero, self.means]), self.log_precisions, torch.cat([pinned, free]))

    def log_prob(self, theta: Tensor, method: Method = "auto") -> Tensor:
        """Σ_i log GM_ψ(θ_i), a float32 scalar, differentiable in θ and ψ."""
        return log_mixture_sum(theta, self.components(), method)

    def log_hyper_prior(self) -> Tensor:
        """Σ_k log Gamma(λ_k | a, b)."""
        return log_gamma_density(self.log_precisions, self.hyper_shape, self.hyper_rate).sum()

    def tighten(self, std: float) -> None:
        """Move all components, and the hyper-prior's mode, to precision 1/std²; its relative spread a^-½ stays."""
        self.hyper_rate = (self.hyper_shape - 1) * std**2
        with torch.no_grad():
            self.log_precisions.fill_(-2 * math.log(std))

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


def log_mixture_sum(theta: Tensor, components: Components, method: Method = "auto") -> Tensor:
    """Σ_i log GM_ψ(θ_i) by the given way; `auto` takes the grid on a CPU where it is the cheaper one."""
    flat = theta.float().flatten()
    nodes = 0
    if method != "exact" and flat.numel() and flat.device.type == "cpu":
        nodes = _grid_nodes(flat, components)
        if method == "auto" and nodes > min(MAX_NODES, flat.numel() // 4):
            nodes = 0
    total: Tensor = _LogMixtureSum.apply(flat, *components, nodes)
    return total


class _LogMixtureSum(torch.autograd.Function):
    """Value and all gradients in one pass; backward only scales what forward found."""

    @staticmethod
    def forward(
        ctx: Any, theta: Tensor, means: Tensor, log_precisions: Tensor, log_proportions: Tensor, nodes: int
    ) -> Tensor:
        components = Components(means, log_precisions, log_proportions)
        value, *gradients = _on_grid(theta, components, nodes) if nodes else _exactly(theta, components)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (*(outputs[0] * gradient for gradient in ctx.saved_tensors), None)


def _exactly(theta: Tensor, components: Components) -> tuple[Tensor, ...]:
    """Σ log GM and its gradients in θ, μ, log λ, log π, chunk by chunk."""
    value = theta.new_zeros(())
    slope = torch.empty_like(theta)
    totals = [torch.zeros_like(parameter) for parameter in components]
    step = max(1, CHUNK // len(components.means))
    for start in range(0, theta.numel(), step):
        chunk = theta[start : start + step]
        density, responsibility, pull = _evaluate(chunk, components)
        value += density.sum()
        slope[start : start + step] = -(responsibility * pull).sum(dim=1)
        for total, part in zip(totals, _parameter_gradients(responsibility, pull, components), strict=True):
            total += part
    return value, slope, *totals


def _on_grid(theta: Tensor, components: Components, nodes: int) -> tuple[Tensor, ...]:
    """The same from `nodes` grid nodes that span the weights."""
    low, high = (bound.item() for bound in theta.aminmax())
    spacing = max((high - low) / (nodes - 1), torch.finfo(theta.dtype).tiny)
    grid = low + spacing * torch.arange(nodes, dtype=theta.dtype)
    density, responsibility, pull = _evaluate(grid, components)
    weighted = responsibility * pull
    slope = -weighted.sum(dim=1)
    curvature = (weighted * pull).sum(dim=1) - responsibility @ components.log_precisions.exp() - slope.square()

    by_theta, moments = torch.empty_like(theta), theta.new_zeros(nodes, 3)
    within = read_grid(
        theta.numpy(),
        np.float32(low),
        np.float32(spacing),
        (slope * spacing).numpy(),
        (curvature * spacing**2).numpy(),
        by_theta.numpy(),
        moments.numpy(),
    )
    value = density.double() @ moments[:, 0].double() + within
    weight = _node_weights(moments)
    by_parameters = _parameter_gradients(responsibility * weight[:, None], pull, components)
    return value.to(theta.dtype), by_theta, *by_parameters


def _node_weights(moments: Tensor) -> Tensor:
    """How much of the weights each node stands for: ½t(t−1), 1−t², ½t(t+1) on the three nodes around each weight."""
    count, first, second = moments.unbind(dim=1)
    left, right = 0.5 * (second - first), 0.5 * (second + first)
    weight = count - second
    weight[:-1] += left[1:]
    weight[1:] += right[:-1]
    # At the ends there is no outer neighbor; what would go there stays, so that the total is kept.
    weight[0] += left[0]
    weight[-1] += right[-1]
    return weight


def _evaluate(points: Tensor, components: Components) -> tuple[Tensor, Tensor, Tensor]:
    """At each point: log GM; the responsibilities r_k; and λ_k(x − μ_k), the pull of each component."""
    joint = log_joint(points, *components)
    density = torch.logsumexp(joint, dim=1)
    responsibility = joint.sub_(density[:, None]).exp_()
    pull = (points[:, None] - components.means) * components.log_precisions.exp()
    return density, responsibility, pull


def _parameter_gradients(responsibility: Tensor, pull: Tensor, components: Components) -> tuple[Tensor, ...]:
    """Gradients of Σ log GM: r·λ(x−μ) in μ, ½ r (1 − λ(x−μ)²) in log λ, r in log π, summed over the points."""
    mass = responsibility.sum(dim=0)
    weighted = responsibility * pull
    spread = (weighted * pull).sum(dim=0) * (-components.log_precisions).exp()
    return weighted.sum(dim=0), 0.5 * (mass - spread), mass


@torch.no_grad()
def _grid_nodes(theta: Tensor, components: Components) -> int:
    """How many nodes keep their distance at `NODE_SPACING` of the narrowest component's standard deviation."""
    low, high = theta.aminmax()
    narrowest = (-0.5 * components.log_precisions.max()).exp()
    nodes = (high - low) / (NODE_SPACING * narrowest)
    return int(nodes.clamp(1, 2**30).item()) + 2 if torch.isfinite(nodes) else 2**30


def _log1m(probability: float) -> float:
    return math.log1p(-probability) if probability < 1 else -math.inf
