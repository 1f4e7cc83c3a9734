"""What each operator of the closed list computes, in torch; and the stock layers that hold the tensors of some."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["COMPUTE", "LAYERS"]

#: (inputs, tensors by role, attributes) → the output.
Compute = Callable[[Sequence[Tensor], Sequence[Tensor | None], Mapping[str, Any]], Tensor]

#: (shapes of the tensors by role, attributes) → the stock layer, without values.
Layer = Callable[[Sequence[tuple[int, ...] | None], Mapping[str, Any]], nn.Module]


def _unary(function: Callable[[Tensor], Tensor]) -> Compute:
    return lambda x, tensors, attributes: function(x[0])


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


def _input(x: Sequence[Tensor], tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]) -> Tensor:
    expected = attributes["shape"]
    if tuple(x[0].shape[1:]) != expected:
        raise ValueError(f"the network takes inputs of shape (batch, *{expected}), not {tuple(x[0].shape)}")
    return x[0]


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


LAYERS: dict[str, Layer] = {
    "linear": _linear_layer,
    "conv1d": _convolution_layer(nn.Conv1d),
    "conv2d": _convolution_layer(nn.Conv2d),
    "conv3d": _convolution_layer(nn.Conv3d),
}
