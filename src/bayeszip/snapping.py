"""Symbols by rate, and by what the moves of a layer's weights do together: `by_curvature`, `seen_curvatures`.

`quantize.by_rate` takes each weight by itself: a move from θ to v costs (θ − v)² / 2σ². But the moves of a row meet in
one sum, where they add up or make good for each other. So here the moves Δ of all weights cost

    1/(1 + κ) · { ½ Σᵢ Δᵢ²/σᵢ²  +  κc · ½ Σ_r g_r · Δ_r·M·Δ_rᵀ },

the second sum over the rows of all layers, with M = E[x·xᵀ] of what the layer is given and g_r the mean square of the
derivatives by its outputs (`packing.curvature`). c makes both alike for the move of a single weight, in the mean over
those that are not zero. Each weight in turn, the others staying where they are, is at a squared distance from some
value; these are the aims by which the coder chooses.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bayeszip import codec
from bayeszip.fitting.batches import Loader, on_device
from bayeszip.fitting.statistics import undisturbed
from bayeszip.packing.curvature import Block, Curvature, curvatures
from bayeszip.posterior import Posterior
from bayeszip.quantize import Quantization, with_values
from bayeszip.result import write_weights
from bayeszip.tensors import Aim, CompressedModel, QuantizedTensor

__all__ = ["MoveCost", "by_curvature", "seen_curvatures"]

#: Training examples that are looked at: more than `pack` does, since here they are at hand.
EXAMPLES = 8192
#: Of the weights of a row every so manyth is chosen at once; these don't hear of each other.
PARTS = 8
#: How often each weight is chosen; and how often, in between, values move to the weights that have them.
TURNS, STEPS = 3, 4
#: What it takes to move a weight that is to stay, in nats for a squared distance of 1.
HELD = 1e30

Tensors = Mapping[str, QuantizedTensor]
Arrays = dict[str, np.ndarray]


def seen_curvatures(network: nn.Module, quantized: Tensors, loader: Loader) -> dict[str, Curvature]:
    """What a part of the training data shows of a network with these weights, the same whenever it is asked."""
    copied = copy.deepcopy(network).cpu()
    write_weights(copied, quantized)
    with undisturbed(loader) as batches:
        return curvatures(copied, _Pairs(batches), EXAMPLES)


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
