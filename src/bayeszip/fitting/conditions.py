"""What must be the same for a run to be taken up where it was: versions, threads, the network it started from, data."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

from bayeszip import __version__
from bayeszip.fitting.batches import Loader, count_batches

__all__ = ["data_conditions", "machine_conditions", "network_conditions"]

#: Of the data, at most so many bytes are read, from rows all over it.
DATA_READ = 2**26


def machine_conditions(device: torch.device) -> dict[str, Any]:
    """Versions and, on a CPU, what else decides the last bits of a sum."""
    found: dict[str, Any] = {
        "versions": {
            "bayeszip": __version__,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "numba": numba.__version__,
        },
        "device": device.type,
    }
    if device.type == "cpu":
        found |= {"threads": torch.get_num_threads(), "processor": torch.backends.cpu.get_cpu_capability()}
    return found


def network_conditions(network: nn.Module) -> dict[str, Any]:
    """Shape, type and content of its tensors."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {
        "tensors": {name: f"{str(tensor.dtype)[6:]} {list(tensor.shape)}" for name, tensor in tensors.items()},
        "content": _digest(tensor.detach() for tensor in tensors.values()),
    }


def data_conditions(loader: Loader, n_data: int, loss: Callable[..., Any]) -> dict[str, Any]:
    """How much data, in which batches, and, where it lies in memory, which."""
    found: dict[str, Any] = {
        "examples": n_data,
        "batches": count_batches(loader) or "unknown",
        "batch_size": getattr(loader, "batch_size", None),
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
    }
    resident = [getattr(loader, name, None) for name in ("inputs", "targets")]
    tensors = [tensor for tensor in resident if isinstance(tensor, Tensor)]
    return found | {"content": _digest(map(_rows_of, tensors))} if tensors else found


def _rows_of(tensor: Tensor) -> Tensor:
    """Rows at even distances, the first among them; all if they are few."""
    size = tensor.numel() * tensor.element_size()
    return tensor[:: -(-size // DATA_READ)] if size > DATA_READ else tensor


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.layout == torch.strided:
            content = tensor.cpu().contiguous().flatten()
            digest.update(content.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
