"""Gradients added and scaled in few passes over memory, for terms that know theirs in closed form."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_to_gradients", "scaled"]


@torch.no_grad()
def add_to_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add to what each parameter has by now, in one pass; one that has none takes what it is given."""
    totals: list[Tensor] = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(gradient)
        totals.append(parameter.grad)
    torch._foreach_add_(totals, tuple(gradients))


def scaled(gradients: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    """Each gradient times a scalar, without a pass over them where that is 1 (asking a GPU would make it wait)."""
    if factor.device.type == "cpu" and factor.item() == 1:
        return gradients
    return torch._foreach_mul(list(gradients), factor)
