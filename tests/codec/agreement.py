"""What two readers of a file must agree on, and what a golden file must hold; needs numpy alone."""

import importlib.util
from pathlib import Path

import numpy as np
import second_decoder

from bayeszip.operators import OPERATORS
from bayeszip.tensors import CompressedModel, LogGrid, QuantizedTensor, UniformGrid

__all__ = ["agrees", "digest"]

GOLDEN = Path(__file__).parent.parent / "golden"


def digest(model: CompressedModel) -> str:
    """What a model is, in every bit, as the manifests of the golden files have it."""
    specification = importlib.util.spec_from_file_location("golden_build", GOLDEN / "build.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.digest(model)


def _numbers(grid: UniformGrid | LogGrid | None) -> tuple | None:
    """A grid as the second decoder gives it."""
    if grid is None:
        return None
    if isinstance(grid, UniformGrid):
        return 1, grid.size, grid.step
    return 2 if grid.signed else 3, grid.size, grid.base, grid.ratio


def agrees(blob: bytes, model: CompressedModel) -> None:
    """The second decoder reads the same as the first."""
    other = second_decoder.read(blob)
    assert list(other["tensors"]) == list(model.tensors)
    for name, tensor in model.tensors.items():
        shape, kind, elements = other["tensors"][name]
        assert shape == tensor.shape
        if isinstance(tensor, QuantizedTensor):
            assert kind == tensor.codebook.tobytes()
            assert elements == tensor.symbols.reshape(-1).tolist()
            assert other["grids"][name] == _numbers(tensor.grid)
            scale = tensor.scale and (tensor.axis, tensor.scale.codebook.tobytes(), tensor.scale.symbols.tolist())
            assert other["scales"].get(name) == scale
        else:
            assert kind == tensor.dtype
            words = np.frombuffer(tensor.values.tobytes(), dtype=f"<u{tensor.values.dtype.itemsize}")
            assert elements == words.tolist()
    assert other["original"] == model.original_parameters
    if model.graph is None:
        assert other["nodes"] is None
        return
    for position, (told, node) in enumerate(zip(other["nodes"], model.graph.nodes, strict=True)):
        op, _, _, attributes, varied = told
        assert op == node.op
        assert OPERATORS[op].defaults() | attributes == node.attributes
        names, newest = list(OPERATORS[op].defaults()), model.graph.inputs + position - 1
        assert varied == [
            (
                each.place * len(names) + names.index(each.attribute),
                [(newest - value, dim) for value, dim in each.dims],
                *(each.factor, each.divisor, each.offset),
            )
            for each in node.varying
        ]
    inputs, outputs = other["ends"] or (1, [len(model.graph.nodes)])
    assert (inputs, tuple(outputs)) == (model.graph.inputs, model.graph.outputs)
