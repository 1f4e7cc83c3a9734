"""Operators that treat each element by itself, or with the one at the same place."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bayeszip.errors import ModelError
from bayeszip.graph.rules.base import UNKNOWN, Atoms, Rule, Shape, Site
from bayeszip.tensors import Node

__all__ = ["Binary", "Elementwise", "PReLU", "Unary"]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _gelu(x: np.ndarray, a: Mapping[str, Any]) -> np.ndarray:
    if a["approximate"] == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def _elu(x: np.ndarray, alpha: float, scale: float = 1.0, slope: float = 1.0) -> np.ndarray:
    return scale * np.where(x > 0, x, alpha * np.expm1(x * slope))


def _softplus(x: np.ndarray, beta: float = 1.0, threshold: float = 20.0) -> np.ndarray:
    return np.where(x * beta > threshold, x, np.logaddexp(0.0, x * beta) / beta)


#: What each function does to a constant. NaN in, NaN out; what is not finite counts as unknown.
_FUNCTIONS: dict[str, Callable[[np.ndarray, Mapping[str, Any]], np.ndarray]] = {
    "relu": lambda x, a: np.maximum(x, 0.0),
    "tanh": lambda x, a: np.tanh(x),
    "sigmoid": lambda x, a: _sigmoid(x),
    "gelu": _gelu,
    "silu": lambda x, a: x * _sigmoid(x),
    "relu6": lambda x, a: np.clip(x, 0.0, 6.0),
    "hardswish": lambda x, a: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "hardsigmoid": lambda x, a: np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "leaky_relu": lambda x, a: np.where(x > 0, x, x * a["slope"]),
    "elu": lambda x, a: _elu(x, a["alpha"]),
    "selu": lambda x, a: _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946),
    "celu": lambda x, a: _elu(x, a["alpha"], slope=1.0 / a["alpha"]),
    "mish": lambda x, a: x * np.tanh(_softplus(x)),
    "softplus": lambda x, a: _softplus(x, a["beta"], a["threshold"]),
    "softsign": lambda x, a: x / (1.0 + np.abs(x)),
    "log_sigmoid": lambda x, a: -np.logaddexp(0.0, -x),
    "clamp": lambda x, a: np.clip(x, a["min"], a["max"]),
    "pow": lambda x, a: np.power(x, a["exponent"]),
    "exp": lambda x, a: np.exp(x),
    "log": lambda x, a: np.log(x),
    "sqrt": lambda x, a: np.sqrt(x),
    "rsqrt": lambda x, a: 1.0 / np.sqrt(x),
    "reciprocal": lambda x, a: 1.0 / x,
    "abs": lambda x, a: np.abs(x),
    "neg": lambda x, a: -x,
    "sin": lambda x, a: np.sin(x),
    "cos": lambda x, a: np.cos(x),
    "erf": lambda x, a: _erf(x),
    "sign": lambda x, a: np.sign(x),
    "floor": lambda x, a: np.floor(x),
    "round": lambda x, a: np.round(x),
    "log1p": lambda x, a: np.log1p(x),
    "expm1": lambda x, a: np.expm1(x),
    "add_scalar": lambda x, a: x + a["value"],
    "mul_scalar": lambda x, a: np.zeros_like(x) if a["value"] == 0 else x * a["value"],
    "div_scalar": lambda x, a: x / a["value"] if a["value"] else np.full_like(x, UNKNOWN),
}


class Elementwise(Rule):
    """Values meet at the same place, or are repeated along dimensions where they have but one element."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        rank = max(len(shape) for shape in inputs)
        aligned = [(1,) * (rank - len(shape)) + shape for shape in inputs]
        return tuple(_broadcast(node, sizes, inputs) for sizes in zip(*aligned, strict=True))

    def couple(self, site: Site, atoms: Atoms) -> None:
        for value in site.inputs:
            skipped = len(site.output.shape) - len(value.shape)
            for dim, size in enumerate(value.shape):
                if size == site.output.shape[dim + skipped]:
                    atoms.join(value.coordinates[dim], site.output.coordinates[dim + skipped])
                else:
                    atoms.pin(value.coordinates[dim])


class Unary(Elementwise):
    """An activation function: coordinates pass through, a constant becomes another constant."""

    def __init__(self, name: str) -> None:
        self._function = _FUNCTIONS[name]

    def constants(self, site: Site) -> np.ndarray:
        return self._function(site.inputs[0].constants, site.node.attributes)


class Binary(Elementwise):
    """Two values, element by element."""

    def __init__(self, function: Callable[[np.ndarray, np.ndarray], np.ndarray], *, zero_wins: bool = False) -> None:
        self._function, self._zero_wins = function, zero_wins

    def constants(self, site: Site) -> np.ndarray:
        first, second = (
            value.constants.reshape((1,) * (len(site.output.shape) - value.constants.ndim) + value.constants.shape)
            for value in site.inputs
        )
        result = self._function(first, second)
        # Nothing times zero is nothing, whatever the other is.
        return np.where((first == 0) | (second == 0), 0.0, result) if self._zero_wins else result


class PReLU(Unary):
    """A leaky ReLU whose slope is learned, one for all channels (dimension 1) or one for each."""

    def __init__(self) -> None:
        super().__init__("relu")

    def couple(self, site: Site, atoms: Atoms) -> None:
        super().couple(site, atoms)
        (weight,) = site.tensors
        if weight is None or weight.values.size == 1:
            atoms.pin(*(weight.coordinates if weight else ()))
        else:
            atoms.join(weight.coordinates[0], site.output.coordinates[1])

    def constants(self, site: Site) -> np.ndarray:
        (weight,) = site.tensors
        x = site.inputs[0].constants
        if weight is None:
            return np.full_like(x, UNKNOWN)
        slope = weight.values.astype(np.float64)
        slope = slope.reshape(1, -1, *(1,) * (x.ndim - 2)) if slope.size > 1 else slope.reshape(())
        return np.where(x >= 0, x, x * slope)


def _broadcast(node: Node, sizes: Sequence[int], inputs: Sequence[Shape]) -> int:
    wide = {size for size in sizes if size != 1}
    if len(wide) > 1:
        raise ModelError(f"{node.op}: values of shapes {', '.join(map(str, inputs))} don't fit together")
    return wide.pop() if wide else 1
