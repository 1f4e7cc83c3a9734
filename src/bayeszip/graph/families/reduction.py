"""Operators over whole dimensions: means, sums, softmax, products of matrices, attention."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from bayeszip.errors import ModelError
from bayeszip.graph.composed import reduced
from bayeszip.graph.families.base import (
    UNKNOWN,
    Atoms,
    Attributes,
    Held,
    Rule,
    Shape,
    Site,
    Value,
    Values,
    along,
    dimension,
    elements,
    extent,
    ints,
    spread,
)
from bayeszip.graph.families.elementwise import Elementwise, lower_cast
from bayeszip.graph.lowering import Call, Lower, Lowering, rank_of, shape_of
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS"]

#: Larger products than this aren't searched for zeros.
_LARGEST_PRODUCT = 2**24


class Softmax(Rule):
    """Every coordinate of the dimension counts; for sums up to each coordinate as well."""

    def __init__(self, function: Callable[[torch.Tensor, int], torch.Tensor], *, floating: bool = True) -> None:
        self._function, self.floating = function, floating

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return self._function(x[0], a["dim"])

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        one = self.compute([torch.ones((1,) * x[0].ndim, dtype=x[0].dtype)], tensors, a)
        return torch.empty(x[0].shape, dtype=one.dtype, device="meta")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        dimension(node, "dim", len(inputs[0]))
        return inputs[0]

    def couple(self, site: Site, atoms: Atoms) -> None:
        for one, other in zip(site.inputs[0].coordinates, site.output.coordinates, strict=True):
            atoms.join(one, other)
        atoms.pin(site.output.coordinates[dimension(site.node, "dim", len(site.output.shape))])


class Reduction(Rule):
    """The mean, sum or maximum over some dimensions, none of which may be the batch."""

    def __init__(self, name: str, function: Callable[..., torch.Tensor], *, floating: bool = False) -> None:
        self._name, self._function, self.floating = name, function, floating

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        return elements(inputs[0])

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return self._function(x[0], a["dims"], a["keepdim"])

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        if not x[0].is_floating_point():  # torch may not know the type
            self.compute([torch.ones((1,) * x[0].ndim, dtype=x[0].dtype)], tensors, a)
        return self.compute(x, tensors, a)

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), dims = inputs, self._dims(node, len(inputs[0]))
        if any(shape[dim] < 0 for dim in dims):
            raise ModelError(f"{node.op} over the batch: samples would depend on each other")
        if len(set(dims)) < len(dims) or not math.prod(shape[dim] for dim in dims):
            raise ModelError(f"{node.op} over dimensions {dims} of a value of shape {shape} makes no sense")
        if node.attributes["keepdim"]:
            return tuple(1 if dim in dims else size for dim, size in enumerate(shape))
        return tuple(size for dim, size in enumerate(shape) if dim not in dims)

    def couple(self, site: Site, atoms: Atoms) -> None:
        dims, source = self._dims(site.node, len(site.inputs[0].shape)), site.inputs[0]
        kept = [dim for dim in range(len(source.shape)) if dim not in dims]
        atoms.pin(*(source.coordinates[dim] for dim in dims))
        targets = kept if site.node.attributes["keepdim"] else range(len(kept))
        for dim, target in zip(kept, targets, strict=True):
            atoms.join(source.coordinates[dim], site.output.coordinates[target])
        atoms.pin(*(each for each, size in zip(site.output.coordinates, site.output.shape, strict=True) if size == 1))

    def constants(self, site: Site) -> np.ndarray:
        source = site.inputs[0]
        dims = self._dims(site.node, len(source.shape))
        count = math.prod(source.shape[dim] for dim in dims)
        keepdim = bool(site.node.attributes["keepdim"])
        if not count:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        if self._name == "amax":
            return np.asarray(source.constants.max(axis=dims, keepdims=keepdim))
        mean = np.asarray(source.constants.mean(axis=dims, keepdims=keepdim))
        return mean * count if self._name == "sum" else mean

    def _dims(self, node: Node, rank: int) -> tuple[int, ...]:
        dims = ints(node, "dims")
        if not dims or not all(-rank <= dim < rank for dim in dims):
            raise ModelError(f"{node.op}: there are no dimensions {dims} among {rank}")
        return tuple(dim % rank for dim in dims)


class ArgMax(Reduction):
    """Where the maximum over one dimension lies."""

    def __init__(self) -> None:
        super().__init__("argmax", torch.argmax)

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return x[0].argmax(a["dims"][0], a["keepdim"])

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if len(ints(node, "dims")) != 1:
            raise ModelError(f"argmax is over one dimension, not {ints(node, 'dims')}")
        return super().shape(node, inputs, tensors)

    def constants(self, site: Site) -> np.ndarray:
        return np.full((1,) * len(site.output.shape), UNKNOWN)


class TopK(Rule):
    """The largest, or smallest, of a dimension, which stays as it is; or where they lie."""

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        return elements(inputs[0]) * max(1, max(map(extent, inputs[0])).bit_length())

    def workspace(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        """Torch sorts a copy with places beside it, and gives values and places, whichever is asked for."""
        return 2 * elements(inputs[0]) + elements(output)

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), dim, count = inputs, dimension(node, "dim", len(inputs[0])), node.attributes["k"]
        if shape[dim] < 0:
            raise ModelError("topk over the batch: samples would depend on each other")
        if not isinstance(count, int) or not 1 <= count <= shape[dim]:
            raise ModelError(f"topk: there are no {count!r} elements in dimension {dim} of shape {shape}")
        return (*shape[:dim], count, *shape[dim + 1 :])

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        values, indices = torch.topk(x[0], a["k"], a["dim"], a["largest"], sorted=True)
        return indices if a["result"] == "indices" else values

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        """With a real element too: not every type can be sorted."""
        self.compute([torch.ones((1,) * x[0].ndim, dtype=x[0].dtype)], tensors, {**a, "k": 1})
        return self.compute(x, tensors, a)

    def couple(self, site: Site, atoms: Atoms) -> None:
        source, dim = site.inputs[0], dimension(site.node, "dim", len(site.output.shape))
        atoms.pin(source.coordinates[dim], site.output.coordinates[dim])
        for place, (one, other) in enumerate(zip(source.coordinates, site.output.coordinates, strict=True)):
            if place != dim:
                atoms.join(one, other)


class Matmul(Rule):
    """The product of matrices in the last two dimensions; those before meet element by element."""

    floating = True

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        return elements(output) * extent(inputs[0][-1])

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return torch.matmul(x[0], x[1])

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        first, second = inputs
        if len(first) < 2 or len(second) < 2 or first[-1] != second[-2]:
            raise ModelError(f"matmul: values of shapes {first} and {second} can't be multiplied")
        outer = Elementwise().shape(node, [first[:-2], second[:-2]], ()) if len(first) + len(second) > 4 else ()
        return (*outer, first[-2], second[-1])

    def couple(self, site: Site, atoms: Atoms) -> None:
        first, second = site.inputs
        for value in site.inputs:
            _couple_outer(value, site.output, atoms)
        atoms.join(first.coordinates[-2], site.output.coordinates[-2])
        atoms.join(second.coordinates[-1], site.output.coordinates[-1])
        atoms.join(first.coordinates[-1], second.coordinates[-2])

    def constants(self, site: Site) -> np.ndarray:
        """Zero where in every term one of the factors is zero."""
        first, second = site.inputs
        if max(elements(value.shape) for value in (first, second, site.output)) > _LARGEST_PRODUCT:
            return np.full((1,) * len(site.output.shape), UNKNOWN)
        terms = (spread(first.constants, first.shape) != 0).astype(np.float32) @ (
            spread(second.constants, second.shape) != 0
        ).astype(np.float32)
        return np.where(terms == 0, 0.0, UNKNOWN)

    def needs(self, site: Site, live: np.ndarray) -> None:
        first, second = site.inputs
        if not all(live[each].any() for each in site.output.coordinates):
            return
        inner = first.coordinates[-1]
        absent = along(first.constants, -1, len(inner)) == 0
        absent |= along(second.constants, -2, len(inner)) == 0
        live[inner[~absent]] = True


class Attention(Rule):
    """Scaled dot-product attention: queries, keys, values, and perhaps a mask."""

    def operations(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        return extent(inputs[1][-2]) * (elements(inputs[0]) + elements(output))

    def workspace(self, inputs: Sequence[Shape], output: Shape, tensors: Sequence[Shape | None]) -> int:
        return extent(inputs[1][-2]) * elements(output[:-1])

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        types = {each.dtype for each in (*x[:3], *(mask for mask in x[3:] if mask.dtype != torch.bool))}
        if len(types) > 1 or not x[0].is_floating_point():
            raise ModelError("attention reads floating-point numbers of one type, and perhaps a mask of truths")
        return x[0].new_empty((*x[0].shape[:-1], x[2].shape[-1]))

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        mask, scale = x[3] if len(x) > 3 else None, a["scale"] or None
        return F.scaled_dot_product_attention(x[0], x[1], x[2], mask, is_causal=a["causal"], scale=scale)

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        if len(inputs) not in (3, 4) or min(map(len, inputs[:3])) < 3:
            raise ModelError(f"attention takes queries, keys, values and perhaps a mask, not shapes {tuple(inputs)}")
        queries, keys, values = inputs[:3]
        outer = [shape[:-2] for shape in (queries, keys, values)]
        if queries[-1] != keys[-1] or keys[-2] != values[-2] or len(set(outer)) > 1:
            raise ModelError(f"attention: shapes {queries}, {keys} and {values} don't fit together")
        if len(inputs) == 4 and (node.attributes["causal"] or not _fits_mask(inputs[3], (*queries[:-1], keys[-2]))):
            raise ModelError(f"attention: a mask of shape {inputs[3]} doesn't fit {queries} and {keys}")
        return (*queries[:-1], values[-1])

    def couple(self, site: Site, atoms: Atoms) -> None:
        queries, keys, values = site.inputs[:3]
        for value in (queries, keys, values):
            _couple_outer(value, site.output, atoms)
        atoms.join(queries.coordinates[-2], site.output.coordinates[-2])
        atoms.join(values.coordinates[-1], site.output.coordinates[-1])
        # The number of features sets the scale, and every key counts in the softmax.
        atoms.pin(queries.coordinates[-1], keys.coordinates[-1], keys.coordinates[-2], values.coordinates[-2])
        if site.node.attributes["causal"]:
            atoms.pin(queries.coordinates[-2])  # which keys a query sees depends on its place
        if len(site.inputs) > 3:
            self._couple_mask(site.inputs[3], site.output, keys, atoms)

    def _couple_mask(self, mask: Value, output: Value, keys: Value, atoms: Atoms) -> None:
        atoms.pin(*mask.coordinates[-2:], output.coordinates[-2], keys.coordinates[-2])
        _couple_outer(mask, output, atoms)

    def constants(self, site: Site) -> np.ndarray:
        """A mean of constants is the constant; where a mask may leave nothing to average, only zero is safe."""
        values = site.inputs[2].constants
        first = np.take(values, [0], axis=-2)
        same = np.where((values == first).all(axis=-2, keepdims=True), first, UNKNOWN)
        return np.where(same == 0, 0.0, UNKNOWN) if len(site.inputs) > 3 else same


def _couple_outer(value: Value, output: Value, atoms: Atoms) -> None:
    """Join all but the last two dimensions, as far as they aren't repeated."""
    skipped = len(output.shape) - len(value.shape)
    for dim in range(len(value.shape) - 2):
        if value.shape[dim] == output.shape[dim + skipped]:
            atoms.join(value.coordinates[dim], output.coordinates[dim + skipped])
        else:
            atoms.pin(value.coordinates[dim])


def _fits_mask(mask: Shape, scores: Shape) -> bool:
    """Whether a mask can be repeated to the shape of what it hides."""
    given = (1,) * (len(scores) - len(mask)) + mask
    return 2 <= len(mask) <= len(scores) and all(one in (1, other) for one, other in zip(given, scores, strict=True))


OPERATORS: dict[str, Rule] = {
    "mean": Reduction("mean", torch.mean, floating=True),
    "sum": Reduction("sum", torch.sum),
    "amax": Reduction("amax", torch.amax),
    "argmax": ArgMax(),
    "topk": TopK(),
    "cumsum": Softmax(torch.cumsum, floating=False),
    "softmax": Softmax(torch.softmax),
    "log_softmax": Softmax(torch.log_softmax),
    "matmul": Matmul(),
    "attention": Attention(),
}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_reduction(op: str) -> Lower:
    # Counting what is true, for example, happens in the dtype of the result.
    return lambda lowering, call: reduced(lowering, call, op, lower_cast(lowering, call))


def _lower_cumsum(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    if shape_of(call.source)[dim] < 0:
        raise call.unsupported("over the batch")
    return lowering.emit("cumsum", [lower_cast(lowering, call)], dim=dim)


def _lower_topk(lowering: Lowering, call: Call) -> tuple[int, ...]:
    dim = call["dim"] % rank_of(call.source)
    if shape_of(call.source)[dim] < 0:
        raise call.unsupported("over the batch")
    said = {"k": call["k"], "dim": dim, "largest": bool(call["largest"])}
    value = lowering.value(call.source)
    return tuple(lowering.emit("topk", [value], **said, result=result) for result in ("values", "indices"))


def _lower_softmax(op: str) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        dim = call["dim"] % rank_of(call.source)
        if shape_of(call.source)[dim] < 0:
            raise call.unsupported("over the batch")
        last = dim == rank_of(call.source) - 1
        return lowering.emit(op, [lowering.value(call.source)], dim=-1 if last else dim)

    return lower


def _lower_matmul(lowering: Lowering, call: Call) -> int:
    first, second = call.source, call["other"] if "other" in call else call["mat2"]
    if min(rank_of(first), rank_of(second)) < 2:
        raise call.unsupported("with a vector")
    return lowering.emit("matmul", [lowering.value(first), lowering.value(second)])


def _lower_addmm(lowering: Lowering, call: Call) -> int:
    names = ("mat1", "mat2") if "mat1" in call else ("batch1", "batch2")
    product = lowering.emit("matmul", [lowering.value(call[name]) for name in names])
    terms = [product, lowering.value(call.source)]
    for place, factor in enumerate((call["alpha"], call["beta"])):
        if factor != 1:
            terms[place] = lowering.emit("mul_scalar", [terms[place]], value=float(factor))
    return lowering.emit("add", terms)


def _lower_heads(lowering: Lowering, call: Call, name: str, outer: Sequence[int]) -> int:
    """Keys or values with a head for each of the queries': one head may serve several."""
    value, shape = lowering.value(call[name]), shape_of(call[name])
    if shape[:-2] == tuple(outer):
        return value
    if len(shape) != len(outer) + 2 or shape[: len(outer) - 1] != tuple(outer[:-1]) or outer[-1] % shape[-3]:
        raise call.unsupported(f"with a {name} of shape {shape}")
    times = outer[-1] // shape[-3]
    value = lowering.emit("view", [value], shape=(*shape[:-2], 1, *shape[-2:]))
    value = lowering.emit("expand", [value, lowering.reference()], shape=(*shape[:-2], times, *shape[-2:]))
    return lowering.emit("view", [value], shape=(*outer, *shape[-2:]))


def _lower_attention(lowering: Lowering, call: Call) -> int:
    if call["dropout_p"]:
        raise call.unsupported("with dropout")
    outer = shape_of(call["query"])[:-2]
    inputs = [lowering.value(call["query"])]
    inputs += [_lower_heads(lowering, call, name, outer) for name in ("key", "value")]
    if call["attn_mask"] is not None:
        inputs.append(lowering.value(call["attn_mask"]))
    scale = 0.0 if call["scale"] is None else float(call["scale"])
    return lowering.emit("attention", inputs, causal=bool(call["is_causal"]), scale=scale)


ATEN: dict[str, Lower] = {
    "mean": _lower_reduction("mean"),
    "sum": _lower_reduction("sum"),
    "amax": _lower_reduction("amax"),
    "cumsum": _lower_cumsum,
    "topk": _lower_topk,
    **dict.fromkeys(("softmax", "_softmax"), _lower_softmax("softmax")),
    **dict.fromkeys(("log_softmax", "_log_softmax"), _lower_softmax("log_softmax")),
    **dict.fromkeys(("matmul", "bmm", "mm"), _lower_matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _lower_addmm),
    "scaled_dot_product_attention": _lower_attention,
}
