"""ATen calls that become several of our operators: one table, `COMPOSED`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bayeszip.graph.lowering import Call, Lower, Lowered, Lowering, is_used, listed, rank_of, shape_of

__all__ = ["COMPOSED", "reduced"]


# ── elements ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _glu(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    half = shape_of(call.source)[dim] // 2
    value = lowering.value(call.source)
    first, second = (lowering.sliced(value, dim, start, start + half) for start in (0, half))
    return lowering.emit("mul", [first, lowering.emit("sigmoid", [second])])


def _ceil(lowering: Lowering, call: Call) -> int:
    negative = lowering.emit("neg", [lowering.value(call.source)])
    return lowering.emit("neg", [lowering.emit("floor", [negative])])


def _remainder(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if number is None or not call.source.meta["val"].is_floating_point():
        raise call.unsupported("of whole numbers, or by a value")
    value = lowering.value(call.source)
    whole = lowering.emit("floor", [lowering.emit("div_scalar", [value], value=number)])
    return lowering.emit("sub", [value, lowering.emit("mul_scalar", [whole], value=number)])


def _isnan(lowering: Lowering, call: Call) -> int:
    value = lowering.value(call.source)
    return lowering.emit("compare", [value, value], relation="ne")


def _logical(relation: str) -> Lower:
    """Truth values combined: as products, as a product of opposites, or by comparing them."""

    def lower(lowering: Lowering, call: Call) -> int:
        if any(call[name].meta["val"].dtype != torch.bool for name in ("self", "other")):
            raise call.unsupported("of numbers")
        values = [lowering.value(call["self"]), lowering.value(call["other"])]
        if relation == "xor":
            return lowering.emit("compare", values, relation="ne")
        if relation == "and":
            return lowering.emit("mul", values)
        opposites = [lowering.emit("logical_not", [value]) for value in values]
        return lowering.emit("logical_not", [lowering.emit("mul", opposites)])

    return lower


# ── reductions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def reduced(lowering: Lowering, call: Call, op: str, value: int, keepdim: bool | None = None) -> int:
    """A reduction of `value` over the dimensions that a call names, or over all; `keepdim` as the call says."""
    keeps = bool(call.get("keepdim")) if keepdim is None else keepdim
    return lowering.emit(op, [value], dims=_dims(call), keepdim=keeps)


def _dims(call: Call) -> tuple[int, ...]:
    rank = rank_of(call.source)
    named = listed(call["dim"]) if "dim" in call and call["dim"] is not None else []
    dims = [dim % rank for dim in named] or list(range(rank))
    if any(shape_of(call.source)[dim] < 0 for dim in dims):
        raise call.unsupported("over the batch")
    return tuple(sorted(dims))


def _extreme(largest: bool) -> Lower:
    """max and min: of two values, over all dimensions, or over one together with where it lies."""

    def lower(lowering: Lowering, call: Call) -> Lowered:
        value = lowering.value(call.source)
        if "other" in call:
            return lowering.emit("maximum" if largest else "minimum", [value, lowering.value(call["other"])])
        found = _extremum(lowering, call, value, largest)
        if "dim" not in call:
            return found
        place = _place(lowering, call, value, largest) if is_used(call.node, 1) else found
        return (found, place)

    return lower


def _extremum(lowering: Lowering, call: Call, value: int, largest: bool) -> int:
    if largest:
        return reduced(lowering, call, "amax", value)
    # min x = −max(−x)
    return lowering.emit("neg", [reduced(lowering, call, "amax", lowering.emit("neg", [value]))])


def _place(lowering: Lowering, call: Call, value: int, largest: bool) -> int:
    if len(_dims(call)) != 1:
        raise call.unsupported("over several dimensions")
    return reduced(lowering, call, "argmax", value if largest else lowering.emit("neg", [value]))


def _only(function: Callable[[Lowering, Call, int, bool], int], *, largest: bool) -> Lower:
    return lambda lowering, call: function(lowering, call, lowering.value(call.source), largest)


def _truth(every: bool) -> Lower:
    """Whether any, or every, element is true: by the largest of 0 and 1."""

    def lower(lowering: Lowering, call: Call) -> int:
        if call.source.meta["val"].dtype != torch.bool:
            raise call.unsupported("of numbers")
        value = lowering.value(call.source)
        value = lowering.emit("logical_not", [value]) if every else value
        largest = reduced(lowering, call, "amax", lowering.emit("cast", [value], dtype="float32"))
        return lowering.emit("compare_scalar", [largest], relation="eq" if every else "ne", value=0.0)

    return lower


def _variance(result: str) -> Lower:
    """The mean square of what is left without the mean, n / (n − correction) times."""

    def lower(lowering: Lowering, call: Call) -> Lowered:
        correction = call.get("correction", 1) if "unbiased" not in call else int(call["unbiased"])
        correction = 1 if correction is None else correction
        count = math.prod(shape_of(call.source)[dim] for dim in _dims(call))
        if count <= correction:
            raise call.unsupported(f"over {count} elements")
        value = lowering.value(call.source)
        mean = reduced(lowering, call, "mean", value, keepdim=True)
        square = lowering.emit("pow", [lowering.emit("sub", [value, mean])], exponent=2.0)
        variance = reduced(lowering, call, "mean", square)
        if correction:
            variance = lowering.emit("mul_scalar", [variance], value=count / (count - correction))
        if result.startswith("std"):
            variance = lowering.emit("sqrt", [variance])
        return (variance, reduced(lowering, call, "mean", value)) if result.endswith("mean") else variance

    return lower


def _vector_norm(lowering: Lowering, call: Call) -> int:
    order = float(call["ord"] if "ord" in call else 2.0 if call["p"] is None else call["p"])
    value = lowering.value(call.source)
    if order == 2:
        square = lowering.emit("pow", [value], exponent=2.0)
        return lowering.emit("sqrt", [reduced(lowering, call, "sum", square)])
    if order not in (1, math.inf):
        raise call.unsupported(f"of order {order}")
    return reduced(lowering, call, "sum" if order == 1 else "amax", lowering.emit("abs", [value]))


# ── layout ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pixel_shuffle(lowering: Lowering, call: Call) -> int:
    batch, channels, height, width = shape_of(call.source)
    by = call["upscale_factor"]
    value = lowering.emit(
        "view", [lowering.value(call.source)], shape=(batch, channels // by**2, by, by, height, width)
    )
    value = lowering.emit("permute", [value], dims=(0, 1, 4, 2, 5, 3))
    return lowering.emit("view", [value], shape=call.shape)


def _channel_shuffle(lowering: Lowering, call: Call) -> int:
    batch, channels, *space = shape_of(call.source)
    groups = call["groups"]
    shape = (batch, groups, channels // groups, math.prod(space))
    value = lowering.emit("view", [lowering.value(call.source)], shape=shape)
    value = lowering.emit("permute", [value], dims=(0, 2, 1, 3))
    return lowering.emit("view", [value], shape=call.shape)


def _repeat(lowering: Lowering, call: Call) -> int:
    """A value several times over: each dimension as (times, size), of which `times` is expanded."""
    after, value = call.shape, lowering.value(call.source)
    before = (1,) * (len(after) - rank_of(call.source)) + shape_of(call.source)
    times = [1 if old == new else new // old for old, new in zip(before, after, strict=True)]
    if any(old < 0 and old != new for old, new in zip(before, after, strict=True)):
        raise call.unsupported("along the batch")
    if before == after:
        return value
    paired = tuple(size for old in before for size in (1, old))
    value = lowering.emit("view", [value], shape=paired)
    wide = tuple(size for pair in zip(times, before, strict=True) for size in pair)
    value = lowering.emit("expand", [value, lowering.reference()], shape=wide)
    return lowering.emit("view", [value], shape=after)


def _roll(lowering: Lowering, call: Call) -> int:
    """The end of a dimension before its beginning."""
    value, shape = lowering.value(call.source), shape_of(call.source)
    dims, shifts = [dim % len(shape) for dim in listed(call["dims"])], listed(call["shifts"])
    if not dims or any(shape[dim] < 0 for dim in dims):
        raise call.unsupported("along the batch, or all dimensions as one")
    for dim, shift in zip(dims, shifts, strict=True):
        start = -shift % shape[dim]
        if start:
            ends = [lowering.sliced(value, dim, start, shape[dim]), lowering.sliced(value, dim, 0, start)]
            value = lowering.emit("concat", ends, dim=dim)
    return value


def _flip(lowering: Lowering, call: Call) -> int:
    value, shape = lowering.value(call.source), shape_of(call.source)
    for dim in (each % len(shape) for each in listed(call["dims"])):
        if shape[dim] < 0:
            raise call.unsupported("along the batch")
        backwards = torch.arange(shape[dim] - 1, -1, -1)
        value = lowering.emit("take", [value, lowering.constant(backwards, call.node)], dim=dim)
    return value


def _index_select(lowering: Lowering, call: Call) -> int:
    return _taken(lowering, call, call["dim"] % rank_of(call.source), [call["index"]])


def _gather(lowering: Lowering, call: Call) -> int:
    """Of one row by one row of numbers, such as those of positions; of many, each by its own."""
    dim, places = call["dim"] % rank_of(call.source), shape_of(call["index"])
    shape = shape_of(call.source)
    if shape[dim] < 0:
        raise call.unsupported("along the batch")
    if all(size == 1 for each in (shape, places) for at, size in enumerate(each) if at != dim):
        return _taken(lowering, call, dim, [call["index"]])
    value, index = lowering.value(call.source), lowering.value(call["index"])
    for at, (size, taken) in enumerate(zip(shape, places, strict=True)):
        if at != dim and size != taken:
            if min(size, taken) < 0:
                raise call.unsupported("of a part of the batch")
            value = lowering.sliced(value, at, 0, taken)
    if call["index"].meta["val"].dtype != torch.int64:
        index = lowering.emit("cast", [index], dtype="int64")
    return lowering.emit("gather", [value, index], dim=dim)


def _index(lowering: Lowering, call: Call) -> int:
    """By tensors of indices, which stand side by side: `x[:, [2, 0]]`, `x[:, rows, columns]`, a table by numbers."""
    indices = [(dim, index) for dim, index in enumerate(call["indices"]) if index is not None]
    dims = [dim for dim, _ in indices]
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise call.unsupported("by indices that don't stand side by side")
    return _taken(lowering, call, dims[0], [index for _, index in indices])


def _taken(lowering: Lowering, call: Call, dim: int, indices: Sequence[Any]) -> int:
    """Elements of the dimensions from `dim` on, by one tensor of indices for each."""
    shape = shape_of(call.source)
    sizes = shape[dim : dim + len(indices)]
    if min(sizes) < 0:
        raise call.unsupported("along the batch")
    if any(index.meta["val"].dtype not in (torch.int64, torch.int32) for index in indices):
        raise call.unsupported("by indices that aren't whole numbers")
    at, count = _flat_index(lowering, call, indices, sizes)
    before, behind = shape[:dim], shape[dim + len(sizes) :]
    value = lowering.value(call.source)
    if len(sizes) > 1:
        value = lowering.emit("view", [value], shape=(*before, math.prod(sizes), *behind))
    value = lowering.emit("take", [value, at], dim=dim)
    return value if (*before, count, *behind) == call.shape else lowering.emit("view", [value], shape=call.shape)


def _flat_index(lowering: Lowering, call: Call, indices: Sequence[Any], sizes: Sequence[int]) -> tuple[int, int]:
    """Indices into several dimensions as one list of indices into all of them as one; and how many they are."""
    known = [each for each in map(lowering.known, indices) if each is not None]
    if len(known) == len(indices):
        flat = torch.zeros((), dtype=torch.int64)
        for index, size in zip(known, sizes, strict=True):
            flat = flat * size + index.long() % size
        return lowering.constant(flat.reshape(-1), call.node), flat.numel()
    shape = shape_of(indices[0])
    if len(indices) > 1 or any(size < 0 for size in shape):
        raise call.unsupported("by indices that depend on the sample")
    at, count = lowering.value(indices[0]), math.prod(shape)
    return at if len(shape) == 1 else lowering.emit("view", [at], shape=(count,)), count


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _one_hot(lowering: Lowering, call: Call) -> int:
    """Which of the classes it is: each number beside all of them."""
    value = lowering.emit("view", [lowering.value(call.source)], shape=(*shape_of(call.source), 1))
    classes = lowering.emit("arange", [lowering.reference()], size=call.shape[-1])
    return lowering.emit("cast", [lowering.emit("compare", [value, classes], relation="eq")], dtype="int64")


def _embedding_bag(lowering: Lowering, call: Call) -> Lowered:
    """Rows of a table, summed up, averaged, or the largest of them, in bags of one length."""
    (bags,), (numbers,) = shape_of(call["offsets"]), shape_of(call["indices"])
    length, known = numbers // bags, lowering.sized(call["offsets"])
    even = known and all(torch.equal(found, torch.arange(-bags * batch) * length) for batch, found in known)
    if call["include_last_offset"] or not even or bags * length != numbers:
        raise call.unsupported("of bags that differ in length")
    at = lowering.emit("view", [lowering.value(call["indices"])], shape=(bags, length))
    padding = -1 if call["padding_idx"] is None else call["padding_idx"]
    rows = lowering.emit("embedding", [at], [lowering.tensor(call["weight"])], padding_idx=padding)
    if call["per_sample_weights"] is not None:
        weights = lowering.emit("view", [lowering.value(call["per_sample_weights"])], shape=(bags, length, 1))
        rows = lowering.emit("mul", [rows, weights])
    if padding >= 0:
        return (_without_padding(lowering, call, at, rows, padding),)
    return (lowering.emit(("sum", "mean", "amax")[call["mode"]], [rows], dims=(1,)),)


def _without_padding(lowering: Lowering, call: Call, at: int, rows: int, padding: int) -> int:
    """The sum or the mean of the rows that are no padding; of none, 0."""
    if call["mode"] == 2:
        raise call.unsupported("that takes the largest and has padding")
    (bags,), (numbers,) = shape_of(call["offsets"]), shape_of(call["indices"])
    length = numbers // bags
    is_padding = lowering.emit("compare_scalar", [at], relation="eq", value=float(padding))
    mask = lowering.emit("view", [is_padding], shape=(bags, length, 1))
    total = lowering.emit("sum", [lowering.emit("masked_fill", [rows, mask], value=0.0)], dims=(1,))
    if call["mode"] == 0:
        return total
    counted = lowering.emit("cast", [lowering.emit("logical_not", [mask])], dtype="float32")
    count = lowering.emit("clamp", [lowering.emit("sum", [counted], dims=(1,))], min=1.0, max=float(length))
    return lowering.emit("div", [total, count])


# ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bilinear(lowering: Lowering, call: Call) -> int:
    """x₁ᵀ W x₂ for each output: x₁ times all matrices side by side, then the dot products with x₂."""
    (*lead, first), (outputs, _, second) = shape_of(call["input1"]), shape_of(call["weight"])
    weight = lowering.emit("permute", [lowering.value(call["weight"])], dims=(1, 0, 2))
    weight = lowering.emit("view", [weight], shape=(first, outputs * second))
    rows = lowering.emit("matmul", [lowering.value(call["input1"]), weight])
    rows = lowering.emit("view", [rows], shape=(*lead, outputs, second))
    other = lowering.emit("view", [lowering.value(call["input2"])], shape=(*lead, 1, second))
    product = lowering.emit("mul", [rows, other])
    total = lowering.emit("sum", [product], dims=(len(lead) + 1,), keepdim=False)
    return total if call.get("bias") is None else lowering.emit("add", [total, lowering.value(call["bias"])])


COMPOSED: dict[str, Lower] = {
    "glu": _glu,
    "ceil": _ceil,
    "remainder": _remainder,
    "isnan": _isnan,
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), _logical("and")),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), _logical("or")),
    **dict.fromkeys(("logical_xor", "bitwise_xor", "__xor__"), _logical("xor")),
    "max": _extreme(True),
    "min": _extreme(False),
    "amin": _only(_extremum, largest=False),
    "argmax": _only(_place, largest=True),
    "argmin": _only(_place, largest=False),
    "any": _truth(False),
    "all": _truth(True),
    "var": _variance("var"),
    "std": _variance("std"),
    "var_mean": _variance("var and mean"),
    "std_mean": _variance("std and mean"),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _vector_norm),
    "pixel_shuffle": _pixel_shuffle,
    "channel_shuffle": _channel_shuffle,
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "roll": _roll,
    "flip": _flip,
    "index_select": _index_select,
    "gather": _gather,
    "index": _index,
    "one_hot": _one_hot,
    **dict.fromkeys(("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), _embedding_bag),
    "bilinear": _bilinear,
}
