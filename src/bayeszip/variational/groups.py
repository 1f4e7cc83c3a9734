"""A prior on whole units and channels: log-uniform on the scale of each, so that one that says little dies altogether.

    cost = Σ_u s_u KL(N(1, α_u) ‖ 1/|z|),    α_u = (1 + α_in)(1 + α_out) − 1,    1/α_side = Σ_{i in side} θᵢ²/σᵢ²

The group normal-Jeffreys prior of Louizos et al. (2017), w = z·w̃ with p(z) ∝ 1/|z|, for a posterior of z that is
implied, not trained: along the ray w = zθ, q = Π N(wᵢ | θᵢ, σᵢ²) is ∝ exp(−½ (z−1)² Σ θᵢ²/σᵢ²), that is N(z | 1, α).
A unit has two sides, the weights that make it and those that read it, and is scaled by either: z is the product of two
independent scales, with mean 1 and the variance α_u above (its distribution taken for normal). It is dead as soon as
one side is. Sides hold all that is coupled, across layers: a channel of residual sums has all that add to it on one.

The first weight of a side costs what a weight does in the divergence, the next ones less and less: the cost grows with
the logarithm of their sum. w̃'s own prior is not here; the divergence, or whatever else is in force, weighs it.

s_u is the mean of the strengths of its weights on both sides (ours; 1 unless a recipe has others): a unit dies with all
of them, so that a layer decides by how many of them it holds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bayeszip.schedules import ramp
from bayeszip.settings import at_least, between, check, setting
from bayeszip.variational.distributions import LOG_SIGNAL_BOUND, kl_log_uniform, kl_log_uniform_slope
from bayeszip.variational.kernels import add_ratios, ratio_slopes
from bayeszip.variational.layers import (
    Live,
    VariationalLayer,
    VariationalWeight,
    is_kept,
    variational_weights,
)
from bayeszip.variational.passes import add_to_gradients
from bayeszip.variational.terms import Term

__all__ = ["GroupPrior", "GroupSettings", "scale_divergence"]

#: For each tensor, by name, and each of its dimensions, the unit that each coordinate belongs to; −1: none.
Units = Mapping[str, Sequence[np.ndarray]]

#: The sides of a unit.
MADE, READ = 0, 1


@dataclass(frozen=True)
class GroupSettings:
    """What a phase says of the prior on units."""

    tau: float = setting(0.0, "weight of the divergence of the scales of units and channels", at_least(0))
    ramp: float = setting(0.0, "share of the phase over which it rises linearly from 0", between(0, 1))

    def __post_init__(self) -> None:
        check(self, "groups")


def scale_divergence(signals: Tensor, present: Tensor, strengths: Tensor | None = None) -> Tensor:
    """Σ_u s_u KL(N(1, α_u) ‖ 1/|z|).

    Args:
        signals: units × sides, Σ θᵢ²/σᵢ² = 1/α of each side.
        present: units × sides, whether the unit has that side at all; one that it lacks adds no noise.
        strengths: s of each unit; None: all 1.
    """
    alpha, _ = _alphas(signals, present)
    return _times(strengths, kl_log_uniform(_log_product(alpha))).sum()


def _times(strengths: Tensor | None, of_units: Tensor) -> Tensor:
    return of_units if strengths is None else strengths * of_units


def _alphas(signals: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """α of each side, and that of the other."""
    bound = math.exp(LOG_SIGNAL_BOUND)
    alpha = torch.where(present, 1 / signals.clamp(1 / bound, bound), 0.0)
    return alpha, alpha.flip(1)


def _log_product(alpha: Tensor) -> Tensor:
    return torch.log(alpha[:, MADE] + alpha[:, READ] + alpha[:, MADE] * alpha[:, READ])


def _with_slopes(signals: Tensor, plan: "_Plan") -> tuple[Tensor, Tensor]:
    """`scale_divergence`, and its derivative in the signal of each side."""
    alpha, other = _alphas(signals, plan.present)
    log_alpha = _log_product(alpha)
    share = alpha * (1 + other) / log_alpha.exp().unsqueeze(1)
    slope = _times(plan.strengths, kl_log_uniform_slope(log_alpha)).unsqueeze(1)
    return _times(plan.strengths, kl_log_uniform(log_alpha)).sum(), -slope * share * alpha


class _Slice(NamedTuple):
    """One dimension of one tensor, and the side that each of its coordinates is on (the last number: none)."""

    weight: int
    dim: int
    sides: Tensor


class _Plan(NamedTuple):
    """Which sums make which signals, for weights of these shapes on this device."""

    key: object
    slices: tuple[_Slice, ...]
    #: Sides × the most sums that one has: places among the sums of all slices; one behind the last: none.
    members: Tensor
    #: Units × sides.
    present: Tensor
    #: Of units; None: all 1.
    strengths: Tensor | None


class GroupPrior(Term):
    """τ Σ KL of the scales of units: each with the weights that make it and those that read it.

    Args:
        network: with Gaussian weights.
        units: which coordinates belong together. None: nobody knows; then each row and each column of a layer is by
            itself.
    """

    name = "groups"
    Settings = GroupSettings
    steered = True

    def __init__(self, network: nn.Module, units: Units | None = None) -> None:
        super().__init__()
        #: In a dictionary, so that they don't become modules of this one.
        self._layer_of = _layers(network)
        weights = tuple(variational_weights(network))
        known = _separate(weights) if units is None else units
        #: For each tensor and dimension, the side of each coordinate; −1: none.
        self._sides, self._n_units = _sides({w.name: known[w.name][:2] for w in weights if w.name in known})
        for weight in weights:
            if len(self._sides.get(weight.name, ())) > 1 and self._layer_of[id(weight.theta)].makes_columns:
                rows, columns = self._sides[weight.name]
                self._sides[weight.name] = [_other(rows), _other(columns)]
        self._strengths = _strengths(weights, self._sides, self._n_units)
        self._plan: _Plan | None = None

    @classmethod
    def start(cls, network: nn.Module, start: Units | None) -> "GroupPrior":
        return cls(network, start)

    @classmethod
    def counts(cls, settings: GroupSettings) -> bool:
        return settings.tau > 0

    def dials(self, settings: GroupSettings, done: float) -> tuple[float, ...]:
        return (settings.tau * ramp(done, settings.ramp),)

    def keeps(self, weight: VariationalWeight) -> Tensor:
        """Units die weight by weight, by the dropout rate, with a divergence beside it or without."""
        return is_kept(weight)

    def cost(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        return (tau * self.divergence(weights).float(),)

    def divergence(self, weights: Sequence[VariationalWeight]) -> Tensor:
        """Σ KL over all units, in float64 where the weights are, with gradients by autograd."""
        plan = self._planned(weights)
        bounded = [_wide(weight.log_sigma2).clamp(-LOG_SIGNAL_BOUND, LOG_SIGNAL_BOUND) for weight in weights]
        ratios = [_wide(w.theta).square() * torch.exp(-own) for w, own in zip(weights, bounded, strict=True)]
        return scale_divergence(_signals(ratios, plan), plan.present, plan.strengths)

    @torch.no_grad()
    def add_gradients(self, weights: Sequence[VariationalWeight], tau: float | Tensor) -> tuple[Tensor, ...]:
        plan = self._planned(weights)
        on_cpu = weights[0].theta.device.type == "cpu" and all(w.theta.dtype != torch.float64 for w in weights)
        value, slopes = (_slopes_on_cpu if on_cpu else _slopes)(weights, plan, tau)
        parameters = [*(weight.theta for weight in weights), *(weight.log_sigma2 for weight in weights)]
        add_to_gradients(parameters, [slope.to(p.dtype) for slope, p in zip(slopes, parameters, strict=True)])
        return (tau * value.float(),)

    def _planned(self, weights: Sequence[VariationalWeight]) -> _Plan:
        """The plan for weights as they are; a new one when compaction has taken some."""
        key = (weights[0].theta.device, tuple(weight.theta.shape for weight in weights))
        if self._plan is None or self._plan.key != key:
            self._plan = self._made_plan(weights, key)
        return self._plan

    def _made_plan(self, weights: Sequence[VariationalWeight], key: object) -> _Plan:
        device, nowhere = weights[0].theta.device, 2 * self._n_units
        slices, sides = [], [np.zeros(0, dtype=np.int64)]
        for place, weight in enumerate(weights):
            live = getattr(self._layer_of[id(weight.theta)], "live", None)
            for dim, own in enumerate(self._sides.get(weight.name, ())):
                left = _left(own, dim, live)
                if (left >= 0).any():
                    slices.append(_Slice(place, dim, torch.from_numpy(np.where(left < 0, nowhere, left)).to(device)))
                    sides.append(left)
        present = np.zeros(nowhere + 1, dtype=bool)
        for dims in self._sides.values():
            for own in dims:
                present[own] = True  # what has none stands behind the last
        members = torch.from_numpy(_members(np.concatenate(sides), nowhere)).to(device)
        strengths = None if self._strengths is None else torch.from_numpy(self._strengths).to(device)
        return _Plan(key, tuple(slices), members, torch.from_numpy(present[:-1].reshape(-1, 2)).to(device), strengths)


def _layers(network: nn.Module) -> dict[int, VariationalLayer]:
    """The layer that holds a parameter, the first of several."""
    held: dict[int, VariationalLayer] = {}
    for layer in network.modules():
        if isinstance(layer, VariationalLayer):
            for parameter in layer.parameters(recurse=False):
                held.setdefault(id(parameter), layer)
    return held


def _separate(weights: Sequence[VariationalWeight]) -> dict[str, list[np.ndarray]]:
    """A unit for each row and each column of each weight; biases belong to none."""
    units, count = {}, 0
    for weight in weights:
        if weight.theta.dim() > 1:
            rows, columns = weight.theta.shape[:2]
            units[weight.name] = [count + np.arange(rows), count + rows + np.arange(columns)]
            count += rows + columns
    return units


def _sides(units: Units) -> tuple[dict[str, list[np.ndarray]], int]:
    """The sides that rows and columns are on, 2 × unit and one more for readers, and how many units there are.

    Rows make units and columns read them; units are counted anew from 0.
    """
    numbers = np.unique(np.concatenate([[-1], *(own for dims in units.values() for own in dims)]))

    def side_of(own: np.ndarray, side: int) -> np.ndarray:
        return np.where(own < 0, -1, 2 * (np.searchsorted(numbers, own) - 1) + side)

    sides = {name: [side_of(own, side) for side, own in enumerate(dims)] for name, dims in units.items()}
    return sides, len(numbers) - 1


def _strengths(
    weights: Sequence[VariationalWeight], sides: Mapping[str, Sequence[np.ndarray]], count: int
) -> np.ndarray | None:
    """For each of `count` units the mean strength of the weights that make or read it; None: all are 1."""
    if all(weight.strength == 1 for weight in weights):
        return None
    total, numbers = np.zeros(count), np.zeros(count)
    for weight in weights:
        for dim, own in enumerate(sides.get(weight.name, ())):
            units, held = own[own >= 0] // 2, weight.theta.numel() / weight.theta.shape[dim]
            np.add.at(total, units, weight.strength * held)
            np.add.at(numbers, units, held)
    return (total / numbers).astype(np.float32)


def _other(sides: np.ndarray) -> np.ndarray:
    """The other side of each unit."""
    return np.where(sides < 0, sides, sides ^ 1)


def _left(sides: np.ndarray, dim: int, live: Live | None) -> np.ndarray:
    """Of one dimension, what compaction has left."""
    return sides if live is None else sides[(live.rows if dim == 0 else live.columns).cpu().numpy()]


def _members(sides: np.ndarray, count: int) -> np.ndarray:
    """For each of `count` sides the places at which `sides` has it; shorter rows are filled up with the end."""
    places = np.argsort(sides, kind="stable")
    places = places[sides[places] >= 0]
    numbers = np.bincount(sides[places], minlength=count)
    table = np.full((count, numbers.max(initial=1)), len(sides), dtype=np.int64)
    firsts = np.cumsum(numbers) - numbers
    table[sides[places], np.arange(len(places)) - np.repeat(firsts, numbers)] = places
    return table


def _signals(ratios: Sequence[Tensor], plan: _Plan) -> Tensor:
    """Units × sides: Σ θᵢ²/σᵢ² over the weights of each."""
    flat = [ratio.flatten(2).sum(2) if ratio.dim() > 2 else ratio for ratio in ratios]
    return _gathered([flat[at] if flat[at].dim() == 1 else flat[at].sum(1 - dim) for at, dim, _ in plan.slices], plan)


def _gathered(sums: Sequence[Tensor], plan: _Plan) -> Tensor:
    """The sums of slices, added up for each side. By a table, not by adding at places: always in one order."""
    nothing = torch.zeros(1, dtype=sums[0].dtype if sums else torch.float32, device=plan.members.device)
    return torch.cat([*sums, nothing])[plan.members].sum(1).view(-1 if len(plan.members) else 0, 2)


def _slopes(weights: Sequence[VariationalWeight], plan: _Plan, tau: float | Tensor) -> tuple[Tensor, list[Tensor]]:
    """The divergence, and τ × its gradients in each θ and then each log σ²."""
    thetas = [_wide(weight.theta) for weight in weights]
    # d(θ²/σ²)/dθ = 2θ/σ², and d(θ²/σ²)/d log σ² = −θ²/σ².
    by_theta = torch._foreach_neg([_wide(weight.log_sigma2) for weight in weights])
    torch._foreach_clamp_max_(by_theta, LOG_SIGNAL_BOUND)
    torch._foreach_clamp_min_(by_theta, -LOG_SIGNAL_BOUND)
    torch._foreach_exp_(by_theta)
    torch._foreach_mul_(by_theta, thetas)
    value, by_signal = _with_slopes(_signals(torch._foreach_mul(by_theta, thetas), plan), plan)
    torch._foreach_mul_(by_theta, _spread(by_signal * (2 * tau), weights, plan))
    by_log_sigma2 = torch._foreach_mul(by_theta, thetas)
    torch._foreach_mul_(by_log_sigma2, -0.5)
    return value, [*by_theta, *by_log_sigma2]


def _spread(by_side: Tensor, weights: Sequence[VariationalWeight], plan: _Plan) -> list[Tensor]:
    """For each weight the sum of what its sides have, in a shape that broadcasts to its tensor's."""
    known = torch.cat([by_side.flatten(), by_side.new_zeros(1)])
    factors: list[Tensor | None] = [None] * len(weights)
    for place, dim, sides in plan.slices:
        shape = [1] * weights[place].theta.dim()
        shape[dim] = -1
        own, before = known[sides].view(shape), factors[place]
        factors[place] = own if before is None else before + own
    return [known[-1] if factor is None else factor for factor in factors]


def _slopes_on_cpu(
    weights: Sequence[VariationalWeight], plan: _Plan, tau: float | Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The same in two passes over each tensor, which is seen as a matrix: kernels are columns side by side."""
    matrices = [(_matrix(weight.theta), _matrix(weight.log_sigma2)) for weight in weights]
    sums = [(torch.zeros(theta.shape[0]), torch.zeros(theta.shape[1])) for theta, _ in matrices]
    for (theta, log_sigma2), (rows, columns) in zip(matrices, sums, strict=True):
        add_ratios(theta.numpy(), log_sigma2.numpy(), rows.numpy(), columns.numpy())
    folded = [sums[at][0] if dim == 0 else sums[at][1].view(len(sides), -1).sum(1) for at, dim, sides in plan.slices]
    value, by_signal = _with_slopes(_gathered(folded, plan), plan)
    known = torch.cat([(by_signal * tau).flatten(), by_signal.new_zeros(1)])
    factors = [(torch.zeros_like(rows), torch.zeros_like(columns)) for rows, columns in sums]
    for at, dim, sides in plan.slices:
        factors[at][dim].view(len(sides), -1).copy_(known[sides].unsqueeze(1))
    slopes = [torch.empty(weight.theta.shape) for weight in (*weights, *weights)]
    for i, ((theta, log_sigma2), (by_row, by_column)) in enumerate(zip(matrices, factors, strict=True)):
        outputs = (slopes[i].view(theta.shape).numpy(), slopes[len(weights) + i].view(theta.shape).numpy())
        ratio_slopes(theta.numpy(), log_sigma2.numpy(), by_row.numpy(), by_column.numpy(), *outputs)
    return value, slopes


def _matrix(tensor: Tensor) -> Tensor:
    """Rows × the rest, in float32; a vector is a column."""
    return tensor.detach().float().reshape(len(tensor), -1)


def _wide(tensor: Tensor) -> Tensor:
    """In float32, or what is wider."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
