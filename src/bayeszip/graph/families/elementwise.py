"""Operators that treat each element by itself, or with the one at the same place."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F

from bayeszip.errors import ModelError
from bayeszip.graph.families.base import UNKNOWN, Atoms, Attributes, Held, Rule, Shape, Site, Values
from bayeszip.graph.lowering import Call, Lower, Lowering
from bayeszip.graph.state import DTYPES
from bayeszip.operators import AttributeValue
from bayeszip.tensors import Node

__all__ = ["ATEN", "OPERATORS", "Elementwise", "cast", "lower_cast"]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _gelu(x: np.ndarray, approximate: str) -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def _elu(x: np.ndarray, alpha: float, scale: float = 1.0, slope: float = 1.0) -> np.ndarray:
    return scale * np.where(x > 0, x, alpha * np.expm1(x * slope))


def _softplus(x: np.ndarray, beta: float = 1.0, threshold: float = 20.0) -> np.ndarray:
    return np.where(x * beta > threshold, x, np.logaddexp(0.0, x * beta) / beta)


_SHORT = (torch.float16, torch.bfloat16)


def _one(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((1, 1), dtype=dtype)


class Elementwise(Rule):
    """Values meet at the same place, or are repeated along dimensions where they have but one element."""

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        rank = max(len(shape) for shape in inputs)
        aligned = [(1,) * (rank - len(shape)) + shape for shape in inputs]
        return tuple(_broadcast(node, sizes, inputs) for sizes in zip(*aligned, strict=True))

    def rehearse(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        """On one element of each: types and numbers are all that can be wrong."""
        shape = np.broadcast_shapes(*(each.shape for each in x))  # that of torch imports sympy
        own = [None if each is None else _one(each.dtype) for each in tensors]
        try:
            result = self.compute([_one(each.dtype) for each in x], own, a)
        except RuntimeError as error:
            # What this processor can't compute in 16 bits, another can.
            if "not implemented for" not in str(error) or not any(each.dtype in _SHORT for each in x):
                raise
            wide = [_one(torch.float32 if each.dtype in _SHORT else each.dtype) for each in x]
            result = self.compute(wide, own, a)
            result = result.to(x[0].dtype) if result.is_floating_point() else result
        return torch.empty(shape, dtype=result.dtype, device="meta")

    def couple(self, site: Site, atoms: Atoms) -> None:
        for value in site.inputs:
            skipped = len(site.output.shape) - len(value.shape)
            for dim, size in enumerate(value.shape):
                if size == site.output.shape[dim + skipped]:
                    atoms.join(value.coordinates[dim], site.output.coordinates[dim + skipped])
                else:
                    atoms.pin(value.coordinates[dim])


class Unary(Elementwise):
    """An activation function: coordinates pass through, a constant becomes another constant.

    Args:
        constant: what it does to a constant. NaN in, NaN out; what is not finite counts as unknown.
        function: the same in torch.
        attributes: the names of further arguments of both.
        floating: whether torch knows it for floating-point numbers only.
    """

    def __init__(
        self,
        constant: Callable[..., np.ndarray],
        function: Callable[..., torch.Tensor],
        *attributes: str,
        floating: bool = False,
    ) -> None:
        self._constant, self._function, self._attributes = constant, function, attributes
        self.floating = floating

    def constants(self, site: Site) -> np.ndarray:
        return self._constant(site.inputs[0].constants, *(site.node.attributes[name] for name in self._attributes))

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return self._function(x[0], *(a[name] for name in self._attributes))


class Scalar(Unary):
    """A value and a number, which is whole where the value is and it can be."""

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return _with_number(self._function, x[0], a[self._attributes[0]])


class Clamp(Unary):
    """Between two numbers, each of which may be infinite."""

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        value = x[0]
        for function, bound in ((torch.clamp_min, a["min"]), (torch.clamp_max, a["max"])):
            value = _with_number(function, value, bound) if math.isfinite(bound) else value
        return value


def _with_number(function: Callable[..., torch.Tensor], value: torch.Tensor, number: float) -> torch.Tensor:
    whole = not value.is_floating_point() and math.isfinite(number) and number == int(number)
    return function(value, int(number) if whole else number)


class Compared(Elementwise):
    """Values, or a value and a number or a type, of which nothing is known to be constant."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return self._function(x, a)


class Cast(Elementwise):
    """To another type: a floating-point one stands for the one that the network computes in."""

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return cast(x[0], tensors, a["dtype"])


def cast(value: torch.Tensor, tensors: Sequence[torch.Tensor | None], dtype: str) -> torch.Tensor:
    """To the type of a tensor, if there is one, else to the one named."""
    like = tensors[0] if tensors else None
    return value.to(DTYPES[dtype] if like is None else like.dtype)


class Binary(Elementwise):
    """Two values, element by element."""

    def __init__(
        self,
        constant: Callable[[np.ndarray, np.ndarray], np.ndarray],
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        zero_wins: bool = False,
    ) -> None:
        self._constant, self._function, self._zero_wins = constant, function, zero_wins

    def constants(self, site: Site) -> np.ndarray:
        first, second = (
            value.constants.reshape((1,) * (len(site.output.shape) - value.constants.ndim) + value.constants.shape)
            for value in site.inputs
        )
        result = self._constant(first, second)
        # Nothing times zero is nothing, whatever the other is.
        return np.where((first == 0) | (second == 0), 0.0, result) if self._zero_wins else result

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return self._function(x[0], x[1])


class PReLU(Elementwise):
    """A leaky ReLU whose slope is learned, one for all channels (dimension 1) or one for each."""

    floating = True

    def check_tensors(self, node: Node, tensors: Sequence[Shape | None]) -> None:
        """weight: one, or as many as channels."""
        if tensors[0] is None or len(tensors[0]) != 1 or not tensors[0][0]:
            raise ModelError(f"prelu: slopes of shape {tensors[0]} are neither one nor one for each channel")

    def shape(self, node: Node, inputs: Sequence[Shape], tensors: Sequence[Shape | None]) -> Shape:
        (shape,), slopes = inputs, tensors[0]
        if slopes != (1,) and (len(shape) < 2 or slopes != (shape[1],)):
            raise ModelError(f"prelu: slopes of shape {slopes} don't fit a value of shape {shape}")
        return shape

    def compute(self, x: Values, tensors: Held, a: Attributes) -> torch.Tensor:
        return F.prelu(x[0], tensors[0].view(-1))  # type: ignore[union-attr]

    def layer(self, shapes: Sequence[Shape | None], a: Attributes) -> nn.Module | None:
        return nn.PReLU((shapes[0] or (0,))[0], device="meta")

    def couple(self, site: Site, atoms: Atoms) -> None:
        super().couple(site, atoms)
        (weight,) = site.tensors
        if weight is None or weight.values.size == 1:
            atoms.pin(*(weight.coordinates if weight else ()))
        else:
            atoms.join(weight.coordinates[0], site.output.coordinates[1])

    def constants(self, site: Site) -> np.ndarray:
        (weight,) = site.tensors
        x = site.inputs[0].constants
        if weight is None:
            return np.full_like(x, UNKNOWN)
        slope = weight.values.astype(np.float64)
        slope = slope.reshape(1, -1, *(1,) * (x.ndim - 2)) if slope.size > 1 else slope.reshape(())
        return np.where(x >= 0, x, x * slope)


def _broadcast(node: Node, sizes: Sequence[int], inputs: Sequence[Shape]) -> int:
    wide = {size for size in sizes if size != 1}
    if len(wide) > 1:
        raise ModelError(f"{node.op}: values of shapes {', '.join(map(str, inputs))} don't fit together")
    return wide.pop() if wide else 1


def _relation(name: str) -> Callable[..., torch.Tensor]:
    found: dict[str, Callable[..., torch.Tensor]] = {
        "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    }  # fmt: skip
    return found[name]


def _approximate_gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)

OPERATORS: dict[str, Rule] = {
    "relu": Unary(lambda x: np.maximum(x, 0.0), torch.relu),
    "tanh": Unary(np.tanh, torch.tanh),
    "sigmoid": Unary(_sigmoid, torch.sigmoid),
    "gelu": Unary(_gelu, _approximate_gelu, "approximate", floating=True),
    "silu": Unary(lambda x: x * _sigmoid(x), F.silu, floating=True),
    "relu6": Unary(lambda x: np.clip(x, 0.0, 6.0), F.relu6),
    "hardswish": Unary(lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0, F.hardswish, floating=True),
    "hardsigmoid": Unary(lambda x: np.clip(x + 3.0, 0.0, 6.0) / 6.0, F.hardsigmoid, floating=True),
    "leaky_relu": Unary(lambda x, slope: np.where(x > 0, x, x * slope), F.leaky_relu, "slope", floating=True),
    "elu": Unary(_elu, F.elu, "alpha", floating=True),
    "selu": Unary(lambda x: _elu(x, *_SELU), F.selu, floating=True),
    "celu": Unary(lambda x, alpha: _elu(x, alpha, slope=1.0 / alpha), F.celu, "alpha", floating=True),
    "mish": Unary(lambda x: x * np.tanh(_softplus(x)), F.mish, floating=True),
    "softplus": Unary(_softplus, F.softplus, "beta", "threshold", floating=True),
    "softsign": Unary(lambda x: x / (1.0 + np.abs(x)), F.softsign),
    "log_sigmoid": Unary(lambda x: -np.logaddexp(0.0, -x), F.logsigmoid, floating=True),
    "clamp": Clamp(np.clip, torch.clamp, "min", "max"),
    "pow": Scalar(np.power, torch.pow, "exponent"),
    "exp": Unary(np.exp, torch.exp),
    "log": Unary(np.log, torch.log),
    "sqrt": Unary(np.sqrt, torch.sqrt),
    "rsqrt": Unary(lambda x: 1.0 / np.sqrt(x), torch.rsqrt),
    "reciprocal": Unary(lambda x: 1.0 / x, torch.reciprocal),
    "abs": Unary(np.abs, torch.abs),
    "neg": Unary(np.negative, torch.neg),
    "sin": Unary(np.sin, torch.sin),
    "cos": Unary(np.cos, torch.cos),
    "erf": Unary(_erf, torch.erf),
    "sign": Unary(np.sign, torch.sign),
    "floor": Unary(np.floor, torch.floor),
    "round": Unary(np.round, torch.round),
    "log1p": Unary(np.log1p, torch.log1p),
    "expm1": Unary(np.expm1, torch.expm1),
    "add_scalar": Scalar(np.add, torch.add, "value"),
    "mul_scalar": Scalar(lambda x, value: np.zeros_like(x) if value == 0 else x * value, torch.mul, "value"),
    "div_scalar": Unary(lambda x, value: x / value if value else np.full_like(x, UNKNOWN), torch.true_divide, "value"),
    "prelu": PReLU(),
    "add": Binary(np.add, torch.add),
    "sub": Binary(np.subtract, torch.sub),
    "mul": Binary(np.multiply, torch.mul, zero_wins=True),
    "div": Binary(np.divide, torch.div),
    "maximum": Binary(np.maximum, torch.maximum),
    "minimum": Binary(np.minimum, torch.minimum),
    "masked_fill": Compared(lambda x, a: x[0].masked_fill(x[1], a["value"])),
    "where": Compared(lambda x, a: torch.where(x[0], x[1], x[2])),
    "compare_scalar": Compared(lambda x, a: _relation(a["relation"])(x[0], a["value"])),
    "compare": Compared(lambda x, a: _relation(a["relation"])(x[0], x[1])),
    "logical_not": Compared(lambda x, a: torch.logical_not(x[0])),
    "cast": Cast(),
}


# ── from ATen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lower_same(lowering: Lowering, call: Call) -> int:
    """The call returns its input: no node at all."""
    return lowering.value(call.source)


def _lower_dropout(lowering: Lowering, call: Call) -> int:
    if call["train"]:
        raise call.unsupported("that drops in eval mode too")
    return lowering.value(call.source)


def lower_cast(lowering: Lowering, call: Call) -> int:
    """Between floating-point types nothing happens: the loaded network computes in one of them throughout."""
    before, after = call.source.meta["val"].dtype, call.node.meta["val"].dtype
    if before == after or (before.is_floating_point and after.is_floating_point):
        return lowering.value(call.source)
    return lowering.emit("cast", [lowering.value(call.source)], dtype=str(after).removeprefix("torch."))


def _lower_unary(op: str, **attributes: str) -> Lower:
    """An operator on one value; `attributes`: ours → the name of ATen's argument."""

    def lower(lowering: Lowering, call: Call) -> int:
        given: dict[str, AttributeValue] = {}
        for ours, name in attributes.items():
            value = call[name]
            given[ours] = value if isinstance(value, str) else float(value)
        return lowering.emit(op, [lowering.value(call.source)], (), **given)

    return lower


def _lower_clamp(lowering: Lowering, call: Call) -> int:
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


def _lower_elu(lowering: Lowering, call: Call) -> int:
    if "scale" in call and (call["scale"] != 1 or call["input_scale"] != 1):
        raise call.unsupported("with a scale")
    return lowering.emit("elu", [lowering.value(call.source)], alpha=float(call["alpha"]))


def _lower_prelu(lowering: Lowering, call: Call) -> int:
    return lowering.emit("prelu", [lowering.value(call.source)], [lowering.tensor(call["weight"])])


def _lower_add(lowering: Lowering, call: Call) -> int:
    return _lower_sum(lowering, call, call.source, call["other"], call["alpha"])


def _lower_sub(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if number is None and call["alpha"] == 1:
        return lowering.emit("sub", [lowering.value(call.source), lowering.value(call["other"])])
    return _lower_sum(lowering, call, call.source, call["other"], -call["alpha"])


def _lower_rsub(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if number is None:
        return _lower_sum(lowering, call, call["other"], call.source, -call["alpha"])
    negative = lowering.emit("mul_scalar", [lowering.value(call.source)], value=-float(call["alpha"]))
    return lowering.emit("add_scalar", [negative], value=number)


def _lower_sum(lowering: Lowering, call: Call, first: Any, second: Any, factor: float) -> int:
    """first + factor·second."""
    number = lowering.number(second)
    if number is not None:
        return lowering.emit("add_scalar", [lowering.value(first)], value=number * factor)
    other = lowering.value(second)
    if factor != 1:
        other = lowering.emit("mul_scalar", [other], value=float(factor))
    return lowering.emit("add", [lowering.value(first), other])


def _lower_mul(lowering: Lowering, call: Call) -> int:
    first, second = call.source, call["other"]
    for one, other in ((first, second), (second, first)):
        number = lowering.number(other)
        if number is not None:
            return lowering.emit("mul_scalar", [lowering.value(one)], value=number)
    return lowering.emit("mul", [lowering.value(first), lowering.value(second)])


def _lower_div(lowering: Lowering, call: Call) -> int:
    if "rounding_mode" in call and call["rounding_mode"] is not None:
        return _lower_rounded_div(lowering, call)
    number = lowering.number(call["other"])
    if number is not None:
        return lowering.emit("div_scalar", [lowering.value(call.source)], value=number)
    return lowering.emit("div", [lowering.value(call.source), lowering.value(call["other"])])


def _lower_rounded_div(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if call["rounding_mode"] != "floor" or number is None or not call.source.meta["val"].is_floating_point():
        raise call.unsupported("with rounding, of whole numbers or by a value")
    return lowering.emit("floor", [lowering.emit("div_scalar", [lowering.value(call.source)], value=number)])


def _lower_pow(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["exponent"]) if "exponent" in call else 2.0
    if not isinstance(call.source, fx.Node) and float(call.source) > 0:
        # A number to a power that varies: aˣ = exp(x ln a).
        power = lowering.emit("mul_scalar", [lowering.value(call["exponent"])], value=math.log(float(call.source)))
        return lowering.emit("exp", [power])
    if number is None or not isinstance(call.source, fx.Node):
        raise call.unsupported("to a power that varies")
    return lowering.emit("pow", [lowering.value(call.source)], exponent=number)


def _lower_binary(op: str) -> Lower:
    return lambda lowering, call: lowering.emit(op, [lowering.value(call.source), lowering.value(call["other"])])


def _lower_round(lowering: Lowering, call: Call) -> int:
    if call.get("decimals"):
        raise call.unsupported("to decimals")
    return lowering.emit("round", [lowering.value(call.source)])


def _lower_masked_fill(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["value"])
    if number is None:
        raise call.unsupported("with a value that varies")
    return lowering.emit("masked_fill", [lowering.value(call.source), lowering.value(call["mask"])], value=number)


def _lower_where(lowering: Lowering, call: Call) -> int:
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


def _lower_compare(lowering: Lowering, call: Call) -> int:
    number = lowering.number(call["other"])
    if number is None:
        values = [lowering.value(call.source), lowering.value(call["other"])]
        return lowering.emit("compare", values, relation=call.name)
    return lowering.emit("compare_scalar", [lowering.value(call.source)], relation=call.name, value=number)


def _lower_logical_not(lowering: Lowering, call: Call) -> int:
    if call.source.meta["val"].dtype != torch.bool:
        raise call.unsupported("of numbers")
    return lowering.emit("logical_not", [lowering.value(call.source)])


ATEN: dict[str, Lower] = {
    **dict.fromkeys(("contiguous", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy"), _lower_same),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _lower_dropout),
    **dict.fromkeys(("to", "_to_copy", "type_as"), lower_cast),
    **{
        name: _lower_unary(name)
        for name in (
            "relu",
            "tanh",
            "sigmoid",
            "silu",
            "relu6",
            "hardswish",
            "hardsigmoid",
            "selu",
            "mish",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "abs",
            "neg",
            "sin",
            "cos",
            "erf",
            "log_sigmoid",
            "sign",
            "floor",
            "log1p",
            "expm1",
        )
    },
    "gelu": _lower_unary("gelu", approximate="approximate"),
    "leaky_relu": _lower_unary("leaky_relu", slope="negative_slope"),
    "elu": _lower_elu,
    "celu": _lower_unary("celu", alpha="alpha"),
    "softplus": _lower_unary("softplus", beta="beta", threshold="threshold"),
    "prelu": _lower_prelu,
    **dict.fromkeys(("hardtanh", "clamp", "clamp_min", "clamp_max", "clip"), _lower_clamp),
    "add": _lower_add,
    "sub": _lower_sub,
    "rsub": _lower_rsub,
    **dict.fromkeys(("mul", "multiply"), _lower_mul),
    **dict.fromkeys(("div", "true_divide"), _lower_div),
    **dict.fromkeys(("pow", "square"), _lower_pow),
    "round": _lower_round,
    "maximum": _lower_binary("maximum"),
    "minimum": _lower_binary("minimum"),
    "masked_fill": _lower_masked_fill,
    "where": _lower_where,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _lower_compare),
    **dict.fromkeys(("logical_not", "bitwise_not"), _lower_logical_not),
}
