"""Weights chosen by what they do to inputs: column by column, the error of each made good by those behind it.

As in GPTQ (Frantar et al. 2023), with bits counted in the choice as in CERWU (Conzelmann and Bamler 2025): for a row w,
H = E[x·xᵀ] and H⁻¹ = UᵀU, a weight takes the value v that minimizes

    g · ((w_j − v) / U_jj)² + λ · bits(v),

and then w_k moves by −(w_j − v) · U_jk / U_jj for all k > j, which is best for those still free. λ is one number for
the whole network; a tensor's step follows from it. Where the coder knows of values that depend on each other, a row is
chosen by the path of least cost (`survivors`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bayeszip.codec.compilation import prepare
from bayeszip.codec.matrix import view_of
from bayeszip.codec.paths import bits_of_indices
from bayeszip.codec.trellis import STATES, states_along
from bayeszip.codec.ways import LEAST_CELLS
from bayeszip.packing.contents import Contents
from bayeszip.packing.curvature import Block, Curvature
from bayeszip.packing.knobs import Trial
from bayeszip.packing.steps import SHORTER, own_steps, round_bias
from bayeszip.packing.survivors import Survivors, walk_row
from bayeszip.quantize import bits_of_multiples, cheapest_multiples, on_multiples
from bayeszip.tensors import QuantizedTensor

__all__ = ["Pushing"]

#: What is added to the diagonal of H, as a share of itself and of its mean: few inputs don't show all.
DAMPING, LEAST_DAMPING = 0.01, 3e-4
#: What of a sum of squares may be nothing but rounding.
ROUNDING = 1e-6
#: Rows matter as their derivatives say, but none less than this share of the mean.
LEAST_ROW = 0.1
#: Columns chosen before the others hear of their errors.
TOGETHER = 64
#: A step may be so much finer or coarser than is best for fine steps; what is tried of it.
TUNING = (0.8, 1.25)
#: Rounds of choosing symbols, each by the shares of those before.
ROUNDS = 2
#: A bias has a step as its curvature says, and a part of it: there are few.
_OF_A_BIAS = 0.5
_MOST_MULTIPLES = 2**14
_LEAST_STEP = 1e-30


@dataclass(frozen=True)
class _Part:
    """A block of a layer's matrix: U, and the conditional curvature 1 / U_jj² of each column.

    With a column more, if `constant`, for what takes a shift: the bias, or the mean of the norm behind the layer.
    """

    rows: slice
    columns: slice
    constant: bool
    moments: np.ndarray
    upper: np.ndarray

    @property
    def diagonal(self) -> np.ndarray:
        return 1 / np.square(np.diagonal(self.upper)[: self.columns.stop - self.columns.start])


class _Layer:
    """A weight, with its bias or the mean of the norm behind it as one column more.

    Its values depend on each other if that is asked for, and the coder sees the same rows.

    Args:
        bias: what there is to take a shift; None: nothing, and weights make up for it among themselves.
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, curvature: Curvature, dependent: bool) -> None:
        self.shape, self.view = weight.shape, view_of(weight.shape)
        self.dependent = dependent and weight.size >= LEAST_CELLS and self.view.rows == len(weight)
        self.matrix = weight.reshape(len(weight), -1).astype(np.float64)
        self.bias = np.zeros(len(weight)) if bias is None else bias.astype(np.float64)
        self.outputs = np.maximum(curvature.outputs, LEAST_ROW * curvature.outputs.mean())
        self.parts = [_part(block, takes_shift=bias is not None) for block in curvature.blocks]
        self.size = self._size(curvature.blocks) or 1.0
        self.tuned = 1.0

    def _size(self, blocks: Sequence[Block]) -> float:
        """The mean square of what the layer computes, less its mean, by how much it matters.

        With its mean where nothing but rounding is left: the layer computes the same for all inputs.
        """
        whole = centered = 0.0
        for block in blocks:
            width = block.columns.stop - block.columns.start
            weights, moments = self.matrix[block.rows, block.columns], block.moments[:width, :width]
            whole += _weighted(weights, moments, self.outputs[block.rows])
            if block.constant:
                moments = moments - np.outer(block.moments[width, :width], block.moments[width, :width])
            centered += _weighted(weights, moments, self.outputs[block.rows])
        return centered if centered > ROUNDING * whole else whole

    def error(self, chosen: np.ndarray, bias: np.ndarray) -> float:
        """What the moves of its weights come to, in the same measure."""
        total = 0.0
        for part in self.parts:
            moves = chosen[part.rows, part.columns] - self.matrix[part.rows, part.columns]
            if part.constant:
                moves = np.column_stack([moves, bias[part.rows] - self.bias[part.rows]])
            total += _weighted(moves, part.moments[: moves.shape[1], : moves.shape[1]], self.outputs[part.rows])
        return total

    def step(self, worth: float) -> float:
        """The best step where steps are fine: g · step² / 12 costs as much as the bits it saves, on average."""
        curvature = np.concatenate([
            np.outer(self.outputs[part.rows], part.diagonal).ravel() for part in self.parts
        ])  # fmt: skip
        return math.sqrt(6 * worth / (math.log(2) * float(curvature.mean())))

    def best(self, worth: float) -> "_Chosen":
        """The choice with the least cost, by steps near the one that was best before."""
        best = self._choose(self.tuned, worth)
        for change in TUNING:
            while (other := self._choose(self.tuned * change, worth)).cost < best.cost:
                best, self.tuned = other, self.tuned * change
        return self._settled(best, worth)

    def _choose(self, tuned: float, worth: float) -> "_Chosen":
        step = tuned * self.step(worth) * (SHORTER if self.dependent else 1)
        step = max(step, float(np.abs(self.matrix).max(initial=0.0)) / _MOST_MULTIPLES, _LEAST_STEP)
        return (self._choose_path if self.dependent else self._choose_alone)(float(np.float32(step)), worth)

    def _choose_alone(self, step: float, worth: float) -> "_Chosen":
        multiples = np.rint(self.matrix / step)
        for _ in range(ROUNDS):
            limits = _range(multiples)
            bits = bits_of_multiples(multiples.astype(np.int64), *limits)
            multiples, bias = self._pushed(step, worth, bits, limits)
        error = self.error(multiples * step, bias)
        shares = bits_of_multiples(multiples.astype(np.int64), *limits)
        paid = float(shares[multiples.astype(np.int64)].sum())
        return _Chosen(step, multiples, bias, error, error + worth * paid)

    def _pushed(
        self, step: float, worth: float, bits: np.ndarray, limits: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        multiples, bias = np.zeros_like(self.matrix), self.bias.copy()
        for part in self.parts:
            weights = self.matrix[part.rows, part.columns] / step
            if part.constant:
                weights = np.column_stack([weights, self.bias[part.rows] / step])
            width = part.columns.stop - part.columns.start
            price = worth / (self.outputs[part.rows] * step**2)
            chosen = _walk(weights, part.upper, width, price, bits, limits)
            multiples[part.rows, part.columns] = chosen
            if part.constant:
                bias[part.rows] = weights[:, width] * step
        return multiples, bias

    def _choose_path(self, step: float, worth: float) -> "_Chosen":
        numbers, live = np.rint(self.matrix / step).astype(np.int64), np.asarray(self.matrix.any(axis=0))
        bits = _bits_along(numbers, None)
        for _ in range(ROUNDS):
            numbers, states, bias = self._path(step, worth, bits, live)
            bits = _bits_along(numbers[:, live], states[:, live])
            live &= numbers.any(axis=0)
        error = self.error(numbers * step, bias)
        odd = states % 2
        indices = np.sign(numbers) * ((np.abs(numbers) + odd) // 2)
        paid = float(bits[odd, indices + bits.shape[1] // 2][:, live].sum())
        return _Chosen(step, numbers, bias, error, error + worth * paid, bits)

    def _settled(self, chosen: "_Chosen", worth: float) -> "_Chosen":
        """The choice, along a path that the coder takes: columns that come out empty are no part of it."""
        while chosen.bits is not None and states_along(chosen.multiples.ravel(), self.view) is None:
            # Without those that are nearly empty, too: they would be next.
            live = (chosen.multiples != 0).sum(axis=0) > 1
            numbers, _, bias = self._path(chosen.step, worth, chosen.bits, live)
            chosen = replace(chosen, multiples=numbers, bias=bias, error=self.error(numbers * chosen.step, bias))
        return chosen

    def _path(
        self, step: float, worth: float, bits: np.ndarray, live: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Multiples, the states in which they are chosen, and the bias."""
        numbers, states = np.zeros((2, *self.matrix.shape), dtype=np.int64)
        bias, room, state, flags = self.bias.copy(), Survivors.fresh(), 0, live.astype(np.uint8)
        prepare(STATES * numbers.size)
        for row, outputs in enumerate(self.outputs):
            begin = state
            for part in self.parts:
                if not part.rows.start <= row < part.rows.stop:
                    continue
                weights = self.matrix[row, part.columns] / step
                if part.constant:
                    weights = np.append(weights, self.bias[row] / step)
                state = walk_row(weights, part.upper.reshape(-1), flags[part.columns], worth / (outputs * step**2),
                                 bits.reshape(-1), state, numbers[row, part.columns], states[row, part.columns],
                                 room)  # fmt: skip
                if part.constant:
                    bias[row] = weights[-1] * step
            if not numbers[row].any():
                state = begin  # no part of the path
        return numbers, states, bias


def _part(block: Block, *, takes_shift: bool) -> _Part:
    """A block, with its column for a shift where something takes one: elsewhere what is pushed there would be lost."""
    width, constant = block.columns.stop - block.columns.start, block.constant and takes_shift
    moments = block.moments if constant else block.moments[:width, :width]
    return _Part(block.rows, block.columns, constant, moments, _upper(moments))


def _bits_along(numbers: np.ndarray, states: np.ndarray | None) -> np.ndarray:
    """What indices cost in even states and in odd ones, all cells taken together."""
    flat = None if states is None else states.ravel()
    return bits_of_indices(numbers.ravel(), flat, np.zeros(numbers.size, dtype=np.uint8))[0]


def _weighted(rows: np.ndarray, moments: np.ndarray, outputs: np.ndarray) -> float:
    """The sum over rows r of g · r · moments · rᵀ."""
    return float(outputs @ np.einsum("rc,rc->r", rows @ moments, rows))


def _range(multiples: np.ndarray) -> tuple[int, int]:
    return int(multiples.min(initial=0)) - 2, int(multiples.max(initial=0)) + 2


def _walk(
    weights: np.ndarray, upper: np.ndarray, width: int, price: np.ndarray, bits: np.ndarray, limits: tuple[int, int]
) -> np.ndarray:
    """Chooses multiples for the first `width` columns; leaves in `weights` what the others have been moved to."""
    chosen = np.zeros((len(weights), width))
    for start in range(0, width, TOGETHER):
        stop = min(start + TOGETHER, width)
        errors = np.zeros((len(weights), stop - start))
        for column in range(start, stop):
            own = upper[column, column]
            ratio = weights[:, column]
            nearest = np.clip(np.rint(ratio), *limits).astype(np.int64)
            picked = cheapest_multiples(ratio, nearest, price * own**2, bits)
            chosen[:, column] = picked
            errors[:, column - start] = (ratio - picked) / own
            weights[:, column + 1 : stop] -= np.outer(errors[:, column - start], upper[column, column + 1 : stop])
        weights[:, stop:] -= errors @ upper[start:stop, stop:]
    return chosen


def _upper(moments: np.ndarray) -> np.ndarray:
    """U with UᵀU = (H + damping)⁻¹, upper triangular."""
    mean = float(np.trace(moments)) / len(moments) or 1.0
    damped = moments + np.diag(DAMPING * np.diagonal(moments) + LEAST_DAMPING * mean)
    inverse = np.linalg.inv(damped)
    return np.ascontiguousarray(np.linalg.cholesky(0.5 * (inverse + inverse.T)).T)


class Pushing:
    """A network quantized by what its layers compute; tensors without a curvature, by their own moves.

    Args:
        dependent: whether values depend on each other, in matrices large enough for the coder to know of it.
    """

    def __init__(self, contents: Contents, curvatures: Mapping[str, Curvature], dependent: bool = False) -> None:
        self._contents = contents
        self._curvatures = {
            name: each
            for name, each in curvatures.items()
            if name in contents.matrices and name not in contents.precisions
        }
        self._layers: dict[str, _Layer] = {}
        for name, curvature in self._curvatures.items():
            weight = contents.matrices[name]
            bias = contents.biases.get(curvature.bias or "")
            if bias is None and curvature.mean is not None:
                bias = np.zeros(len(weight))
            self._layers[name] = _Layer(weight, bias, curvature, dependent)

    def at(self, factor: float) -> Trial:
        """Steps that move what layers compute by about `factor` of its size."""
        shares = [layer.matrix.size / layer.size for layer in self._layers.values()]
        worth = 2 * math.log(2) * factor**2 / (sum(shares) / len(shares)) if shares else 0.0
        tensors: dict[str, QuantizedTensor] = {}
        buffers: dict[str, np.ndarray] = {}
        error = 0.0
        for name, layer in self._layers.items():
            chosen = layer.best(worth)
            tensors[name] = chosen.tensor(layer.shape)
            error += chosen.error / layer.size
            self._pass_on(name, layer, chosen, worth, tensors, buffers)
        rest, rest_error = self._others(factor)
        ordered = not any(layer.dependent for layer in self._layers.values())
        return Trial(tensors | rest, math.sqrt(error / max(len(shares), 1) + rest_error**2), factor, buffers, ordered)

    def _pass_on(
        self,
        name: str,
        layer: _Layer,
        chosen: "_Chosen",
        worth: float,
        tensors: dict[str, QuantizedTensor],
        buffers: dict[str, np.ndarray],
    ) -> None:
        """What has been pushed on to the bias, or to the mean of the norm behind the layer."""
        curvature = self._curvatures[name]
        if curvature.bias in self._contents.biases:
            step = _OF_A_BIAS * math.sqrt(12 * worth / (2 * math.log(2) * float(layer.outputs.mean())))
            tensors[str(curvature.bias)] = round_bias(chosen.bias.astype(np.float32), step)
        elif curvature.mean is not None:
            buffers[curvature.mean] = (curvature.means - chosen.bias).astype(np.float32)

    def _others(self, factor: float) -> tuple[dict[str, QuantizedTensor], float]:
        """Matrices, biases and vectors that no curvature is known of: moved by a share of their own."""
        held, known = self._contents, self._layers
        pushed = {name for curvature in self._curvatures.values() for name in (curvature.bias, curvature.mean)}
        # A bias that took no shift, as of one of several layers that share a weight, has no step to be a part of.
        alone = {name: array for name, array in held.biases.items() if held.matrix_of[name] in known}
        left = replace(
            held,
            vectors={name: array for name, array in {**held.vectors, **alone}.items() if name not in pushed},
            matrices={name: array for name, array in held.matrices.items() if name not in known},
            biases={name: array for name, array in held.biases.items() if name not in alone},
        )
        trial = own_steps(left).at(factor)
        return dict(trial.tensors), trial.error if left.matrices else 0.0


@dataclass(frozen=True)
class _Chosen:
    """Multiples of a step for a layer's weights, its bias, and what they cost: error, and with the bits of it all.

    `bits` are those of indices, if the multiples depend on each other.
    """

    step: float
    multiples: np.ndarray
    bias: np.ndarray
    error: float
    cost: float
    bits: np.ndarray | None = None

    def tensor(self, shape: tuple[int, ...]) -> QuantizedTensor:
        return on_multiples(self.multiples.reshape(shape).astype(np.int64), self.step)
