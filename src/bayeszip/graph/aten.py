"""From ATen calls, as torch.export leaves them, to our operators: one table, `ATEN`.

Here one call becomes one of our operators; those that become several are in `composed`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from bayeszip.graph.composed import COMPOSED, reduced
from bayeszip.graph.lowering import Call, Lower, Lowered, Lowering, is_used, listed, rank_of, shape_of
from bayeszip.operators import AttributeValue

__all__ = ["ATEN"]


# ── passing through ───────────────────────────────────────────────────────────────────────────────────────────────────


def _same(lowering: Lowering, call: Call) -> int:
    """The call returns its input: no node at all."""
    return lowering.value(call.source)


def _dropout(lowering: Lowering, call: Call) -> int:
    if call["train"]:
        raise call.unsupported("that drops in eval mode too")
    return lowering.value(call.source)


def _cast(lowering: Lowering, call: Call) -> int:
    """Between floating-point types nothing happens: the loaded network computes in one of them throughout."""
    before, after = call.source.meta["val"].dtype, call.node.meta["val"].dtype
    if before == after or (before.is_floating_point and after.is_floating_point):
        return lowering.value(call.source)
    return lowering.emit("cast", [lowering.value(call.source)], dtype=str(after).removeprefix("torch."))


# ── elements ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _unary(op: str, **attributes: str) -> Lower:
    """An operator on one value; `attributes`: ours → the name of ATen's argument."""

    def lower(lowering: Lowering, call: Call) -> int:
        given: dict[str, AttributeValue] = {}
        for ours, name in attributes.items():
            value = call[name]
            given[ours] = value if isinstance(value, str) else float(value)
        return lowering.emit(op, [lowering.value(call.source)], (), **given)

    return lower


def _clamp(lowering: Lowering, call: Call) -> int:
    bounds = [call.get(name, None) for name in ("min", "max")]
    if call.name == "hardtanh":
        bounds = [call["min_val"], call["max_val"]]
    numbers = [None if each is None else lowering.number(each) for each in bounds]
    if any(each is not None and found is None for each, found in zip(bounds, numbers, strict=True)):
        raise call.unsupported("between tensors")
    low, high = (
        default if each is None else each for each, default in zip(numbers, (-math.inf, math.inf), strict=True)
    )
    return lowering.emit("clamp", [lowering.value(call.source)], min=low, max=high)


def _elu(lowering: Lowering, call: Call) -> int:
    if "scale" in call and (call["scale"] != 1 or call["input_scale"] != 1):
        raise call.unsupported("with a scale")
    return lowering.emit("elu", [lowering.value(call.source)], alpha=float(call["alpha"]))


def _prelu(lowering: Lowering, call: Call) -> int:
    return lowering.emit("prelu", [lowering.value(call.source)], [lowering.tensor(call["weight"])])


def _add(lowering: Lowering, call: Call) -> int:
    return _sum(lowering, call, call.source, call["other"], call["alpha"])


def _sub(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if number is None and call["alpha"] == 1:
        return lowering.emit("sub", [lowering.value(call.source), lowering.value(call["other"])])
    return _sum(lowering, call, call.source, call["other"], -call["alpha"])


def _rsub(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if number is None:
        return _sum(lowering, call, call["other"], call.source, -call["alpha"])
    negative = lowering.emit("mul_scalar", [lowering.value(call.source)], value=-float(call["alpha"]))
    return lowering.emit("add_scalar", [negative], value=number)


def _sum(lowering: Lowering, call: Call, first: Any, second: Any, factor: float) -> int:
    """first + factor·second."""
    number = lowering.number(second)
    if number is not None:
        return lowering.emit("add_scalar", [lowering.value(first)], value=number * factor)
    other = lowering.value(second)
    if factor != 1:
        other = lowering.emit("mul_scalar", [other], value=float(factor))
    return lowering.emit("add", [lowering.value(first), other])


def _mul(lowering: Lowering, call: Call) -> int:
    first, second = call.source, call["other"]
    for one, other in ((first, second), (second, first)):
        number = lowering.number(other)
        if number is not None:
            return lowering.emit("mul_scalar", [lowering.value(one)], value=number)
    return lowering.emit("mul", [lowering.value(first), lowering.value(second)])


def _div(lowering: Lowering, call: Call) -> int:
    if "rounding_mode" in call and call["rounding_mode"] is not None:
        return _rounded_div(lowering, call)
    number = lowering.number(call["other"])
    if number is not None:
        return lowering.emit("div_scalar", [lowering.value(call.source)], value=number)
    return lowering.emit("div", [lowering.value(call.source), lowering.value(call["other"])])


def _rounded_div(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if call["rounding_mode"] != "floor" or number is None or not call.source.meta["val"].is_floating_point():
        raise call.unsupported("with rounding, of whole numbers or by a value")
    return lowering.emit("floor", [lowering.emit("div_scalar", [lowering.value(call.source)], value=number)])


def _pow(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["exponent"]) if "exponent" in call else 2.0
    if not isinstance(call.source, fx.Node) and float(call.source) > 0:
        # A number to a power that varies: aˣ = exp(x ln a).
        power = lowering.emit("mul_scalar", [lowering.value(call["exponent"])], value=math.log(float(call.source)))
        return lowering.emit("exp", [power])
    if number is None or not isinstance(call.source, fx.Node):
        raise call.unsupported("to a power that varies")
    return lowering.emit("pow", [lowering.value(call.source)], exponent=number)


def _binary(op: str) -> Lower:
    return lambda lowering, call: lowering.emit(op, [lowering.value(call.source), lowering.value(call["other"])])


def _round(lowering: Lowering, call: Call) -> int:
    if call.get("decimals"):
        raise call.unsupported("to decimals")
    return lowering.emit("round", [lowering.value(call.source)])


def _masked_fill(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["value"])
    if number is None:
        raise call.unsupported("with a value that varies")
    return lowering.emit("masked_fill", [lowering.value(call.source), lowering.value(call["mask"])], value=number)


def _where(lowering: Lowering, call: Call) -> int:
    mask = lowering.value(call["condition"])
    values = [call["self"], call["other"]]
    numbers = [lowering.number(each) for each in values]
    if numbers[0] is not None and numbers[1] is None:
        return lowering.emit("masked_fill", [lowering.value(values[1]), mask], value=numbers[0])
    if numbers[1] is not None and numbers[0] is None:
        inverse = lowering.emit("logical_not", [mask])
        return lowering.emit("masked_fill", [lowering.value(values[0]), inverse], value=numbers[1])
    if None not in numbers:
        stored = [
            lowering.constant(torch.tensor(number, dtype=call.node.meta["val"].dtype), call.node) for number in numbers
        ]
        return lowering.emit("where", [mask, *stored])
    return lowering.emit("where", [mask, *(lowering.value(each) for each in values)])


def _compare(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if number is None:
        values = [lowering.value(call.source), lowering.value(call["other"])]
        return lowering.emit("compare", values, relation=call.name)
    return lowering.emit("compare_scalar", [lowering.value(call.source)], relation=call.name, value=number)


def _logical_not(lowering: Lowering, call: Call) -> int:
    if call.source.meta["val"].dtype != torch.bool:
        raise call.unsupported("of numbers")
    return lowering.emit("logical_not", [lowering.value(call.source)])


# ── layers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _linear(lowering: Lowering, call: Call) -> int:
    value, weight, bias = lowering.value(call["input"]), call["weight"], call["bias"]
    if lowering.is_tensor(weight) and (bias is None or lowering.is_tensor(bias)):
        return lowering.emit("linear", [value], [lowering.tensor(weight), lowering.tensor(bias)])
    # A weight that is computed, a part of packed projections, for example.
    if rank_of(weight) != 2:
        raise call.unsupported("with a weight that is no matrix")
    turned = lowering.emit("permute", [lowering.value(weight)], dims=(1, 0))
    product = lowering.emit("matmul", [value, turned])
    return product if bias is None else lowering.emit("add", [product, lowering.value(bias)])


def _convolution(dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call["input"]) != dims + 2:
            raise call.unsupported("without a batch dimension")
        dilation = _repeated(call["dilation"], dims)
        value, padding = lowering.value(call["input"]), call["padding"]
        if isinstance(padding, str):
            value, padding = _named_padding(lowering, call, value, padding, dilation)
        return lowering.emit(
            f"conv{dims}d",
            [value],
            [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])],
            stride=_repeated(call["stride"], dims),
            padding=_repeated(padding, dims),
            dilation=dilation,
            groups=call["groups"],
        )

    return lower


def _named_padding(
    lowering: Lowering, call: Call, value: int, padding: str, dilation: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """'same' and 'valid' as numbers; where 'same' is not the same on both sides, the value is padded beforehand."""
    kernel = shape_of(call["weight"])[2:]
    if padding == "valid":
        return value, (0,) * len(kernel)
    total = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if any(each % 2 for each in total):
        # torch puts what is odd behind.
        extra = tuple(amount for each in reversed(total) for amount in (0, each % 2))
        value = lowering.emit("pad", [value], amounts=extra)
    return value, tuple(each // 2 for each in total)


def _transposed_convolution(dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call["input"]) != dims + 2:
            raise call.unsupported("without a batch dimension")
        return lowering.emit(
            f"conv_transpose{dims}d",
            [lowering.value(call["input"])],
            [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])],
            groups=call["groups"],
            **{name: _repeated(call[name], dims) for name in ("stride", "padding", "dilation", "output_padding")},
        )

    return lower


def _batch_norm(lowering: Lowering, call: Call) -> int:
    if call["running_mean"] is None or (call.get("training")):
        raise call.unsupported("without running statistics")
    roles = ("weight", "bias", "running_mean", "running_var")
    dims = max(1, rank_of(call.source) - 2)
    if dims > 3:
        raise call.unsupported(f"over {dims} dimensions")
    tensors = [lowering.tensor(call[role]) for role in roles]
    return lowering.emit(f"batch_norm{dims}d", [lowering.value(call.source)], tensors, eps=call["eps"])


def _batch_norm_of_three(lowering: Lowering, call: Call) -> Lowered:
    return (_batch_norm(lowering, call),)


def _instance_norm(lowering: Lowering, call: Call) -> int:
    if not call["use_input_stats"]:
        return _batch_norm(lowering, call)
    dims = rank_of(call.source) - 2
    if dims not in (1, 2, 3):
        raise call.unsupported(f"over {dims} dimensions")
    tensors = [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])]
    return lowering.emit(f"instance_norm{dims}d", [lowering.value(call.source)], tensors, eps=call["eps"])


def _layer_norm(lowering: Lowering, call: Call) -> int:
    tensors = [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])]
    shape = tuple(call["normalized_shape"])
    return lowering.emit("layer_norm", [lowering.value(call.source)], tensors, eps=call["eps"], shape=shape)


def _layer_norm_of_three(lowering: Lowering, call: Call) -> Lowered:
    return (_layer_norm(lowering, call),)


def _rms_norm(lowering: Lowering, call: Call) -> int:
    eps = torch.finfo(call.source.meta["val"].dtype).eps if call["eps"] is None else float(call["eps"])
    shape = tuple(call["normalized_shape"])
    return lowering.emit(
        "rms_norm", [lowering.value(call.source)], [lowering.tensor(call["weight"])], shape=shape, eps=eps
    )


def _group_norm(lowering: Lowering, call: Call) -> int:
    tensors = [lowering.tensor(call["weight"]), lowering.tensor(call["bias"])]
    return lowering.emit(
        "group_norm", [lowering.value(call.source)], tensors, eps=call["eps"], groups=call["num_groups"]
    )


def _embedding(lowering: Lowering, call: Call) -> int:
    weight, padding = lowering.tensor(call["weight"]), call["padding_idx"]
    return lowering.emit("embedding", [lowering.value(call["indices"])], [weight], padding_idx=padding)


def _recurrent(op: str, **attributes: AttributeValue) -> Lower:
    """All layers and directions of a recurrent module, one node each; its results are (output, states)."""

    def lower(lowering: Lowering, call: Call) -> Lowered:
        states = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
        if not all(_is_zero(lowering, each) for each in states):
            raise call.unsupported("with an initial state")
        has_biases, layers, both = call["has_biases"], call["num_layers"], call["bidirectional"]
        parameters = [lowering.tensor(each) for each in call["params"]]
        each_has = 4 if has_biases else 2
        if len(parameters) != each_has * layers * (2 if both else 1) or rank_of(call["input"]) != 3:
            raise call.unsupported("with projections or without a batch dimension")
        value = lowering.value(call["input"])
        value = value if call["batch_first"] else lowering.emit("permute", [value], dims=(1, 0, 2))
        batch, steps = -1, abs(shape_of(call["input"])[1 if call["batch_first"] else 0])
        hidden: list[int] = []
        cells: list[int] = []
        for layer in range(layers):
            outputs = []
            for direction in range(2 if both else 1):
                start = (layer * (2 if both else 1) + direction) * each_has
                tensors = ([*parameters[start : start + each_has], None, None])[:4]
                given: dict[str, AttributeValue] = {**attributes, "reverse": bool(direction)}
                outputs.append(lowering.emit(op, [value], tensors, **given))
                units = int(call["params"][start + 1].meta["val"].shape[1])
                if is_used(call.node, 1):
                    last = lowering.emit("select", [outputs[-1]], dim=1, index=0 if direction else steps - 1)
                    hidden.append(lowering.emit("view", [last], shape=(1, batch, units)))
                if op == "lstm" and is_used(call.node, 2):
                    cell = lowering.emit(op, [value], tensors, **given, result="cell")
                    cells.append(lowering.emit("view", [cell], shape=(1, batch, units)))
            value = outputs[0] if len(outputs) == 1 else lowering.emit("concat", outputs, dim=2)
        value = value if call["batch_first"] else lowering.emit("permute", [value], dims=(1, 0, 2))
        # A state that nobody takes has no node; the output stands in its place.
        return (value, *(_joined(lowering, each, 0) if each else value for each in (hidden, cells)))

    return lower


def _joined(lowering: Lowering, values: list[int], dim: int) -> int:
    return values[0] if len(values) == 1 else lowering.emit("concat", values, dim=dim)


def _is_zero(lowering: Lowering, node: Any) -> bool:
    known = lowering.known(node)
    if known is not None:
        return not known.any()
    return isinstance(node, fx.Node) and str(node.target).split(".")[-2:-1] in (
        ["zeros"],
        ["new_zeros"],
        ["zeros_like"],
    )


# ── pools and sizes ───────────────────────────────────────────────────────────────────────────────────────────────────


def _pool(op: str, dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call.source) != dims + 2:
            raise call.unsupported("without a batch dimension")
        kernel = _repeated(call["kernel_size"], dims)
        attributes: dict[str, AttributeValue] = {
            "kernel_size": kernel,
            "stride": _repeated(call["stride"], dims) if call["stride"] else kernel,
            "padding": _repeated(call["padding"], dims),
            "ceil_mode": bool(call["ceil_mode"]),
        }
        if "count_include_pad" in call:
            attributes["count_include_pad"] = bool(call["count_include_pad"])
            if "divisor_override" in call and call["divisor_override"] is not None:
                raise call.unsupported("with divisor_override")
        else:
            attributes["dilation"] = _repeated(call["dilation"], dims)
        return lowering.emit(op, [lowering.value(call.source)], (), **attributes)

    return lower


def _first(lower: Lower) -> Lower:
    """The same where ATen returns several results of which we know the first."""

    def lowered(lowering: Lowering, call: Call) -> Lowered:
        result = lower(lowering, call)
        return (result,) if isinstance(result, int) else result

    return lowered


def _adaptive_pool(op: str, dims: int) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        if rank_of(call.source) != dims + 2:
            raise call.unsupported("without a batch dimension")
        return lowering.emit(op, [lowering.value(call.source)], output_size=call.shape[2:])

    return lower


def _interpolate(mode: str) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        before, after = shape_of(call.source)[2:], call.shape[2:]
        factors = call.get("scale_factors", None)
        if factors is not None and any(
            size * factor != new for size, factor, new in zip(before, factors, after, strict=True)
        ):
            raise call.unsupported("by a factor that doesn't lead to a whole size")
        corners = bool(call["align_corners"]) if "align_corners" in call else False
        return lowering.emit("interpolate", [lowering.value(call.source)], size=after, mode=mode, align_corners=corners)

    return lower


def _pad(mode: str | None = None) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        amounts = call["pad"] if "pad" in call else call["padding"]
        if not all(isinstance(each, int) for each in amounts):
            raise call.unsupported("by an amount that varies")
        value = (call.get("value", None)) or 0.0
        return lowering.emit(
            "pad", [lowering.value(call.source)], amounts=tuple(amounts), mode=mode or call["mode"], value=float(value)
        )

    return lower


# ── layout ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _flatten(lowering: Lowering, call: Call) -> int:
    dims = rank_of(call.source)
    if not dims:
        return _reshape(lowering, call)
    start, end = call["start_dim"] % dims, call["end_dim"] % dims
    if start == end:
        return lowering.value(call.source)
    return lowering.emit(
        "flatten", [lowering.value(call.source)], start_dim=start, end_dim=-1 if end == dims - 1 else end
    )


def _reshape(lowering: Lowering, call: Call) -> int:
    """Another shape, said by the shapes before and after, not by how it was asked for."""
    before, after = shape_of(call.source), call.shape
    value = lowering.value(call.source)
    if before == after:
        return value
    if before[:1] == after[:1] == (-1,) and all(size > 0 for size in (*before[1:], *after[1:])):
        if len(after) == 2:
            return lowering.emit("flatten", [value])
        return lowering.emit("reshape", [value], shape=after[1:])
    return lowering.emit("view", [value], shape=after)


def _expand(lowering: Lowering, call: Call) -> int:
    value = lowering.value(call.source)
    if shape_of(call.source) == call.shape:
        return value
    return lowering.emit("expand", [value, lowering.reference()], shape=call.shape)


def _filled(number: float | None) -> Lower:
    """A tensor of one number whose size depends on the batch: a constant for one sample, repeated."""

    def lower(lowering: Lowering, call: Call) -> int:
        value = number if number is not None else float(call["fill_value"])
        sample = torch.full([1 if size < 0 else size for size in call.shape], value, dtype=call.node.meta["val"].dtype)
        constant = lowering.constant(sample, call.node)
        return lowering.emit("expand", [constant, lowering.reference()], shape=call.shape)

    return lower


def _permute(lowering: Lowering, call: Call) -> int:
    rank = rank_of(call.source)
    order = list(range(rank))
    if call.name == "permute":
        order = [dim % rank for dim in call["dims"]]
    elif call.name in ("movedim", "moveaxis"):
        order = _moved(order, listed(call["source"]), listed(call["destination"]))
    elif call.name in ("t", "mT", "numpy_T"):
        order = order[::-1] if call.name != "mT" else [*order[:-2], *order[:-3:-1]]
    else:
        names = ("dim0", "dim1") if "dim0" in call else ("axis0", "axis1")
        one, other = (call[name] % rank for name in names)
        order[one], order[other] = order[other], order[one]
    if order == list(range(rank)):
        return lowering.value(call.source)
    return lowering.emit("permute", [lowering.value(call.source)], dims=tuple(order))


def _moved(order: list[int], sources: list[int], targets: list[int]) -> list[int]:
    rank = len(order)
    placed = {target % rank: source % rank for source, target in zip(sources, targets, strict=True)}
    rest = iter(dim for dim in order if dim not in placed.values())
    return [placed[position] if position in placed else next(rest) for position in range(rank)]


def _concat(lowering: Lowering, call: Call) -> int:
    values = [lowering.value(each) for each in call["tensors"]]
    dim = call["dim"] % len(call.shape)
    if call.shape[dim] < 0:
        raise call.unsupported("along the batch")
    return values[0] if len(values) == 1 else lowering.emit("concat", values, dim=dim)


def _stack(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % len(call.shape)
    one = (*call.shape[:dim], 1, *call.shape[dim + 1 :])
    values = [lowering.emit("view", [lowering.value(each)], shape=one) for each in call["tensors"]]
    return values[0] if len(values) == 1 else lowering.emit("concat", values, dim=dim)


def _slice(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    size, value = shape_of(call.source)[dim], lowering.value(call.source)
    if call.shape[dim] == size:
        return value
    if size < 0:
        raise call.unsupported("along the batch")
    start, end, step = slice(call["start"], call["end"], call["step"]).indices(size)
    return lowering.sliced(value, dim, start, end) if step == 1 else _every(lowering, call, dim, start, step)


def _every(lowering: Lowering, call: Call, dim: int, start: int, step: int) -> int:
    """Every so many-th coordinate of a dimension: the first of each block of `step`."""
    value, shape, count = lowering.value(call.source), shape_of(call.source), call.shape[dim]
    end, size = start + count * step, shape[dim]
    if end > size:
        behind = (0, 0) * (len(shape) - 1 - dim)
        value = lowering.emit("pad", [value], amounts=(*behind, 0, end - size))
    if start or end < size:
        value = lowering.sliced(value, dim, start, end)
    blocks = lowering.emit("view", [value], shape=(*shape[:dim], count, step, *shape[dim + 1 :]))
    return lowering.emit("select", [blocks], dim=dim + 1, index=0)


def _narrow(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    if shape_of(call.source)[dim] < 0 or not isinstance(call["start"], int):
        raise call.unsupported("along the batch, or from where a value says")
    start = call["start"] % max(shape_of(call.source)[dim], 1)
    return lowering.sliced(lowering.value(call.source), dim, start, start + call["length"])


def _select(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    size = shape_of(call.source)[dim]
    if size < 0:
        raise call.unsupported("along the batch")
    return lowering.emit("select", [lowering.value(call.source)], dim=dim, index=call["index"] % size)


def _split(lowering: Lowering, call: Call) -> Lowered:
    dim = call["dim"] % rank_of(call.source)
    value, start, parts = lowering.value(call.source), 0, []
    if shape_of(call.source)[dim] < 0:
        raise call.unsupported("along the batch")
    for part in call.node.meta["val"]:
        size = int(part.shape[dim])
        parts.append(lowering.sliced(value, dim, start, start + size))
        start += size
    return tuple(parts)


def _unbind(lowering: Lowering, call: Call) -> Lowered:
    dim = call["dim"] % rank_of(call.source)
    size, value = shape_of(call.source)[dim], lowering.value(call.source)
    if size < 0:
        raise call.unsupported("along the batch")
    return tuple(lowering.emit("select", [value], dim=dim, index=index) for index in range(size))


# ── reductions and products ───────────────────────────────────────────────────────────────────────────────────────────


def _reduction(op: str) -> Lower:
    # Counting what is true, for example, happens in the dtype of the result.
    return lambda lowering, call: reduced(lowering, call, op, _cast(lowering, call))


def _cumsum(lowering: Lowering, call: Call) -> int:
    dim = call["dim"] % rank_of(call.source)
    if shape_of(call.source)[dim] < 0:
        raise call.unsupported("over the batch")
    return lowering.emit("cumsum", [_cast(lowering, call)], dim=dim)


def _softmax(op: str) -> Lower:
    def lower(lowering: Lowering, call: Call) -> int:
        dim = call["dim"] % rank_of(call.source)
        if shape_of(call.source)[dim] < 0:
            raise call.unsupported("over the batch")
        last = dim == rank_of(call.source) - 1
        return lowering.emit(op, [lowering.value(call.source)], dim=-1 if last else dim)

    return lower


def _matmul(lowering: Lowering, call: Call) -> int:
    first, second = call.source, call["other"] if "other" in call else call["mat2"]
    if min(rank_of(first), rank_of(second)) < 2:
        raise call.unsupported("with a vector")
    return lowering.emit("matmul", [lowering.value(first), lowering.value(second)])


def _addmm(lowering: Lowering, call: Call) -> int:
    names = ("mat1", "mat2") if "mat1" in call else ("batch1", "batch2")
    product = lowering.emit("matmul", [lowering.value(call[name]) for name in names])
    terms = [product, lowering.value(call.source)]
    for place, factor in enumerate((call["alpha"], call["beta"])):
        if factor != 1:
            terms[place] = lowering.emit("mul_scalar", [terms[place]], value=float(factor))
    return lowering.emit("add", terms)


def _heads(lowering: Lowering, call: Call, name: str, outer: Sequence[int]) -> int:
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


def _attention(lowering: Lowering, call: Call) -> int:
    if call["dropout_p"]:
        raise call.unsupported("with dropout")
    outer = shape_of(call["query"])[:-2]
    inputs = [lowering.value(call["query"])]
    inputs += [_heads(lowering, call, name, outer) for name in ("key", "value")]
    if call["attn_mask"] is not None:
        inputs.append(lowering.value(call["attn_mask"]))
    scale = 0.0 if call["scale"] is None else float(call["scale"])
    return lowering.emit("attention", inputs, causal=bool(call["is_causal"]), scale=scale)


def _repeated(value: Any, count: int) -> tuple[int, ...]:
    """An argument that may be one number for all dimensions, as one for each."""
    values = tuple(listed(value))
    return values * count if len(values) == 1 else values


ATEN: dict[str, Lower] = {
    **dict.fromkeys(("contiguous", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy"), _same),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _dropout),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
    **{
        name: _unary(name)
        for name in (
            "relu", "tanh", "sigmoid", "silu", "relu6", "hardswish", "hardsigmoid", "selu", "mish", "exp", "log",
            "sqrt", "rsqrt", "reciprocal", "abs", "neg", "sin", "cos", "erf", "log_sigmoid", "sign", "floor", "log1p",
            "expm1",
        )
    },
    "gelu": _unary("gelu", approximate="approximate"),
    "leaky_relu": _unary("leaky_relu", slope="negative_slope"),
    "elu": _elu,
    "celu": _unary("celu", alpha="alpha"),
    "softplus": _unary("softplus", beta="beta", threshold="threshold"),
    "prelu": _prelu,
    **dict.fromkeys(("hardtanh", "clamp", "clamp_min", "clamp_max", "clip"), _clamp),
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    **dict.fromkeys(("mul", "multiply"), _mul),
    **dict.fromkeys(("div", "true_divide"), _div),
    **dict.fromkeys(("pow", "square"), _pow),
    "round": _round,
    "maximum": _binary("maximum"),
    "minimum": _binary("minimum"),
    "masked_fill": _masked_fill,
    "where": _where,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compare),
    **dict.fromkeys(("logical_not", "bitwise_not"), _logical_not),
    "linear": _linear,
    **{f"conv{dims}d": _convolution(dims) for dims in (1, 2, 3)},
    **{
        name: _transposed_convolution(dims)
        for name, dims in (("conv_transpose1d", 1), ("conv_transpose2d", 2), ("conv_transpose3d", 3))
    },
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm_of_three,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm_of_three,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "embedding": _embedding,
    "lstm": _recurrent("lstm"),
    "gru": _recurrent("gru"),
    "rnn_tanh": _recurrent("rnn"),
    "rnn_relu": _recurrent("rnn", activation="relu"),
    **{f"{kind}_pool{dims}d": _pool(f"{kind}_pool{dims}d", dims) for kind in ("max", "avg") for dims in (1, 2, 3)},
    "max_pool2d_with_indices": _first(_pool("max_pool2d", 2)),
    "max_pool3d_with_indices": _first(_pool("max_pool3d", 3)),
    **{f"adaptive_avg_pool{dims}d": _adaptive_pool(f"adaptive_avg_pool{dims}d", dims) for dims in (1, 2, 3)},
    "_adaptive_avg_pool2d": _adaptive_pool("adaptive_avg_pool2d", 2),
    "_adaptive_avg_pool3d": _adaptive_pool("adaptive_avg_pool3d", 3),
    **{f"adaptive_max_pool{dims}d": _first(_adaptive_pool(f"adaptive_max_pool{dims}d", dims)) for dims in (1, 2)},
    **{f"upsample_nearest{dims}d": _interpolate("nearest") for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": _interpolate("nearest-exact") for dims in (1, 2, 3)},
    "upsample_linear1d": _interpolate("linear"),
    "upsample_bilinear2d": _interpolate("bilinear"),
    "upsample_bicubic2d": _interpolate("bicubic"),
    "upsample_trilinear3d": _interpolate("trilinear"),
    "pad": _pad(),
    "constant_pad_nd": _pad("constant"),
    **{f"reflection_pad{dims}d": _pad("reflect") for dims in (1, 2, 3)},
    **{f"replication_pad{dims}d": _pad("replicate") for dims in (1, 2, 3)},
    "flatten": _flatten,
    **dict.fromkeys(
        ("view", "reshape", "unflatten", "_unsafe_view", "squeeze", "unsqueeze", "view_as", "reshape_as"), _reshape
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("new_zeros", "zeros_like"), _filled(0.0)),
    **dict.fromkeys(("new_ones", "ones_like"), _filled(1.0)),
    **dict.fromkeys(("new_full", "full_like"), _filled(None)),
    **dict.fromkeys(
        ("permute", "transpose", "t", "mT", "numpy_T", "swapaxes", "swapdims", "movedim", "moveaxis"), _permute
    ),
    **dict.fromkeys(("cat", "concat", "concatenate"), _concat),
    "stack": _stack,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split"), _split),
    "unbind": _unbind,
    "mean": _reduction("mean"),
    "sum": _reduction("sum"),
    "amax": _reduction("amax"),
    "cumsum": _cumsum,
    **dict.fromkeys(("softmax", "_softmax"), _softmax("softmax")),
    **dict.fromkeys(("log_softmax", "_log_softmax"), _softmax("log_softmax")),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    "scaled_dot_product_attention": _attention,
    **COMPOSED,
}  # fmt: skip
