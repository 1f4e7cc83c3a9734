"""Which units survived, kept in the file if asked for: `with_indices`, `dense_state`. Numpy only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from bayeszip.errors import ModelError, shown
from bayeszip.limits import Budget, Limits
from bayeszip.tensors import CompressedModel, QuantizedTensor, RawTensor

__all__ = ["beside_parameters", "dense_state", "is_index", "narrowed", "surviving", "with_indices"]

#: Masks are tensors of this name with a number; the tensor of the name itself says which dimension has which mask.
_NAME = "_kept"

#: For each tensor and each of its dimensions, which of the original coordinates survived.
Surviving = dict[str, list[np.ndarray]]


def is_index(name: str) -> bool:
    """Whether a tensor of this name says what survived, and is no part of the network."""
    return name == _NAME or name.startswith(f"{_NAME}.")


def beside_parameters(model: CompressedModel) -> frozenset[str]:
    """The tensors that are no parameters, as far as a file tells: what its graph reads as buffers, and what survived.

    Without a graph nobody knows of buffers.
    """
    buffers = model.graph.buffer_names() if model.graph is not None else frozenset[str]()
    return buffers | frozenset(filter(is_index, model.tensors))


def surviving(model: CompressedModel) -> Surviving:
    """What survived of each dimension, as masks over the original coordinates: all, where nothing else is stored.

    Raises:
        ModelError: what is stored doesn't fit the tensors.
    """
    own = {name: tensor for name, tensor in model.tensors.items() if not is_index(name)}
    table = model.tensors.get(_NAME)
    dims = sum(len(tensor.shape) for tensor in own.values())
    numbers = iter([-1] * dims if table is None else _numbers(table, dims))
    return {name: [_mask(model, next(numbers), size, name) for size in tensor.shape] for name, tensor in own.items()}


def with_indices(model: CompressedModel, kept: Surviving) -> CompressedModel:
    """The model with what survived stored among its tensors; dimensions that lost nothing cost nothing."""
    own = {name: tensor for name, tensor in model.tensors.items() if not is_index(name)}
    numbers: list[int] = []
    masks: dict[bytes, int] = {}
    for name, tensor in own.items():
        for mask in _checked(name, tensor.shape, kept[name]):
            numbers.append(-1 if mask.all() else masks.setdefault(mask.tobytes(), len(masks)))
    if not masks:
        return replace(model, tensors=own)
    stored = {_NAME: RawTensor(np.asarray(numbers, dtype=np.int32), "int32")}
    for bits, number in masks.items():
        stored[f"{_NAME}.{number}"] = RawTensor(np.frombuffer(bits, dtype=bool), "bool")
    return replace(model, tensors=own | stored)


def dense_state(model: CompressedModel, limits: Limits | Budget | None = None) -> dict[str, np.ndarray]:
    """The tensors in the shapes they had at first, zero where units were removed: for the network's own class.

    The class computes the same with them: what was removed is multiplied by zero wherever it is read.

    Raises:
        ModelError: units were removed and which ones wasn't stored.
    """
    if model.graph is not None and _NAME not in model.tensors and _parameters(model) != model.original_parameters:
        raise ModelError(
            "the model was shrunk without storing which units survived: compress with --set "
            "coding.keep_indices=true, or load it without the original shapes"
        )
    kept, budget = surviving(model), Budget.of(limits)
    for name, masks in kept.items():
        tensor = model.tensors[name]
        width = 4 if isinstance(tensor, QuantizedTensor) else tensor.values.itemsize
        budget.charge("loaded", width * math.prod(map(len, masks)))
    return {name: _scattered(model.tensors[name], masks) for name, masks in kept.items()}


def _parameters(model: CompressedModel) -> int:
    """How many of the model's numbers are parameters."""
    beside = beside_parameters(model)
    return sum(tensor.size for name, tensor in model.tensors.items() if name not in beside)


def _scattered(tensor: QuantizedTensor | RawTensor, masks: Sequence[np.ndarray]) -> np.ndarray:
    values = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.values
    dense = np.zeros([len(mask) for mask in masks], dtype=values.dtype)
    dense[np.ix_(*masks)] = values
    return dense


def _numbers(table: QuantizedTensor | RawTensor, dims: int) -> list[int]:
    if not isinstance(table, RawTensor) or table.dtype != "int32" or table.shape != (dims,):
        raise ModelError(f"{_NAME} must be {dims} int32 numbers, one for each dimension of each tensor")
    return [int(number) for number in table.values]


def _mask(model: CompressedModel, number: int, size: int, name: str) -> np.ndarray:
    if number < 0:
        return np.ones(size, dtype=bool)
    mask = model.tensors.get(f"{_NAME}.{number}")
    if not isinstance(mask, RawTensor) or mask.dtype != "bool" or mask.values.ndim != 1:
        raise ModelError(f"{_NAME}.{number} is missing or no mask")
    if np.count_nonzero(mask.values) != size:
        raise ModelError(f"{_NAME}.{number} doesn't fit {shown(name)}, which has {size} of what it says survived")
    return mask.values


def _checked(name: str, shape: Sequence[int], masks: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    if [int(np.count_nonzero(mask)) for mask in masks] != list(shape):
        raise ModelError(f"what survived of {shown(name)} doesn't fit its shape {tuple(shape)}")
    return masks


def narrowed(kept: Mapping[str, list[np.ndarray]], step: Mapping[str, Sequence[np.ndarray]]) -> Surviving:
    """What survives when of the survivors only some remain."""
    result: Surviving = {}
    for name, masks in step.items():
        result[name] = []
        for before, remaining in zip(kept[name], masks, strict=True):
            mask = before.copy()
            mask[np.flatnonzero(before)] = remaining
            result[name].append(mask)
    return result
