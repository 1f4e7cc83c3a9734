"""Accuracy of a network as it is."""

import torch
from torch import Tensor, nn

from bayeszip.errors import DataError
from bayeszip.fitting.batches import Inputs, Loader, called_with, on_device, running

__all__ = ["class_dim", "evaluate"]


@torch.no_grad()
def evaluate(network: nn.Module, loader: Loader, *, cast: bool = False) -> float:
    """Share of examples whose largest output is the target's, with the weights at their means.

    Args:
        cast: give the network floating-point inputs in its own type. A file may give another type back than went in.
    """
    training = network.training
    network.eval()
    parameter = next(network.parameters())
    device = parameter.device
    right = torch.zeros((), dtype=torch.int64, device=device)
    total = 0
    for inputs, targets in on_device(loader, device):
        with running("evaluation"):
            outputs = called_with(network, _cast(inputs, parameter.dtype) if cast else inputs)
            dim = class_dim(outputs, targets)
            if dim is None or not isinstance(targets, Tensor):
                raise DataError(
                    f"accuracy needs a class for each target, but outputs are {_shape(outputs)} and targets "
                    f"{_shape(targets)}; for other tasks leave the validation data out"
                )
            right += (outputs.argmax(dim=dim) == targets).sum()
        total += targets.numel()
    network.train(training)
    if not total:
        raise DataError("there is nothing to evaluate on: the data gave no batch")
    return right.item() / total


def class_dim(outputs: object, targets: Inputs) -> int | None:
    """The dimension of outputs that targets, as classes, lack: the last, or as for images the second; None: neither."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if outputs.shape[:-1] == targets.shape:
        return -1
    return 1 if outputs.shape[:1] + outputs.shape[2:] == targets.shape else None


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"{len(value)} tensors" if isinstance(value, tuple | list) else type(value).__name__


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
