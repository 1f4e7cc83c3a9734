"""Uniform steps: every tensor on a grid, symbols chosen by their error and their bits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from bayeszip import codec
from bayeszip.codec.ways import LEAST_CELLS
from bayeszip.errors import ModelError
from bayeszip.packing.contents import Contents
from bayeszip.packing.knobs import Trial
from bayeszip.quantize import (
    PRICE_OF_A_BIT,
    Precision,
    bounded,
    cluster,
    dependent,
    in_precision,
    round_vector,
    significant_bits,
    stepped,
)
from bayeszip.tensors import Aim, CompressedModel, QuantizedTensor, UniformGrid

__all__ = ["LiveSteps", "Steps", "by_clusters", "one_step", "own_steps", "round_bias", "within_bounds"]

#: A step over the error that it makes, as rounding goes; prices of bits make a little more.
_SPREAD = 12**0.5 * 0.9
#: A step of dependent values over that of values by themselves, at equal error.
SHORTER = 0.6
#: A bias is the weight of an input that is always 1, larger than most: its step is a part of its matrix's.
_OF_A_BIAS = 0.5
#: A vector's element stands for a row of weights: it moves by a part of what they move by.
_OF_A_VECTOR = 0.1
#: No tensor moves by more than so many times the share that all do: a small one can be as important as a large one.
_MOST_OF_ITS_OWN = 3.0
#: Multiples of a step to either side of zero that a grid has at most; weights that need more are clustered.
_MOST_MULTIPLES = 2**15 - 1
#: What makes the smallest numbers of float32 ones that it holds in full; in float64.
_ENLARGED = np.float64(2.0**120)
#: Tensors of at most so many values are tried with just these.
_FEW = 256


class Steps:
    """Every matrix on a uniform grid, the steps in proportion to units of theirs.

    Args:
        dependent: whether values depend on each other, in matrices large enough for the coder to know of it.
    """

    def __init__(self, contents: Contents, units: Mapping[str, float], dependent: bool = False) -> None:
        self._contents, self._units, self._dependent = contents, units, dependent

    def dependent(self) -> "Steps":
        """The same steps for values that depend on each other."""
        return Steps(self._contents, self._units, dependent=True)

    def at(self, factor: float) -> Trial:
        """Steps that move the matrices by about `factor` of their size."""
        steps = {name: _SPREAD * factor * unit for name, unit in self._units.items()}
        held = self._contents
        tensors = {}
        for name, array in held.matrices.items():
            way, step = stepped, steps[name]
            if self._dependent and array.size >= LEAST_CELLS:
                way, step = dependent, SHORTER * step
            tensors[name] = _on_step(array, step, way, held.precisions.get(name))
        error = held.moved({name: tensor.dequantize() for name, tensor in tensors.items()})
        for name, array in held.biases.items():
            tensors[name] = round_bias(array, _OF_A_BIAS * steps[held.matrix_of[name]])
        tensors |= _round_vectors(held, _OF_A_VECTOR * factor)
        return Trial(tensors, error, factor, ordered=not self._dependent)


class LiveSteps:
    """The same steps, every multiple chosen by its error and by what the coder asks for it in its place."""

    def __init__(self, steps: Steps, contents: Contents) -> None:
        self._steps, self._contents = steps, contents

    def at(self, factor: float) -> Trial:
        """What `Steps` gives, and then the symbols that are worth their bits."""
        trial, held = self._steps.at(factor), self._contents
        grids = {name: tensor.grid for name, tensor in trial.tensors.items() if name in held.matrices}
        aims = {
            name: Aim(held.matrices[name].astype(np.float64), 2 / grid.step**2)
            for name, grid in grids.items()
            if isinstance(grid, UniformGrid)
        }
        if not aims:
            return trial
        model = CompressedModel({name: trial.tensors[name] for name in grids})
        chosen = codec.cheapest(model, aims, PRICE_OF_A_BIT / math.log(2), passes=2)
        tensors = dict(trial.tensors)
        tensors |= {name: each for name, each in chosen.tensors.items() if isinstance(each, QuantizedTensor)}
        error = held.moved({name: tensors[name].dequantize() for name in held.matrices})
        return Trial(tensors, error, factor)


def one_step(contents: Contents) -> Steps:
    """One step for the whole network, but for tensors so small that it would leave little of them."""
    count = sum(array.size for array in contents.matrices.values())
    whole = (contents.size() / max(count, 1)) ** 0.5 or 1.0
    return Steps(contents, {name: min(whole, _MOST_OF_ITS_OWN * own) for name, own in _sizes(contents).items()})


def own_steps(contents: Contents) -> Steps:
    """A step for each tensor, in proportion to its weights' size."""
    return Steps(contents, _sizes(contents))


def _sizes(contents: Contents) -> dict[str, float]:
    """The root mean square of each matrix."""
    return {
        name: float(np.sqrt(np.square(array.astype(np.float64)).mean())) or 1.0
        for name, array in contents.matrices.items()
    }


def _on_step(
    weights: np.ndarray,
    step: float,
    way: Callable[[np.ndarray, float], QuantizedTensor],
    precision: Precision | None,
) -> QuantizedTensor:
    """A matrix on multiples of a step; in a type of 16 bits, of one whose multiples that type can hold."""
    most = int(float(np.abs(weights).max()) / step) + 2
    if precision is not None:
        bits = max(significant_bits(precision) - most.bit_length(), 1)
        fraction, power = np.frexp(step)
        step = float(np.ldexp(np.rint(fraction * 2**bits), int(power) - bits))
    if most < _MOST_MULTIPLES and step > np.finfo(np.float32).tiny:
        tensor = way(weights, step)
        if precision is None or np.array_equal(in_precision(tensor.codebook, precision), tensor.codebook):
            return tensor
    elif most < _MOST_MULTIPLES and precision is None:
        # Multiples of so little are no grid in float32: they are chosen in units in which they are.
        tensor = stepped((weights * _ENLARGED).astype(np.float32), step * _ENLARGED)
        values = (tensor.codebook / _ENLARGED).astype(np.float32)
        if len(np.unique(values)) == len(values):
            return QuantizedTensor(tensor.symbols, values)
    return cluster(weights, min(2 * most, 2**16 - 1), precision or "float32")


def round_bias(values: np.ndarray, step: float) -> QuantizedTensor:
    """A bias on multiples of a step, or of one just coarse enough for a grid."""
    finest = float(np.abs(values).max(initial=0.0)) / (_MOST_MULTIPLES - 1)
    return stepped(values, max(step, finest, float(np.finfo(np.float32).tiny)), price=0)


def _round_vectors(contents: Contents, error: float) -> dict[str, QuantizedTensor]:
    """Vectors moved by `error` of each of their elements, where a grid can hold them."""
    rounded = {name: round_vector(array, error) for name, array in contents.vectors.items()}
    return {name: tensor for name, tensor in rounded.items() if tensor is not None}


def by_clusters(trial: Trial, contents: Contents) -> Trial:
    """The trial with those matrices clustered that take few values and are smaller, or nearer, that way."""
    tensors = dict(trial.tensors)
    for name, array in contents.matrices.items():
        distinct = np.unique(array.ravel()[: 2 * _FEW * 64])
        if distinct.size > _FEW or np.unique(array).size > _FEW:
            continue
        exact = cluster(array, _FEW, contents.precisions.get(name, "float32"))
        if _bytes(exact) <= _bytes(tensors[name]):
            tensors[name] = exact
    error = contents.moved({name: tensors[name].dequantize() for name in contents.matrices})
    return replace(trial, tensors=tensors, error=min(error, trial.error))


def _bytes(tensor: QuantizedTensor) -> int:
    return codec.measure(CompressedModel({"": tensor}))


def within_bounds(contents: Contents, share: float) -> dict[str, QuantizedTensor]:
    """Every tensor with no element moved by more than a share of its largest; vectors, by a share of itself."""
    tensors: dict[str, QuantizedTensor] = {}
    for name, array in (*contents.matrices.items(), *contents.biases.items()):
        largest = float(np.abs(array).max(initial=0.0))
        try:
            if largest:
                tensors[name] = bounded(array, share * largest, contents.precisions.get(name, "float32"))
            elif name in contents.matrices:
                tensors[name] = cluster(array, 1)
        except ModelError as error:
            if name in contents.matrices:
                raise ModelError(f"{name}: {error}") from error
    for name, array in contents.vectors.items():
        # A grid of even ratios moves an element by √3 times what it moves them by in the mean.
        rounded = round_vector(array, 0.99 * share / 3**0.5)
        if rounded is None:
            continue
        values = in_precision(rounded.dequantize(), contents.precisions.get(name, "float32"))
        if (np.abs(values - array) <= share * np.abs(array)).all():
            tensors[name] = rounded
    return tensors
