"""Operators that treat each element by itself."""

from collections.abc import Callable, Sequence

import numpy as np

from bayeszip.graph.rules.base import Atoms, Rule, Shape, Site
from bayeszip.tensors import Node

__all__ = ["Unary"]

_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
}


class Unary(Rule):
    """An activation function: coordinates pass through, a constant becomes another constant."""

    def __init__(self, name: str) -> None:
        self._function = _FUNCTIONS[name]

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return inputs[0]

    def couple(self, site: Site, atoms: Atoms) -> None:
        for before, after in zip(site.inputs[0].coordinates, site.output.coordinates, strict=True):
            atoms.join(before, after)

    def constants(self, site: Site) -> np.ndarray:
        return self._function(site.inputs[0].constants)
