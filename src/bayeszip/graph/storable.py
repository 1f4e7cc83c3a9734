"""Networks that can be compressed at all: looked at before a training whose result no file could hold."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from bayeszip.errors import ModelError
from bayeszip.graph.plain import copied, unwrapped
from bayeszip.tensors import RAW_DTYPES

__all__ = ["check_storable", "copied", "parameter_count", "unwrapped"]


def check_storable(network: nn.Module) -> None:
    """Refuse a network with tensors that a file can't hold.

    Raises:
        ModelError: names the tensor, or says that there is none.
    """
    if next(network.parameters(), None) is None:
        raise ModelError(f"{type(network).__name__} has no parameters, so it has no layer that can be compressed")
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        _check(name, tensor)
    for name, buffer in network.named_buffers():
        # Infinite ones are at home in masks.
        if buffer.is_floating_point() and not buffer.is_meta and torch.isnan(buffer).any():
            raise ModelError(f"{name} holds NaN; repair or retrain the network first")


def parameter_count(module: nn.Module) -> int:
    """How many parameters `module` has; one that is used in several places counts once.

    Raises:
        ModelError: a lazy layer has not seen data yet, so nobody knows.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ModelError(f"{name} has no shape yet; run the lazy network once on an example before")
    return sum(parameter.numel() for parameter in module.parameters())


def _check(name: str, tensor: Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ModelError(f"{name} is a {tensor.layout} {dtype} tensor; only dense ones can be compressed or kept")
    if dtype not in RAW_DTYPES:
        raise ModelError(f"{name} is a {dtype} tensor, which can't be stored; convert it to one of these: {_KNOWN}")


_KNOWN = ", ".join(RAW_DTYPES)
