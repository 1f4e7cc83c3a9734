"""What a network returns, whatever its form: a tensor, several, or several by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Outputs", "class_dim", "names_in", "predictions", "restored", "shape_in_words"]

#: The name under which networks that return several tensors have what they predict.
LOGITS = "logits"


class Outputs(dict[str, Any]):
    """Outputs by name, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def predictions(outputs: Any) -> Tensor | None:
    """The tensor that is compared with targets: the only one, the one called `logits`, or the first of a tuple."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        tensors = {name: value for name, value in outputs.items() if isinstance(value, Tensor) and value.dim()}
        return tensors.get(LOGITS, next(iter(tensors.values())) if len(tensors) == 1 else None)
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    return None


def names_in(outputs: Any) -> tuple[str, ...] | None:
    """The names of outputs that have any, in their order; None: they have none."""
    if not isinstance(outputs, Mapping):
        return None
    return tuple(str(name) for name, value in outputs.items() if isinstance(value, Tensor))


def restored(outputs: Any, names: Sequence[str] | None) -> Any:
    """Outputs of a graph, which have no names, under those of the network it was made of."""
    if names is None or isinstance(outputs, Mapping):
        return outputs
    values = (outputs,) if isinstance(outputs, Tensor) else outputs
    return Outputs(zip(names, values, strict=True))


def class_dim(outputs: object, targets: object) -> int | None:
    """The dimension of outputs that targets, as classes, lack: the last, or as for images the second; None: neither.

    >>> class_dim(torch.zeros(8, 10), torch.zeros(8, dtype=torch.int64)), class_dim(torch.zeros(8, 1), torch.zeros(8))
    (-1, None)
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return None
    if outputs.shape[:-1] == targets.shape:
        return -1 if outputs.shape[-1] > 1 else None
    return 1 if outputs.dim() > 1 and outputs.shape[:1] + outputs.shape[2:] == targets.shape else None


def shape_in_words(value: object) -> str:
    """What a message says of outputs or targets."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"{len(value)} tensors" if isinstance(value, tuple | list) else type(value).__name__
