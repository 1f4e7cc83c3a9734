"""Loaders that give one of several processes its share of every batch."""

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from bayeszip.data import Batches as ResidentBatches
from bayeszip.fitting.batches import Batches, Inputs, checked_batch, rows, sliced

__all__ = ["LoaderShare", "ResidentShare", "Shared", "SlicedShare", "checksum"]

#: Told the part of a batch that is given.
TellWeight = Callable[[float], None]


def checksum(tensor: Tensor) -> Tensor:
    """A number that changes with any bit: the sum of a tensor's bits taken as integers, and its size."""
    bits = tensor.detach().contiguous().flatten()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[bits.element_size()]
    return bits.view(whole).sum(dtype=torch.int64) * 31 + bits.numel()


def _bounds(n: int, rank: int, processes: int) -> tuple[int, int]:
    """Where the share of a process lies among n examples: even to within one."""
    return rank * n // processes, (rank + 1) * n // processes


class ResidentShare:
    """Of batches that lie on the device: every process makes the same permutation and takes its rows alone."""

    def __init__(self, batches: ResidentBatches, rank: int, processes: int, tell: TellWeight) -> None:
        self._batches, self._rank, self._processes, self._tell = batches, rank, processes, tell

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._batches
        order, skip = batches.begin_pass()
        for batch in range(skip, len(batches)):
            batches.given(batch + 1)
            first = batch * batches.batch_size
            n = min(batches.batch_size, batches.n_examples - first)
            low, high = _bounds(n, self._rank, self._processes)
            self._tell((high - low) / n)
            rows = slice(first + low, first + high)
            yield (batches.inputs[rows], batches.targets[rows]) if order is None else batches.select(order[rows])
        batches.end_pass()

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)


class LoaderShare:
    """Of a torch `DataLoader`, as accelerate splits it: a process loads only what it computes.

    Every share is of the same size: the last batch of a pass is filled up from the first.
    """

    def __init__(self, batches: Batches, prepared: Any, tell: Callable[[], None]) -> None:
        self._batches, self._prepared, self._tell = batches, prepared, tell
        self._epoch = self._given = self._skip = 0

    def __len__(self) -> int:
        return len(self._prepared)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        self._prepared.set_epoch(self._epoch)
        for index, batch in enumerate(self._prepared):
            self._given = index + 1
            if index >= skip:
                self._tell()
                yield batch
        self._epoch, self._given = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._given, self._skip = int(state["epoch"]), int(state["given"]), int(state["given"])


class SlicedShare:
    """Of anything else: every process goes through all of it and keeps its slices.

    All processes must be given the same batches in the same order; the first of each pass is compared.
    """

    def __init__(
        self,
        batches: Batches,
        rank: int,
        processes: int,
        tell: TellWeight,
        check_alike: Callable[[Mapping[str, Tensor], str], None],
    ) -> None:
        self._batches, self._rank, self._processes, self._tell = batches, rank, processes, tell
        self._check_alike = check_alike

    def __len__(self) -> int:
        if isinstance(self._batches, Sized):
            return len(self._batches)
        raise TypeError(f"{type(self._batches).__name__} has no length")

    def __iter__(self) -> Iterator[tuple[Inputs, Inputs]]:
        for index, batch in enumerate(self._batches):
            inputs, targets = checked_batch(batch)
            if index == 0:
                self._check_alike(
                    {"the first batch": targets if isinstance(targets, Tensor) else targets[0]},
                    "a loader other than torch's DataLoader must give every process the same batches",
                )
            n = rows(targets)
            low, high = _bounds(n, self._rank, self._processes)
            self._tell((high - low) / n if n else 0.0)
            yield sliced(inputs, n, low, high), sliced(targets, n, low, high)


#: A loader of shares.
Shared = ResidentShare | LoaderShare | SlicedShare
