"""Where a network is computed: devices by name, and in words."""

import os

import torch

from bayeszip.errors import ModelError, ModelUsageError

__all__ = ["device_name", "local_rank", "processes_launched", "resolve_device"]


def processes_launched() -> int:
    """How many processes were launched together. A number alone, without a rank, is left over from something else."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def local_rank() -> int | None:
    """Which of several processes on this machine it is; None: it was launched alone."""
    return int(os.environ.get("LOCAL_RANK", "0")) if processes_launched() > 1 else None


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto`: a GPU if there is one; one for each process of those launched together.

    Raises:
        ModelUsageError: there is no such device anywhere.
        ModelError: there is none here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device) == "cuda" and local_rank() is not None:
        device = f"cuda:{local_rank()}"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelUsageError(f"there is no device {device!r}; give auto, cpu, cuda or cuda:1") from error
    try:
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!s} can't be used here: {str(error).splitlines()[0]}") from error
    return resolved


def device_name(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
