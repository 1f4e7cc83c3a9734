"""The mixture's log-density summed over all D weights: the costly term of the objective, in O(D) with all gradients.

Two ways:

- `exact`: every component at every weight, in chunks: O(D·K) time, O(D) memory;
- `grid`: GM is a function of one variable, so it is evaluated at evenly spaced nodes only. Each weight reads its slope
  off the two nodes around it (linearly: exact where one component is responsible, and never beyond what the slope is
  nearby), and is shared out among three nodes (exactly for quadratics), from which the value and the gradients of
  μ, λ, π follow: O(D + G·K). On a CPU; a GPU is faster the exact way.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeszip.variational.distributions import HALF_LOG_2PI, log_joint
from bayeszip.variational.kernels import read_grid, tabulate_mixture
from bayeszip.variational.passes import scaled
from bayeszip.variational.sampling import on_triton

__all__ = ["CHUNK", "Components", "Method", "grid_for", "log_mixture_sum", "with_gradients"]

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


class Grid(NamedTuple):
    """Evenly spaced nodes: the first, their distance, their number."""

    low: float
    spacing: float
    nodes: int


def log_mixture_sum(
    thetas: Sequence[Tensor], components: Components, method: Method = "auto", scale: float | Tensor = 1.0
) -> Tensor:
    """`scale` × Σ_i log GM_ψ(θ_i) over all weights of all tensors, by the given way.

    `auto` takes the grid on a CPU where it is the cheaper one, `grid` wherever `MAX_NODES` suffice.
    """
    total: Tensor = _LogMixtureSum.apply(grid_for(thetas, components, method), scale, *components, *thetas)
    return total


class _LogMixtureSum(torch.autograd.Function):
    """Value and all gradients in one pass; backward only scales what forward found."""

    @staticmethod
    def forward(
        ctx: Any,
        grid: Grid | None,
        scale: float | Tensor,
        means: Tensor,
        log_precisions: Tensor,
        log_proportions: Tensor,
        *thetas: Tensor,
    ) -> Tensor:
        components = Components(means, log_precisions, log_proportions)
        value, by_components, by_theta = with_gradients(thetas, components, grid, scale)
        # Held as they are, not by `save_for_backward`: autograd then copies what it is handed, never adds to it.
        ctx.gradients = [*by_components, *by_theta]
        return value

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *scaled(ctx.gradients, outputs[0]))


def with_gradients(
    thetas: Sequence[Tensor], components: Components, grid: Grid | None, scale: float | Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """`scale` × Σ log GM and its gradients in μ, log λ, log π, and in each θ."""
    fixed = Components(*(part.detach() for part in components))
    flat = [theta.detach().flatten().float() for theta in thetas]
    value, by_components, slopes = _on_grid(flat, fixed, grid, scale) if grid else _exactly(flat, fixed, scale)
    by_theta = [slope.view(theta.shape).to(theta.dtype) for slope, theta in zip(slopes, thetas, strict=True)]
    return value, by_components, by_theta


def _exactly(
    flat: Sequence[Tensor], components: Components, scale: float | Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """`scale` × Σ log GM and its gradients in μ, log λ, log π, and in each tensor's θ."""
    # As one vector: many small tensors would keep a GPU waiting for its next order.
    theta = torch.cat(list(flat))
    if on_triton(theta):
        from bayeszip.variational.gpu_kernels import mixture_with_slopes

        value, by_components, slope = mixture_with_slopes(theta, *components, scale)
    else:
        value, by_components, slope = _in_chunks(theta, components, scale)
    return value, by_components, list(slope.split([part.numel() for part in flat]))


def _in_chunks(theta: Tensor, components: Components, scale: float | Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """`scale` × Σ log GM and its gradients in μ, log λ, log π, and in θ; chunk by chunk."""
    value = torch.zeros((), dtype=torch.float64, device=theta.device)
    by_components = [torch.zeros_like(parameter) for parameter in components]
    slope = torch.empty_like(theta)
    step = max(1, CHUNK // len(components.means))
    for start in range(0, theta.numel(), step):
        density, responsibility, pull = _evaluate(theta[start : start + step], components)
        value += density.sum()
        slope[start : start + step] = (responsibility * pull).sum(dim=1) * -scale
        for total, part in zip(by_components, _component_gradients(responsibility, pull, components), strict=True):
            total += part
    return (value * scale).float(), [total * scale for total in by_components], slope


def _on_grid(
    flat: Sequence[Tensor], components: Components, grid: Grid, scale: float | Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The same from the nodes of a grid."""
    scale = float(scale)
    points = grid.low + grid.spacing * np.arange(grid.nodes)
    means, log_precisions, log_proportions = (parameter.numpy().astype(np.float64) for parameter in components)
    precisions = np.exp(log_precisions)
    offsets = log_proportions + 0.5 * log_precisions - HALF_LOG_2PI
    density, slope, responsibility = (np.empty((grid.nodes, *shape)) for shape in ((), (), (len(means),)))
    tabulate_mixture(points, means, precisions, offsets, density, slope, responsibility)

    slope, low, spacing = (slope * scale).astype(np.float32), np.float32(grid.low), np.float32(grid.spacing)
    moments = np.zeros((4, grid.nodes, 3))
    by_theta = [torch.empty_like(theta) for theta in flat]
    for theta, gradient in zip(flat, by_theta, strict=True):
        read_grid(theta.numpy(), low, spacing, slope, gradient.numpy(), moments)

    weight = _node_weights(moments.sum(axis=0))
    # Sums over the nodes of r_k, r_k x, r_k x², from which those of the deviations x − μ_k follow.
    mass, first, second = np.stack([weight, weight * points, weight * points**2]) @ responsibility
    spread = precisions * (second - 2 * means * first + means**2 * mass)
    by_components = (precisions * (first - means * mass), 0.5 * (mass - spread), mass)
    value = torch.tensor(scale * (density @ weight), dtype=torch.float32)
    return value, [torch.from_numpy((scale * part).astype(np.float32)) for part in by_components], by_theta


def _node_weights(moments: np.ndarray) -> np.ndarray:
    """How much of the weights each node stands for: ½t(t−1), 1−t², ½t(t+1) on the nodes before, at and after each."""
    count, first, second = moments.T
    weight = count - second
    weight[:-1] += 0.5 * (second - first)[1:]
    weight[1:] += 0.5 * (second + first)[:-1]
    return weight


def _evaluate(points: Tensor, components: Components) -> tuple[Tensor, Tensor, Tensor]:
    """At each point: log GM; the responsibilities r_k; and λ_k(x − μ_k), the pull of each component."""
    joint = log_joint(points, *components)
    density, responsibility = torch.logsumexp(joint, dim=1), torch.softmax(joint, dim=1)
    pull = (points[:, None] - components.means) * components.log_precisions.exp()
    return density, responsibility, pull


def _component_gradients(responsibility: Tensor, pull: Tensor, components: Components) -> tuple[Tensor, ...]:
    """Gradients of Σ log GM: r·λ(x−μ) in μ, ½ r (1 − λ(x−μ)²) in log λ, r in log π, summed over the points."""
    mass = responsibility.sum(dim=0)
    weighted = responsibility * pull
    spread = (weighted * pull).sum(dim=0) * (-components.log_precisions).exp()
    return weighted.sum(dim=0), 0.5 * (mass - spread), mass


def grid_for(thetas: Sequence[Tensor], components: Components, method: Method) -> Grid | None:
    """A grid that spans the weights at `NODE_SPACING` of the narrowest component's deviation; None: the exact way."""
    if method == "exact" or any(theta.device.type != "cpu" for theta in thetas):
        return None
    bounds = [bound.item() for theta in thetas if theta.numel() for bound in theta.detach().aminmax()]
    narrowest = math.exp(-0.5 * float(components.log_precisions.detach().max()))
    if not bounds or not all(map(math.isfinite, bounds)) or not narrowest > 0:
        return None
    low, span = min(bounds), max(bounds) - min(bounds)
    nodes = math.ceil(span / (NODE_SPACING * narrowest)) + 2
    if nodes > (MAX_NODES if method == "grid" else min(MAX_NODES, sum(theta.numel() for theta in thetas) // 4)):
        return None
    spacing = max(span / (nodes - 1), float(np.finfo(np.float32).tiny))
    # One node more at each end, since weights are shared out among three.
    return Grid(low - spacing, spacing, nodes + 2)
