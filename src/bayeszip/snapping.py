"""Symbols by what the moves of a layer's weights do together on data: `by_curvature` with a rate, `together` without.

`quantize.by_rate` takes each weight by itself: a move from θ to v costs (θ − v)² / 2σ². But the moves of a row meet in
one sum, where they add up or make good for each other. So here the moves Δ of all weights cost

    1/(1 + κ) · { ½ Σᵢ Δᵢ²/σᵢ²  +  κc · ½ Σ_r g_r · Δ_r·M·Δ_rᵀ },

the second sum over the rows of all layers, with M = E[x·xᵀ] of what the layer is given and g_r the mean square of the
derivatives by its outputs (`packing.curvature`). c makes both alike for the move of a single weight, in the mean over
those that are not zero. Each weight in turn, the others staying where they are, is at a squared distance from some
value; these are the aims by which the coder chooses.

Where bits weigh nothing, all that a row computes is to move as little as possible: Δ_r·M·Δ_rᵀ, M being the covariance
of x in front of a batch norm whose statistics are taken anew, which takes a shift away. Weights take the nearest value
one after the other, and the error of each is pushed onto those that follow (as in GPTQ, Frantar et al. 2023, with M
restricted to the weights of the row that are not zero); then each is chosen again, the others staying, until none
moves.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bayeszip import codec, graph
from bayeszip.errors import BayeszipError
from bayeszip.fitting.batches import Loader, on_device
from bayeszip.fitting.statistics import renewed_norms, undisturbed
from bayeszip.packing.curvature import Block, Curvature, curvatures
from bayeszip.posterior import Posterior
from bayeszip.quantize import Quantization, with_values
from bayeszip.result import write_weights
from bayeszip.tensors import Aim, CompressedModel, QuantizedTensor

__all__ = [
    "MoveCost",
    "by_curvature",
    "curvatures_if_any",
    "moments_if_any",
    "seen_curvatures",
    "seen_moments",
    "together",
]

#: Training examples that are looked at: more than `pack` does, since here they are at hand.
EXAMPLES = 8192
#: Of the weights of a row every so manyth is chosen at once; these don't hear of each other.
PARTS = 8
#: How often each weight is chosen; and how often, in between, values move to the weights that have them.
TURNS, STEPS = 3, 4
#: What it takes to move a weight that is to stay, in nats for a squared distance of 1.
HELD = 1e30

#: Without a rate: training examples whose inputs are looked at; what is added to the diagonal of M, as a share of its
#: mean; weights of a row that are chosen together, at most; and how often each is chosen again.
EXAMPLES_OF_MOMENTS, DAMPING, TOGETHER, SWEEPS = 1024, 0.01, 256, 4
#: Share of E[x²] that may be nothing but rounding in a sum of float32.
ROUNDING = 1e-4
#: Weights that are not zero, and values, up to which choosing takes a minute at most.
MOST_WEIGHTS, MOST_VALUES = 2**19, 64

Tensors = Mapping[str, QuantizedTensor]
Arrays = dict[str, np.ndarray]


def seen_curvatures(network: nn.Module, quantized: Tensors, loader: Loader) -> dict[str, Curvature]:
    """What a part of the training data shows of a network with these weights, the same whenever it is asked."""
    own = graph.copied(network).cpu()
    write_weights(own, quantized)
    with undisturbed(loader) as batches:
        return curvatures(own, _Pairs(batches), EXAMPLES)


def seen_moments(network: nn.Module, loader: Loader) -> dict[str, Curvature]:
    """What the layers of a network meet on a part of the training data, the same whenever it is asked.

    Means of norms that keep their statistics are none of it: these take no shift away.
    """
    own = graph.copied(network).cpu()
    renewed = {id(norm.running_mean) for norm in renewed_norms(own)}
    means = {name for name, buffer in own.named_buffers() if id(buffer) in renewed}
    with undisturbed(loader) as batches:
        seen = curvatures(own, _Pairs(batches), EXAMPLES_OF_MOMENTS, derivatives=False)
    return {name: each if each.mean in means else replace(each, mean=None) for name, each in seen.items()}


def curvatures_if_any(
    network: nn.Module, quantized: Tensors, loader: Loader, warn: Callable[[str], None]
) -> dict[str, Curvature] | None:
    """`seen_curvatures`; None, and a word to `warn`, where a network can't be looked at: no training is lost for it."""
    return _if_any(partial(seen_curvatures, network, quantized, loader), warn)


def moments_if_any(network: nn.Module, loader: Loader, warn: Callable[[str], None]) -> dict[str, Curvature] | None:
    """`seen_moments`; None, and a word to `warn`, likewise."""
    return _if_any(partial(seen_moments, network, loader), warn)


def _if_any(look: Callable[[], dict[str, Curvature]], warn: Callable[[str], None]) -> dict[str, Curvature] | None:
    try:
        return look()
    except BayeszipError as error:
        warn(f"each weight takes a shared value by itself, since what the layers meet can't be looked at: {error}")
        return None


class _Pairs:
    """Batches as inputs and targets on the CPU, as often as they are gone through."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch.inputs, batch.targets) for batch in on_device(self._loader, torch.device("cpu")))


def by_curvature(
    quantized: Tensors, posterior: Posterior, seen: Mapping[str, Curvature], how: Quantization
) -> dict[str, QuantizedTensor]:
    """Symbols and values that make moves + `how.rate` · ln 2 · bits small; zeros stay zeros. The sum never grows.

    Args:
        quantized: to begin with; one codebook for all.
        seen: the curvatures of layers, by the names of their weights.
    """
    parts = {name: _parts(tensor.symbols != 0) for name, tensor in quantized.items()}
    alive = {name: own >= 0 for name, own in parts.items()}
    cost = MoveCost(posterior, seen, how.curvature, alive)

    def total(tensors: Tensors) -> float:
        return cost.of(tensors) + how.rate * math.log(2) * codec.prices(CompressedModel(tensors)).bits

    def cheapest(tensors: Tensors, aims: Mapping[str, Aim], passes: int) -> dict[str, QuantizedTensor]:
        found = codec.cheapest(CompressedModel(tensors), aims, how.rate, passes=passes).tensors
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, QuantizedTensor)}

    # At first as if each weight were alone: many that change together get a value's members over to another.
    chosen = cheapest(quantized, cost.apart(alive), 4)
    least = total(chosen)
    for step in range(TURNS * (PARTS + 1)):
        part = step % (PARTS + 1)
        if part < PARTS:
            other = cheapest(chosen, cost.aims(chosen, {name: own == part for name, own in parts.items()}), 1)
        else:
            other = with_values(chosen, cost.best_values(chosen), how.codebook_bits)
        if (found := total(other)) < least:
            chosen, least = other, found
    return chosen if least < total(quantized) else dict(quantized)


def together(
    quantized: Tensors, posterior: Posterior, seen: Mapping[str, Curvature], codebook_bits: int
) -> dict[str, QuantizedTensor]:
    """Symbols and values by which the rows of layers, as far as they are seen, compute almost the same; zeros stay.

    Symbols are chosen and values fitted to them, in turns. Where that would take too long, all stays as it is.

    Args:
        quantized: to begin with; one codebook for all.
        seen: what layers meet, by the names of their weights.
        codebook_bits: that values are rounded to.
    """
    known = {name: each for name, each in seen.items() if name in quantized and quantized[name].nonzero}
    chosen = dict(quantized)
    if sum(quantized[name].nonzero for name in known) > MOST_WEIGHTS or len(_codebook_of(quantized)) > MOST_VALUES + 1:
        return chosen
    for _ in range(TURNS if known else 0):
        for name, curvature in known.items():
            chosen[name] = _chosen(chosen[name], posterior.weights[name].theta, curvature)
        chosen = with_values(chosen, _fitted(chosen, posterior, known), codebook_bits)
    return chosen


class _Group(NamedTuple):
    """Weights of one row that are chosen together: where they are, their means in units of the row's scale, and M."""

    row: int
    places: np.ndarray
    means: np.ndarray
    moments: np.ndarray


def _groups(tensor: QuantizedTensor, theta: np.ndarray, curvature: Curvature) -> Iterator[_Group]:
    """All weights that are not zero, a row after the other."""
    rows = len(theta)
    alive, means = (tensor.symbols != 0).reshape(rows, -1), theta.reshape(rows, -1).astype(np.float64)
    scales = np.broadcast_to(tensor.row_scales(), tensor.shape).reshape(rows, -1)[:, 0].astype(np.float64)
    for block in curvature.blocks:
        moments = _centered(block) if curvature.mean is not None else block.moments
        # What rounding has left of inputs that are always the same must not pass for something, least of all below 0.
        moments = moments + np.diag(ROUNDING * np.diagonal(block.moments)[: len(moments)])
        for row in range(rows)[block.rows]:
            places = np.flatnonzero(alive[row, block.columns])
            for part in np.array_split(places, -(-places.size // TOGETHER)) if places.size and scales[row] else ():
                there = part + block.columns.start
                yield _Group(row, there, means[row, there] / scales[row], moments[np.ix_(part, part)])


def _chosen(tensor: QuantizedTensor, theta: np.ndarray, curvature: Curvature) -> QuantizedTensor:
    """The tensor by the symbols that are best for its rows; none moves further than by those it has."""
    symbols, values = tensor.symbols.reshape(len(theta), -1).astype(np.int64), _Values(tensor.codebook)
    for group in _groups(tensor, theta, curvature):
        symbols[group.row, group.places] = _row(group, symbols[group.row, group.places], values)
    return replace(tensor, symbols=symbols.reshape(tensor.shape))


def _fitted(chosen: Tensors, posterior: Posterior, seen: Mapping[str, Curvature]) -> np.ndarray:
    """Values at which what rows compute moves least, each row by its own size, the symbols staying; zero stays zero.

    A weight of a tensor that is not seen counts as one that is does in the mean.
    """
    codebook = _codebook_of(chosen).astype(np.float64)
    bends, pulls, count = np.zeros((codebook.size, codebook.size)), np.zeros(codebook.size), 0
    for name, curvature in seen.items():
        theta = posterior.weights[name].theta
        symbols = chosen[name].symbols.reshape(len(theta), -1)
        for group in _groups(chosen[name], theta, curvature):
            of_value = np.eye(codebook.size)[symbols[group.row, group.places]]
            bent = group.moments @ of_value
            size = float(group.means @ group.moments @ group.means)
            share = 1 / size if size > 0 else 0.0
            bends += share * of_value.T @ bent
            pulls += share * bent.T @ group.means
            count += group.places.size
    usual = float(np.trace(bends)) / max(count, 1)
    for name in (name for name in chosen if name not in seen):
        scales = np.broadcast_to(chosen[name].row_scales(), chosen[name].shape)
        means = np.divide(posterior.weights[name].theta, scales, out=np.zeros(scales.shape), where=scales != 0)
        bends += usual * np.diag(np.bincount(chosen[name].symbols.ravel(), minlength=codebook.size))
        pulls += usual * np.bincount(chosen[name].symbols.ravel(), means.ravel(), codebook.size)
    # What nobody has stays, and nothing goes far for little.
    stay = DAMPING * np.diagonal(bends) + np.where(np.diagonal(bends) > 0, 0.0, 1.0)
    bends[0], bends[:, 0], pulls[0] = 0.0, 0.0, 0.0
    return np.linalg.solve(bends + np.diag(stay), pulls + stay * codebook)


def _codebook_of(tensors: Tensors) -> np.ndarray:
    return next(iter(tensors.values())).codebook


def _centered(block: Block) -> np.ndarray:
    """The covariance of what the columns meet, where their means are known."""
    if not block.constant:
        return block.moments
    shift = block.moments[-1, :-1]
    return block.moments[:-1, :-1] - np.outer(shift, shift)


class _Values:
    """Shared values but zero, in ascending order, and where they lie in the codebook."""

    def __init__(self, codebook: np.ndarray) -> None:
        self.symbols = 1 + np.argsort(codebook[1:], kind="stable")
        self.values = codebook[self.symbols].astype(np.float64)
        self.bounds = 0.5 * (self.values[1:] + self.values[:-1])
        self.place_of = np.zeros(codebook.size, np.int64)
        self.place_of[self.symbols] = np.arange(self.symbols.size)


def _row(group: _Group, begun: np.ndarray, values: _Values) -> np.ndarray:
    """Symbols of the weights, from the best of three beginnings: as they were, the nearest, and pushed."""
    order = np.argsort(-np.diagonal(group.moments), kind="stable")
    own = group.moments[np.ix_(order, order)]
    own[np.diag_indices_from(own)] += DAMPING * np.diagonal(own).mean() + np.finfo(np.float64).tiny
    aims = group.means[order]
    starts = [values.place_of[begun[order]], np.searchsorted(values.bounds, aims), _pushed(aims, own, values)]
    found = [_swept(aims, start, own, values) for start in starts]
    moves = [values.values[places] - aims for places in found]
    best = int(np.argmin([move @ own @ move for move in moves]))
    chosen = np.empty(order.size, np.int64)
    chosen[order] = values.symbols[found[best]]
    return chosen


def _pushed(aims: np.ndarray, own: np.ndarray, values: _Values) -> np.ndarray:
    """Places of the values nearest to weights that bear the errors of those before them: M⁻¹ = UᵀU, U upper."""
    try:
        upper = np.linalg.cholesky(np.linalg.inv(own)).T
    except np.linalg.LinAlgError:  # inputs that are all zero, or nearly, tell nothing
        return np.searchsorted(values.bounds, aims)
    left, found = aims.copy(), np.empty(aims.size, np.int64)
    for place in range(aims.size):
        found[place] = values.bounds.searchsorted(left[place])
        error = left[place] - values.values[found[place]]
        left[place + 1 :] -= error / upper[place, place] * upper[place, place + 1 :]
    return found


def _swept(aims: np.ndarray, begun: np.ndarray, own: np.ndarray, values: _Values) -> np.ndarray:
    """Each weight at the value that is best while the others stay, in turns, until none moves."""
    found = begun.copy()
    forces, stiffness = own @ (values.values[found] - aims), np.diagonal(own)
    for _ in range(SWEEPS):
        moved = False
        for place in range(aims.size):
            here = values.values[found[place]]
            other = int(values.bounds.searchsorted(here - forces[place] / stiffness[place]))
            if other != found[place]:
                forces += (values.values[other] - here) * own[place]
                found[place], moved = other, True
        if not moved:
            break
    return found


def _parts(alive: np.ndarray) -> np.ndarray:
    """For each weight the part that it is chosen in, in turns along its row; −1: none."""
    rows = alive.reshape(len(alive), -1)
    return np.where(rows, (np.cumsum(rows, axis=1) - 1) % PARTS, -1).reshape(alive.shape)


class MoveCost:
    """What moves of weights away from their means cost, in nats.

    Args:
        seen: the curvatures of layers, by the names of their weights.
        share: κ.
        alive: the weights over which c is taken in the mean.
    """

    def __init__(
        self,
        posterior: Posterior,
        seen: Mapping[str, Curvature],
        share: float,
        alive: Mapping[str, np.ndarray],
    ) -> None:
        held = posterior.weights
        self._theta = {name: each.theta.astype(np.float64) for name, each in held.items()}
        own = {name: np.exp(-each.log_sigma2.astype(np.float64)) for name, each in held.items()}
        self._curved = {name: each for name, each in seen.items() if name in held}
        bends = self._diagonal()
        ratios = np.concatenate([(bends[name] / own[name])[alive[name]] for name in own])
        ratio = float(ratios.mean()) if ratios.any() else 1.0
        self._weight = share / (1 + share) / ratio
        self._own = {name: each / (1 + share) for name, each in own.items()}
        self._stiffness = {name: each + self._weight * bends[name] for name, each in self._own.items()}

    def of(self, quantized: Tensors) -> float:
        """That the weights are these."""
        moves = self._moves(quantized)
        return 0.5 * _dot(moves, self._forces(moves))

    def apart(self, free: Mapping[str, np.ndarray]) -> dict[str, Aim]:
        """Aims of weights that are `free` as if each were the only one to move; the others stay zero."""
        return {
            name: Aim(np.where(free[name], theta, 0.0), np.where(free[name], self._stiffness[name], HELD))
            for name, theta in self._theta.items()
        }

    def aims(self, quantized: Tensors, free: Mapping[str, np.ndarray]) -> dict[str, Aim]:
        """Where each weight that is `free` costs least if all others stay; the others are held."""
        forces, aims = self._forces(self._moves(quantized)), {}
        for name, tensor in quantized.items():
            here, stiffness = tensor.dequantize().astype(np.float64), self._stiffness[name]
            means = np.where(free[name], here - forces[name] / stiffness, here)
            aims[name] = Aim(means, np.where(free[name], stiffness, HELD))
        return aims

    def best_values(self, quantized: Tensors) -> np.ndarray:
        """Shared values at which moves cost less: some steps of steepest descent, each as long as is best."""
        moves = self._moves(quantized)
        codebook = next(iter(quantized.values())).codebook.astype(np.float64)
        for _ in range(STEPS):
            forces = self._forces(moves)
            slope, stiffness = np.zeros((2, codebook.size))
            for name, tensor in quantized.items():
                scales, flat = np.broadcast_to(tensor.row_scales(), tensor.shape).ravel(), tensor.symbols.ravel()
                slope += np.bincount(flat, scales * forces[name].ravel(), codebook.size)
                stiffness += np.bincount(flat, scales**2 * self._stiffness[name].ravel(), codebook.size)
            step = np.divide(-slope, stiffness, out=np.zeros_like(slope), where=stiffness > 0)
            step[0] = 0.0
            along = {name: step[tensor.symbols] * tensor.row_scales() for name, tensor in quantized.items()}
            bent = _dot(along, self._forces(along))
            if bent <= 0:
                break
            length = -_dot(along, forces) / bent
            codebook += length * step
            moves = {name: moves[name] + length * along[name] for name in moves}
        return codebook

    def _moves(self, quantized: Tensors) -> Arrays:
        return {name: tensor.dequantize() - self._theta[name] for name, tensor in quantized.items()}

    def _forces(self, moves: Arrays) -> Arrays:
        """What the cost of moves grows by, weight by weight."""
        forces = {name: self._own[name] * move for name, move in moves.items()}
        for name, curvature, block in self._blocks():
            rows, matrix = block.rows, moves[name].reshape(len(moves[name]), -1)
            bias, joined = curvature.bias, matrix[rows, block.columns]
            if block.constant:
                shift = moves[bias][rows] if bias in moves else np.zeros(len(joined))
                joined = np.column_stack([joined, shift])
            pulled = self._weight * curvature.outputs[rows, None] * (joined @ block.moments)
            width = block.columns.stop - block.columns.start
            forces[name].reshape(matrix.shape)[rows, block.columns] += pulled[:, :width]
            if block.constant and bias in forces:
                forces[bias][rows] += pulled[:, width]
        return forces

    def _diagonal(self) -> Arrays:
        """g · M, of single weights."""
        bends = {name: np.zeros_like(theta) for name, theta in self._theta.items()}
        for name, curvature, block in self._blocks():
            width = block.columns.stop - block.columns.start
            found = np.outer(curvature.outputs[block.rows], np.diagonal(block.moments))
            bends[name].reshape(len(bends[name]), -1)[block.rows, block.columns] += found[:, :width]
            if block.constant and curvature.bias in bends:
                bends[curvature.bias][block.rows] += found[:, width]
        return bends

    def _blocks(self) -> Iterator[tuple[str, Curvature, Block]]:
        return ((name, curvature, block) for name, curvature in self._curved.items() for block in curvature.blocks)


def _dot(one: Arrays, other: Arrays) -> float:
    return sum(float(np.vdot(one[name], other[name])) for name in one)
