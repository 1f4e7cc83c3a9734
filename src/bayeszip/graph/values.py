"""Shared values that no weight has, gone: `drop_unused_values`. Numpy only."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bayeszip.tensors import CompressedModel, Grid, QuantizedTensor, RawTensor

__all__ = ["drop_unused_values"]

#: What a codebook is in a file: its values, or the grid they are computed from.
_Key = bytes | Grid


def drop_unused_values(model: CompressedModel) -> CompressedModel:
    """The same weights with codebooks of the values that they have: units that went have left theirs.

    The others stay in their order, and 0.0 stays first. Tensors that share a codebook go on sharing one. A grid loses
    what lies beyond the outermost value in use.
    """
    used: dict[_Key, np.ndarray] = {}
    for each in _quantized(model):
        present = used.setdefault(_key(each), np.arange(each.codebook.size) == 0)
        present[np.unique(each.symbols)] = True
    tensors: dict[str, QuantizedTensor | RawTensor] = {}
    for name, tensor in model.tensors.items():
        tensors[name] = tensor
        if isinstance(tensor, QuantizedTensor):
            scale = None if tensor.scale is None else _compact(tensor.scale, used[_key(tensor.scale)])
            tensors[name] = replace(_compact(tensor, used[_key(tensor)]), scale=scale)
    return replace(model, tensors=tensors)


def _quantized(model: CompressedModel) -> Iterator[QuantizedTensor]:
    """The quantized tensors, and the scales of those that have some."""
    for tensor in model.tensors.values():
        if isinstance(tensor, QuantizedTensor):
            yield tensor
            if tensor.scale is not None:
                yield tensor.scale


def _key(tensor: QuantizedTensor) -> _Key:
    return tensor.grid or tensor.codebook.tobytes()


def _compact(tensor: QuantizedTensor, used: np.ndarray) -> QuantizedTensor:
    if used.all():
        return tensor
    if tensor.grid is not None:
        grid = replace(tensor.grid, size=max(int(np.flatnonzero(used)[-1]) + 1, 2))
        return replace(tensor, codebook=grid.values(), grid=grid)
    number = np.cumsum(used) - 1
    return replace(tensor, symbols=number[tensor.symbols], codebook=tensor.codebook[used])
