"""Tensors that are values, or are looked up."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bayeszip.errors import ModelError
from bayeszip.graph.families.base import UNKNOWN, Atoms, Attributes, Held, Rule, Shape, Site, Values
from bayeszip.graph.lowering import Call, Lower, Lowering
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS", "counted"]


class Stored(Rule):
    """A tensor of the model as a value: constant all over."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if tensors[0] is None:
            raise ModelError(f"{node.op} has no tensor")
        return tensors[0]

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        (tensor,) = tensors
        if tensor is None:
            raise ModelError("a stored value names no tensor")
        return tensor

    def couple(self, site: Site, atoms: Atoms) -> None:
        (tensor,) = site.tensors
        if tensor is not None:
            for one, other in zip(tensor.coordinates, site.output.coordinates, strict=True):
                atoms.join(one, other)

    def constants(self, site: Site) -> np.ndarray:
        (tensor,) = site.tensors
        return np.full((1,) * len(site.output.shape), UNKNOWN) if tensor is None else tensor.values.astype(np.float64)


class Embedding(Rule):
    """Rows of a table, by number; every row may be asked for."""

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """weight: rows × features."""
        weight, padding = tensors[0], node.attributes["padding_idx"]
        if weight is None or len(weight) != 2 or not min(weight):
            raise ModelError(f"embedding: a table must have rows and columns, not shape {weight}")
        if not isinstance(padding, int) or padding >= weight[0]:
            raise ModelError(f"embedding: there is no row {padding!r} for padding among {weight[0]}")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return (*inputs[0], tensors[0][1] if tensors[0] else 0)

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        padding = a["padding_idx"]
        return F.embedding(x[0], tensors[0], padding if padding >= 0 else None)  # type: ignore[arg-type]

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        """Not every version of torch looks at the type of indices that have no values."""
        if x[0].dtype not in (torch.int64, torch.int32):
            raise ModelError(f"embedding looks rows up by whole numbers, not by {x[0].dtype}")
        return self.compute(x, tensors, a)

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        rows, columns = shapes[0] or (0, 0)
        padding = a["padding_idx"]
        return nn.Embedding(rows, columns, padding if padding >= 0 else None, device="meta")

    def couple(self, site: Site, atoms: Atoms) -> None:
        for one, other in zip(site.inputs[0].coordinates, site.output.coordinates[:-1], strict=True):
            atoms.join(one, other)
        (weight,) = site.tensors
        if weight is not None:
            atoms.pin(weight.coordinates[0])
            atoms.join(weight.coordinates[1], site.output.coordinates[-1])

    def constants(self, site: Site) -> np.ndarray:
        """A feature that is the same in all rows."""
        (weight,) = site.tensors
        rank = len(site.output.shape)
        if weight is None or not len(weight.values):
            return np.full((1,) * rank, UNKNOWN)
        first = weight.values[0].astype(np.float64)
        same = np.where((weight.values == weight.values[:1]).all(axis=0), first, UNKNOWN)
        return same.reshape((1,) * (rank - 1) + (-1,))


class Arange(Rule):
    """The whole numbers from 0 on; the input only tells where to compute."""

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        if counted(node)[1] < 0:
            raise ModelError(f"arange: there are no {node.attributes['size']} numbers")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        return (counted(node)[1] + 1,)

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return torch.arange(a["size"], device=x[0].device)

    def couple(self, site: Site, atoms: Atoms) -> None:
        atoms.pin(*site.output.coordinates)

    def constants(self, site: Site) -> np.ndarray:
        return np.arange(site.output.shape[0], dtype=np.float64)


def counted(node: Node) -> tuple[int, int]:
    """The first and the last number of an `arange`."""
    size = node.attributes["size"]
    if not isinstance(size, int):
        raise ModelError(f"arange: {size!r} is not a size")
    return 0, size - 1


OPERATORS: dict[str, Rule] = {
    "parameter": Stored(),
    "buffer": Stored(),
    "embedding": Embedding(),
    "arange": Arange(),
}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_embedding(lowering: Lowering, call: Call) -> int:
    weight, padding = lowering.tensor(call["weight"]), call["padding_idx"]
    return lowering.emit("embedding", [lowering.value(call["indices"])], [weight], padding_idx=padding)


def _lower_arange(lowering: Lowering, call: Call) -> int:
    if call.get("start") or (call.get("step") or 1) != 1:
        raise call.unsupported("that doesn't count from 0 by 1")
    value = lowering.emit("arange", [lowering.reference()], size=call.shape[0])
    dtype = str(call.node.meta["val"].dtype).removeprefix("torch.")
    return value if dtype == "int64" else lowering.emit("cast", [value], dtype=dtype)


ATEN: dict[str, Lower] = {
    "embedding": _lower_embedding,
    "arange": _lower_arange,
}
