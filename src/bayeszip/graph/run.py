"""What each operator of the closed list computes, in torch; and the stock layers that hold the tensors of some."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayeszip.errors import FormatError
from bayeszip.graph.state import DTYPES

__all__ = ["COMPUTE", "LAYERS"]

#: (inputs, tensors by role, attributes) → the output.
Compute = Callable[[Sequence[Tensor], Sequence[Tensor | None], Mapping[str, Any]], Tensor]

#: (shapes of the tensors by role, attributes) → the stock layer, without values; None: there is none for these.
Layer = Callable[[Sequence[tuple[int, ...] | None], Mapping[str, Any]], nn.Module | None]


def _unary(function: Callable[[Tensor], Tensor]) -> Compute:
    return lambda x, tensors, attributes: function(x[0])


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Compute:
    return lambda x, tensors, attributes: function(x[0], x[1])


def _scalar(function: Callable[[Tensor, Any], Tensor], name: str) -> Compute:
    """An operator on a value and a number, which is whole where the value is and it can be."""

    def compute(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
        number = attributes[name]
        whole = not x[0].is_floating_point() and math.isfinite(number) and number == int(number)
        return function(x[0], int(number) if whole else number)

    return compute


def _clamp(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    value = x[0]
    for function, bound in ((torch.clamp_min, "min"), (torch.clamp_max, "max")):
        if math.isfinite(attributes[bound]):
            value = _scalar(function, bound)([value], tensors, attributes)
    return value


def _linear(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    return F.linear(x[0], tensors[0], tensors[1])  # type: ignore[arg-type]


def _convolution(function: Callable[..., Tensor]) -> Compute:
    def compute(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
        value, padding = x[0], attributes["padding"]
        if attributes["padding_mode"] != "zeros":
            around = [amount for each in reversed(padding) for amount in (each, each)]
            value, padding = F.pad(value, around, mode=attributes["padding_mode"]), 0
        return function(value, *tensors, attributes["stride"], padding, attributes["dilation"], attributes["groups"])

    return compute


def _max_pool(function: Callable[..., Tensor]) -> Compute:
    return lambda x, tensors, a: function(
        x[0], a["kernel_size"], a["stride"], a["padding"], a["dilation"], ceil_mode=a["ceil_mode"]
    )


def _average_pool(function: Callable[..., Tensor]) -> Compute:
    return lambda x, tensors, a: function(
        x[0], a["kernel_size"], a["stride"], a["padding"], a["ceil_mode"], a["count_include_pad"]
    )


def _transposed_convolution(function: Callable[..., Tensor]) -> Compute:
    return lambda x, tensors, a: function(
        x[0], *tensors, a["stride"], a["padding"], a["output_padding"], a["groups"], a["dilation"]
    )


def _batch_norm(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    weight, bias, mean, variance = tensors
    return F.batch_norm(x[0], mean, variance, weight, bias, eps=attributes["eps"])


def _attention(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    mask, scale = x[3] if len(x) > 3 else None, attributes["scale"] or None
    return F.scaled_dot_product_attention(x[0], x[1], x[2], mask, is_causal=attributes["causal"], scale=scale)


def _recurrent(name: str) -> Compute:
    def compute(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
        value = x[0].flip(1) if attributes["reverse"] else x[0]
        weights = [tensor for tensor in tensors if tensor is not None]
        state = value.new_zeros(1, value.shape[0], weights[1].shape[1])
        has_biases = len(weights) == 4
        if name == "lstm":
            result, _, cell = torch.lstm(value, (state, state), weights, has_biases, 1, 0.0, False, False, True)
            if attributes["result"] == "cell":
                return cell[0]
        else:
            function = {"gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[
                attributes.get("activation", name)
            ]
            result, _ = function(value, state, weights, has_biases, 1, 0.0, False, False, True)
        return result.flip(1) if attributes["reverse"] else result

    return compute


def _expand(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    batch = x[1].shape[0]
    return x[0].expand([-size * batch if size < 0 else size for size in attributes["shape"]])


def _interpolate(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    mode = attributes["mode"]
    corners = None if mode.startswith("nearest") else attributes["align_corners"]
    return F.interpolate(x[0], size=attributes["size"], mode=mode, align_corners=corners)


def _pad(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    value = attributes["value"] if attributes["mode"] == "constant" else None
    return F.pad(x[0], attributes["amounts"], attributes["mode"], value)


def _stored(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    (tensor,) = tensors
    if tensor is None:
        raise FormatError("a stored value names no tensor")
    return tensor


def _embedding(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    padding = attributes["padding_idx"]
    return F.embedding(x[0], tensors[0], padding if padding >= 0 else None)  # type: ignore[arg-type]


_RELATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def _input(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    expected = attributes["shape"]
    if tuple(x[0].shape[1:]) != expected:
        raise ValueError(f"the network takes inputs of shape (batch, *{expected}), not {tuple(x[0].shape)}")
    return _cast(x, tensors, attributes) if tensors else x[0]


def _cast(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    """To the type of a tensor, if there is one, else to the one named."""
    like = tensors[0] if tensors else None
    return x[0].to(DTYPES[attributes["dtype"]] if like is None else like.dtype)


COMPUTE: dict[str, Compute] = {
    "input": _input,
    "linear": _linear,
    "conv1d": _convolution(F.conv1d),
    "conv2d": _convolution(F.conv2d),
    "conv3d": _convolution(F.conv3d),
    "max_pool1d": _max_pool(F.max_pool1d),
    "max_pool2d": _max_pool(F.max_pool2d),
    "avg_pool1d": _average_pool(F.avg_pool1d),
    "avg_pool2d": _average_pool(F.avg_pool2d),
    "relu": _unary(torch.relu),
    "tanh": _unary(torch.tanh),
    "sigmoid": _unary(torch.sigmoid),
    "flatten": lambda x, tensors, a: torch.flatten(x[0], a["start_dim"], a["end_dim"]),
    "reshape": lambda x, tensors, a: x[0].reshape(x[0].shape[0], *a["shape"]),
    **dict.fromkeys(("batch_norm1d", "batch_norm2d", "batch_norm3d"), _batch_norm),
    **dict.fromkeys(
        ("instance_norm1d", "instance_norm2d", "instance_norm3d"),
        lambda x, tensors, a: F.instance_norm(x[0], weight=tensors[0], bias=tensors[1], eps=a["eps"]),
    ),
    "layer_norm": lambda x, tensors, a: F.layer_norm(x[0], a["shape"], tensors[0], tensors[1], a["eps"]),
    "group_norm": lambda x, tensors, a: F.group_norm(x[0], a["groups"], tensors[0], tensors[1], a["eps"]),
    "rms_norm": lambda x, tensors, a: F.rms_norm(x[0], a["shape"], tensors[0], a["eps"]),
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "maximum": _binary(torch.maximum),
    "minimum": _binary(torch.minimum),
    "matmul": _binary(torch.matmul),
    "concat": lambda x, tensors, a: torch.cat(list(x), a["dim"]),
    "slice": lambda x, tensors, a: x[0].narrow(a["dim"], a["start"], a["end"] - a["start"]),
    "select": lambda x, tensors, a: x[0].select(a["dim"], a["index"]),
    "permute": lambda x, tensors, a: x[0].permute(a["dims"]),
    "view": lambda x, tensors, a: x[0].reshape([-1 if size < 0 else size for size in a["shape"]]),
    "expand": _expand,
    "pad": _pad,
    "interpolate": _interpolate,
    "adaptive_avg_pool1d": lambda x, tensors, a: F.adaptive_avg_pool1d(x[0], a["output_size"]),
    "adaptive_avg_pool2d": lambda x, tensors, a: F.adaptive_avg_pool2d(x[0], a["output_size"]),
    "adaptive_avg_pool3d": lambda x, tensors, a: F.adaptive_avg_pool3d(x[0], a["output_size"]),
    "adaptive_max_pool1d": lambda x, tensors, a: F.adaptive_max_pool1d(x[0], a["output_size"]),
    "adaptive_max_pool2d": lambda x, tensors, a: F.adaptive_max_pool2d(x[0], a["output_size"]),
    "max_pool3d": _max_pool(F.max_pool3d),
    "avg_pool3d": _average_pool(F.avg_pool3d),
    "mean": lambda x, tensors, a: x[0].mean(a["dims"], a["keepdim"]),
    "sum": lambda x, tensors, a: x[0].sum(a["dims"], a["keepdim"]),
    "amax": lambda x, tensors, a: x[0].amax(a["dims"], a["keepdim"]),
    "argmax": lambda x, tensors, a: x[0].argmax(a["dims"][0], a["keepdim"]),
    "cumsum": lambda x, tensors, a: x[0].cumsum(a["dim"]),
    "take": lambda x, tensors, a: x[0].index_select(a["dim"], x[1]),
    "softmax": lambda x, tensors, a: torch.softmax(x[0], a["dim"]),
    "log_softmax": lambda x, tensors, a: torch.log_softmax(x[0], a["dim"]),
    "attention": _attention,
    "embedding": _embedding,
    "lstm": _recurrent("lstm"),
    "gru": _recurrent("gru"),
    "rnn": _recurrent("rnn"),
    "conv_transpose1d": _transposed_convolution(F.conv_transpose1d),
    "conv_transpose2d": _transposed_convolution(F.conv_transpose2d),
    "conv_transpose3d": _transposed_convolution(F.conv_transpose3d),
    "gelu": lambda x, tensors, a: F.gelu(x[0], approximate=a["approximate"]),
    "silu": _unary(F.silu),
    "relu6": _unary(F.relu6),
    "hardswish": _unary(F.hardswish),
    "hardsigmoid": _unary(F.hardsigmoid),
    "leaky_relu": lambda x, tensors, a: F.leaky_relu(x[0], a["slope"]),
    "elu": lambda x, tensors, a: F.elu(x[0], a["alpha"]),
    "selu": _unary(F.selu),
    "celu": lambda x, tensors, a: F.celu(x[0], a["alpha"]),
    "mish": _unary(F.mish),
    "softplus": lambda x, tensors, a: F.softplus(x[0], a["beta"], a["threshold"]),
    "softsign": _unary(F.softsign),
    "log_sigmoid": _unary(F.logsigmoid),
    "prelu": lambda x, tensors, a: F.prelu(x[0], tensors[0]),  # type: ignore[arg-type]
    "clamp": _clamp,
    "pow": _scalar(torch.pow, "exponent"),
    "exp": _unary(torch.exp),
    "log": _unary(torch.log),
    "sqrt": _unary(torch.sqrt),
    "rsqrt": _unary(torch.rsqrt),
    "reciprocal": _unary(torch.reciprocal),
    "abs": _unary(torch.abs),
    "neg": _unary(torch.neg),
    "sin": _unary(torch.sin),
    "cos": _unary(torch.cos),
    "erf": _unary(torch.erf),
    "sign": _unary(torch.sign),
    "floor": _unary(torch.floor),
    "round": _unary(torch.round),
    "log1p": _unary(torch.log1p),
    "expm1": _unary(torch.expm1),
    "add_scalar": _scalar(torch.add, "value"),
    "mul_scalar": _scalar(torch.mul, "value"),
    "div_scalar": lambda x, tensors, a: x[0] / a["value"],
    "parameter": _stored,
    "buffer": _stored,
    "masked_fill": lambda x, tensors, a: x[0].masked_fill(x[1], a["value"]),
    "where": lambda x, tensors, a: torch.where(x[0], x[1], x[2]),
    "compare_scalar": lambda x, tensors, a: _RELATIONS[a["relation"]](x[0], a["value"]),
    "compare": lambda x, tensors, a: _RELATIONS[a["relation"]](x[0], x[1]),
    "logical_not": _unary(torch.logical_not),
    "cast": _cast,
}


def _linear_layer(shapes: Sequence[tuple[int, ...] | None], attributes: Mapping[str, Any]) -> nn.Module:
    weight = shapes[0] or (0, 0)
    return nn.Linear(weight[1], weight[0], bias=shapes[1] is not None, device="meta")


def _convolution_layer(kind: type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]) -> Layer:
    def build(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module:
        weight = shapes[0] or (0, 0, 0)
        return kind(
            weight[1] * a["groups"],
            weight[0],
            weight[2:],  # type: ignore[arg-type]
            a["stride"],
            a["padding"],
            a["dilation"],
            a["groups"],
            bias=shapes[1] is not None,
            padding_mode=a["padding_mode"],
            device="meta",
        )

    return build


def _transposed_convolution_layer(
    kind: type[nn.ConvTranspose1d] | type[nn.ConvTranspose2d] | type[nn.ConvTranspose3d],
) -> Layer:
    def build(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module:
        weight = shapes[0] or (0, 0, 0)
        return kind(
            weight[0],
            weight[1] * a["groups"],
            weight[2:],  # type: ignore[arg-type]
            a["stride"],
            a["padding"],
            a["output_padding"],
            a["groups"],
            bias=shapes[1] is not None,
            dilation=a["dilation"],
            device="meta",
        )

    return build


def _batch_norm_layer(kind: type[nn.BatchNorm1d] | type[nn.BatchNorm2d] | type[nn.BatchNorm3d]) -> Layer:
    def build(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module | None:
        if (shapes[0] is None) != (shapes[1] is None) or shapes[2] is None:
            return None
        return kind(shapes[2][0], eps=a["eps"], affine=shapes[0] is not None, device="meta")

    return build


def _instance_norm_layer(kind: type[nn.InstanceNorm1d] | type[nn.InstanceNorm2d] | type[nn.InstanceNorm3d]) -> Layer:
    def build(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module | None:
        if shapes[0] is None or shapes[1] is None:
            return None
        return kind(shapes[0][0], eps=a["eps"], affine=True, device="meta")

    return build


def _layer_norm_layer(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module:
    return nn.LayerNorm(a["shape"], eps=a["eps"], bias=shapes[1] is not None, device="meta")


def _rms_norm_layer(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module:
    return nn.RMSNorm(a["shape"], eps=a["eps"], device="meta")


def _group_norm_layer(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module | None:
    if shapes[0] is None or shapes[1] is None:
        return None
    return nn.GroupNorm(a["groups"], shapes[0][0], eps=a["eps"], device="meta")


def _embedding_layer(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module:
    weight = shapes[0] or (0, 0)
    padding = a["padding_idx"]
    return nn.Embedding(weight[0], weight[1], padding if padding >= 0 else None, device="meta")


def _prelu_layer(shapes: Sequence[tuple[int, ...] | None], a: Mapping[str, Any]) -> nn.Module:
    return nn.PReLU((shapes[0] or (0,))[0], device="meta")


LAYERS: dict[str, Layer] = {
    "linear": _linear_layer,
    "conv1d": _convolution_layer(nn.Conv1d),
    "conv2d": _convolution_layer(nn.Conv2d),
    "conv3d": _convolution_layer(nn.Conv3d),
    "conv_transpose1d": _transposed_convolution_layer(nn.ConvTranspose1d),
    "conv_transpose2d": _transposed_convolution_layer(nn.ConvTranspose2d),
    "conv_transpose3d": _transposed_convolution_layer(nn.ConvTranspose3d),
    "batch_norm1d": _batch_norm_layer(nn.BatchNorm1d),
    "batch_norm2d": _batch_norm_layer(nn.BatchNorm2d),
    "batch_norm3d": _batch_norm_layer(nn.BatchNorm3d),
    "instance_norm1d": _instance_norm_layer(nn.InstanceNorm1d),
    "instance_norm2d": _instance_norm_layer(nn.InstanceNorm2d),
    "instance_norm3d": _instance_norm_layer(nn.InstanceNorm3d),
    "layer_norm": _layer_norm_layer,
    "rms_norm": _rms_norm_layer,
    "group_norm": _group_norm_layer,
    "embedding": _embedding_layer,
    "prelu": _prelu_layer,
}
