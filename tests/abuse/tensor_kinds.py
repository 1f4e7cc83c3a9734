"""Quantized tensors of every kind that a file may hold, and every way of coding them: the one list of them.

Strangers, mutants and the search all draw from it. `test_kinds.py` fails when a tensor can be what none here is.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from unittest.mock import patch

import numpy as np

from bayeszip.codec import encode, trellis, ways
from bayeszip.codec.header import outline_of
from bayeszip.errors import ModelError
from bayeszip.tensors import CompressedModel, Grid, LogGrid, QuantizedTensor, UniformGrid

__all__ = ["KINDS", "SMALL", "any_ways", "files", "small_ways", "suitable_ways"]

_CODEBOOK = np.array([0, -0.5, 0.75, 0.125, -1.5], dtype=np.float32)
_SCALES = (UniformGrid(0.25, 5), LogGrid(0.25, 1.5, 5, signed=False))

Kind = Callable[[np.random.Generator, tuple[int, ...]], QuantizedTensor]


def _symbols(numbers: np.random.Generator, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Sparse ones, or dense ones of which each is near the one before."""
    if numbers.random() < 0.5:
        return numbers.integers(1, size, shape) * (numbers.random(shape) < 0.3)
    walk = np.rint(numbers.normal(size=shape).cumsum(axis=-1) if shape else numbers.normal(size=shape))
    walk = np.clip(walk, -(size // 2), (size - 1) // 2).astype(np.int64)
    return np.where(walk < 0, -2 * walk - 1, 2 * walk)


def _valued(numbers: np.random.Generator, shape: tuple[int, ...]) -> QuantizedTensor:
    return QuantizedTensor(_symbols(numbers, shape, _CODEBOOK.size), _CODEBOOK)


def _on_grid(grid: Grid, numbers: np.random.Generator, shape: tuple[int, ...]) -> QuantizedTensor:
    return QuantizedTensor.on_grid(_symbols(numbers, shape, grid.size), grid)


def _along_path(grid: UniformGrid, numbers: np.random.Generator, shape: tuple[int, ...]) -> QuantizedTensor:
    """Multiples of a step of which each tells by its parity whether those after it are even or odd, or zero.

    That is how dependent values are: a machine of eight states goes along the cells, where all of them are live.
    """
    state, path = 0, []
    for index in numbers.integers(-(grid.size // 4), grid.size // 4 + 1, int(np.prod(shape))).tolist():
        odd = state & 1
        path.append(2 * index - odd if index > 0 else 2 * index + odd if index else 0)
        state = state >> 1 ^ (index & 1) << 1 ^ odd * 5
    steps = np.array(path, dtype=np.int64).reshape(shape)
    return QuantizedTensor.on_grid(np.where(steps < 0, -2 * steps - 1, 2 * steps), grid)


def _scaled(kind: Kind, axis: int, numbers: np.random.Generator, shape: tuple[int, ...]) -> QuantizedTensor:
    """With a scale for each row or column, where there are any."""
    tensor = kind(numbers, shape)
    if len(shape) < 2 or not tensor.size:
        return tensor
    scale = _on_grid(_SCALES[numbers.integers(2)], numbers, shape[axis : axis + 1])
    return QuantizedTensor(tensor.symbols, tensor.codebook, tensor.grid, scale, axis)


_PLAIN: dict[str, Kind] = {
    "values": _valued,
    "equal steps": partial(_on_grid, UniformGrid(0.25, 13)),
    "dependent steps": partial(_along_path, UniformGrid(0.25, 13)),
    "equal ratios": partial(_on_grid, LogGrid(0.25, 1.5, 9)),
    "equal ratios above zero": partial(_on_grid, LogGrid(0.125, 1.25, 6, signed=False)),
}
#: each takes random numbers and a shape
KINDS: dict[str, Kind] = _PLAIN | {
    f"{name}, scaled along {axis}": partial(_scaled, kind, axis) for name, kind in _PLAIN.items() for axis in (0, 1)
}


#: what large is, for the search too, which goes without a context
SMALL = ((ways, "LEAST_CELLS", 16), (ways, "_STREAM", 64), (trellis, "_LEAST_WEIGHTS", 8))


@contextmanager
def small_ways() -> Iterator[None]:
    """Within, small tensors have a choice of ways and small networks streams, as only large ones have otherwise."""
    with ExitStack() as patches:
        for module, name, least in SMALL:
            patches.enter_context(patch.object(module, name, least))
        yield


def suitable_ways(tensor: QuantizedTensor) -> list[int]:
    """The ways that a tensor can be coded in, of all that a file can say."""
    return [way for way in range(4) if _suits(way, CompressedModel({"w": tensor}))]


def _suits(way: int, model: CompressedModel) -> bool:
    try:
        return bool(encode(model, ways=way << 1))
    except ModelError:
        return False


def any_ways(model: CompressedModel, dice: Random) -> int:
    """Streams or not, and some way of coding for each tensor that has a choice."""
    outline = outline_of(model)
    told = {}
    for each in ways.choosable(outline):
        tensor = model.tensors[each.name]
        told[each] = dice.choice(suitable_ways(tensor)) if isinstance(tensor, QuantizedTensor) else ways.USUAL
    return ways.option_of(outline, dice.random() < 0.5, told)


def files() -> list[bytes]:
    """Files of small models, of every kind in every way, alone and in streams; to be read within `small_ways` only."""
    numbers, dice = np.random.default_rng(1), Random(1)
    found = []
    with small_ways():
        for kind in KINDS.values():
            for shape in ((12, 9), (4, 3, 3, 3), (40, 2)):
                alone = kind(numbers, shape)
                found += [encode(CompressedModel({"w": alone}), ways=way << 1) for way in suitable_ways(alone)]
            found.append(encode(CompressedModel({"w": kind(numbers, (5, 7))}), coder="csr-huffman"))
        shapes = ((8, 9), (9, 8), (4, 2, 3, 3), (70,))
        for first in range(0, len(KINDS), len(shapes)):
            some = zip(list(KINDS.values())[first:], shapes, strict=False)
            several = CompressedModel(
                {f"l{place}.weight": kind(numbers, shape) for place, (kind, shape) in enumerate(some)}
            )
            found += [encode(several, ways=any_ways(several, dice) | streams) for streams in (0, 1)]
    return found
