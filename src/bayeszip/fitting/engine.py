"""What the steps of a training run on: one process, or several that each compute a share of every batch.

    N processes:  share of the batch ──► gradient of its part of the loss ──► sum over processes ──► the same step

Each process holds the whole network, mixture and optimizer. The data's loss of a share counts by its part of the batch,
the priors' by 1/N, so that the sum over processes is the gradient of the whole loss: that of one process which sees the
whole batch. Noise differs between processes; everything else stays the same bit for bit, which is checked.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from bayeszip.fitting.batches import Loader
from bayeszip.fitting.evaluation import Figures

__all__ = ["Engine", "SingleProcess", "in_precision", "told"]


class Engine(Protocol):
    """One process of a training, and what it has to do with the others."""

    #: How many processes train together.
    processes: int
    #: In how many parts each process computes its share of a batch, one after the other, to save memory.
    accumulate: int
    #: What the network is computed in: `bf16`, or `no` other precision than its own.
    mixed_precision: str
    #: Whether this process writes, prints and measures. Exactly one does.
    is_main: bool

    def share(self, loader: Loader) -> Loader:
        """The same passes, but of each batch only what this process computes."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Around whatever may be computed in lower precision."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes."""

    def begin(self, *modules: nn.Module) -> None:
        """Before a training: give all processes the main one's parameters and buffers, and noise of their own."""

    def level_buffers(self, module: nn.Module) -> None:
        """Replace running statistics, to which each process has only shown its shares, by their means."""

    def from_main(self, value: Callable[[], float]) -> float:
        """What the main process computes, on all of them."""

    def check_alike(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Make sure that all processes hold the same.

        Raises:
            TrainingError: names the first tensor that differs, and where.
        """

    def describe(self, device: str) -> str:
        """What trains, in words."""


class SingleProcess:
    """All of a training in this process.

    Args:
        device: on which it runs.
        mixed_precision: `no`, or `bf16` to compute the network in it; parameters and priors stay as they are.
        accumulate: in how many parts to compute each batch.
    """

    processes = 1
    is_main = True

    def __init__(self, device: torch.device, mixed_precision: str = "no", accumulate: int = 1) -> None:
        self._device, self.mixed_precision, self.accumulate = device, mixed_precision, accumulate

    def share(self, loader: Loader) -> Loader:
        return loader

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return in_precision(self.mixed_precision, self._device)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        pass

    def begin(self, *modules: nn.Module) -> None:
        pass

    def level_buffers(self, module: nn.Module) -> None:
        pass

    def from_main(self, value: Callable[[], float]) -> float:
        return value()

    def check_alike(self, tensors: Mapping[str, Tensor], where: str) -> None:
        pass

    def describe(self, device: str) -> str:
        return device


def in_precision(mixed_precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Around whatever may be computed in bf16, if it may."""
    if mixed_precision == "no":
        return contextlib.nullcontext()
    # Weights in bf16 that it keeps from one use to the next would not be there when a recorded step is replayed.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=device.type != "cuda")


def told(engine: Engine, judge: Callable[[], Figures]) -> Figures:
    """What the main process finds, on all of them."""
    found = judge().line() if engine.is_main else Figures().line()
    return Figures.in_line([engine.from_main(partial(float, value)) for value in found])
