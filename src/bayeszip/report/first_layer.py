"""The first layer as a picture: what each unit looks at, and how much all of them look at each input."""

import math
from dataclasses import dataclass

import numpy as np

from bayeszip.tensors import CompressedModel, Graph, Node, QuantizedTensor, RawTensor

__all__ = ["MOST_TILES", "Picture", "first_layer", "values_of"]

#: Units shown one by one; those with the most weights. Colors take more room in the page.
MOST_TILES, MOST_COLORED = 120, 64
#: Rows and columns of a map or a tile, and cells of all tiles together; larger ones are summed in blocks.
MOST_CELLS, ALL_CELLS = 64, 120_000
#: Operators that only say where values lie; the units behind them still read the inputs one by one.
_PASSING = {"input", "flatten", "reshape", "view"}


@dataclass(frozen=True)
class Picture:
    """The first layer.

    Args:
        tensor: its weights' name.
        kind: "fields" (a unit's weights lie as the inputs do), "kernels" (of a convolution), "colors" (of one that
            reads three channels: height × width × 3) or "matrix" (the share of weights that are not zero in each
            block).
        tiles: a picture a unit, signed, those with most weights first; one alone for "matrix".
        units: how many units the layer has; there may be more than tiles.
        total: how many weights read each input, laid out as the inputs are; for "fields".
        note: how larger tensors were brought into two dimensions.
    """

    tensor: str
    kind: str
    tiles: tuple[np.ndarray, ...]
    units: int
    total: np.ndarray | None = None
    note: str = ""


def values_of(tensor: QuantizedTensor | RawTensor) -> np.ndarray:
    """A tensor's numbers as floats; what is not finite counts as zero."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.dequantize()
    values = tensor.values
    if tensor.dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        floats = values.astype(np.float32)
    return np.nan_to_num(floats, nan=0.0, posinf=0.0, neginf=0.0)


def first_layer(model: CompressedModel) -> Picture | None:
    """The picture of the first tensor with rows and columns that the network's inputs meet; None if there is none."""
    name, node = _first_weights(model)
    if name is None:
        return None
    weights = values_of(model.tensors[name])
    if node is not None and node.op.startswith("conv_transpose"):
        weights = weights.swapaxes(0, 1)
    if node is not None and node.op.startswith("conv") and weights.ndim >= 3:
        return _kernels(name, weights)
    shape = _input_shape(model.graph, node) if model.graph is not None and node is not None else None
    if shape is not None and weights.ndim == 2 and weights.shape[1] == math.prod(shape):
        return _fields(name, weights, shape)
    return _matrix(name, weights.reshape(len(weights), -1))


def _first_weights(model: CompressedModel) -> tuple[str | None, Node | None]:
    def fits(name: str | None) -> bool:
        return name is not None and len(model.tensors[name].shape) >= 2 and model.tensors[name].size > 0

    for node in model.graph.nodes if model.graph else ():
        for name in node.tensors:
            if fits(name):
                return name, node
    return next((name for name in model.tensors if fits(name)), None), None


def _input_shape(graph: Graph, node: Node) -> tuple[int, int] | None:
    """Height and width of the images that `node` reads, if it reads them as they come in, of one channel."""
    if len(node.inputs) != 1:
        return None
    value = node.inputs[0]
    while value >= graph.inputs:
        source = graph.nodes[value - graph.inputs]
        if source.op not in _PASSING:
            return None
        shape = source.attributes.get("shape")
        if source.op == "input" and isinstance(shape, tuple):
            sizes = [int(size) for size in shape if size != 1]
            return (sizes[0], sizes[1]) if len(sizes) == 2 and min(sizes) > 0 else None
        value = source.inputs[0]
    return None


def _fields(name: str, weights: np.ndarray, shape: tuple[int, int]) -> Picture:
    fields = weights.reshape(-1, *shape)
    total = _in_blocks((fields != 0).sum(axis=0), 0, 1)
    return Picture(name, "fields", _fullest(_in_blocks(fields, 1, 2)), len(fields), total)


def _in_blocks(array: np.ndarray, *axes: int) -> np.ndarray:
    """Sums over blocks, so that no axis has more than `MOST_CELLS` of them."""
    for axis in axes:
        if array.shape[axis] > MOST_CELLS:
            array = np.add.reduceat(array, _edges(array.shape[axis])[:-1], axis=axis)
    return array


def _edges(size: int) -> np.ndarray:
    """Where blocks begin, and the end of the last."""
    return np.linspace(0, size, min(size, MOST_CELLS) + 1).astype(int)


def _kernels(name: str, weights: np.ndarray) -> Picture:
    """One kernel a unit: as it is where it reads one channel, in color where it reads three in two dimensions, else
    its root mean square over the channels.
    """
    channels = weights.shape[1]
    if channels == 3 and weights.ndim == 4:
        colors = _in_blocks(np.moveaxis(weights, 1, -1), 1, 2)
        return Picture(name, "colors", _fullest(colors, MOST_COLORED), len(weights))
    note = ""
    kernels = weights[:, 0]
    if channels > 1:
        kernels = np.sqrt(np.mean(weights.astype(np.float64) ** 2, axis=1))
        note = f"root mean square over {channels} channels"
    if kernels.ndim == 2:
        kernels = kernels[:, None, :]
    elif kernels.ndim > 3:
        kernels = kernels.reshape(len(kernels), kernels.shape[1], -1)
    return Picture(name, "kernels", _fullest(_in_blocks(kernels, 1, 2)), len(kernels), note=note)


def _fullest(tiles: np.ndarray, most: int = MOST_TILES) -> tuple[np.ndarray, ...]:
    """The tiles with the most weights; ties stay in the layer's order. Without tiles that are all zero."""
    counts = np.count_nonzero(tiles.reshape(len(tiles), -1), axis=1)
    most = min(most, max(1, ALL_CELLS // max(tiles[0].size, 1)))
    order = np.argsort(-counts, kind="stable")[:most]
    return tuple(tiles[unit] for unit in order if counts[unit])


def _matrix(name: str, weights: np.ndarray) -> Picture:
    """The share of weights that are not zero, in at most `MOST_CELLS` blocks each way."""
    rows, columns = (np.diff(_edges(size)) for size in weights.shape)
    density = _in_blocks((weights != 0).astype(np.float64), 0, 1) / np.outer(rows, columns)
    note = f"{weights.shape[0]:,} rows, {weights.shape[1]:,} columns"
    return Picture(name, "matrix", (density,), len(weights), note=note)
