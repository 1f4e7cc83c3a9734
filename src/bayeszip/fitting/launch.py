"""Whether this process was launched alone or with others, by `accelerate launch` or `torchrun`, and its engine."""

import os
import sys

import torch

from bayeszip.devices import processes_launched
from bayeszip.errors import RecipeError
from bayeszip.fitting.distributed import ManyProcesses
from bayeszip.fitting.engine import Engine, SingleProcess

__all__ = ["is_main_process", "known_precision", "leave", "make_engine"]

#: Adam's moments need no scaling of the loss with bf16, which has the range of float32; with fp16 they would.
PRECISIONS = ("no", "bf16")


def make_engine(
    device: torch.device,
    *,
    mixed_precision: str | None = None,
    accumulate: int = 1,
    seed: int = 0,
    alone: bool = False,
) -> Engine:
    """The engine for this process: with others if it was launched with others, by `accelerate launch` or `torchrun`.

    Args:
        mixed_precision: `no` or `bf16`; None: as the launcher says, else no.
        accumulate: in how many parts to compute each batch; 1: as the launcher says.
        seed: of the order in which several processes go through a `DataLoader`.
        alone: leave the others out of it.

    Raises:
        RecipeError: the precision is unknown, or the launcher is set to divide the network and not the data.
        ModelError: there are several processes, but accelerate is not installed.
    """
    precision = known_precision(mixed_precision)
    said = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulate == 1 and said.isdigit():  # it may also be "auto"
        accumulate = max(1, int(said))
    if alone or processes_launched() == 1:
        return SingleProcess(device, precision, accumulate)
    return ManyProcesses(device, precision, accumulate, seed)


def known_precision(asked: str | None) -> str:
    """What to compute in: as asked, else as the launcher says, else no other precision.

    Raises:
        RecipeError: it is unknown.
    """
    precision = asked or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in PRECISIONS:
        raise RecipeError(f"mixed precision must be one of {', '.join(PRECISIONS)}, not {precision}")
    return precision


def is_main_process() -> bool:
    """Whether this process was launched alone, or as the first of several."""
    return int(os.environ.get("RANK", "0")) == 0


def leave() -> None:
    """At the end of a program: part from the other processes in good order, if there are any. Does not return then."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    # Together: none is gone while another still needs it.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Past the interpreter's own end: in it, threads of the group that something still holds abort the process at times.
    os._exit(0)
