"""Loaders that give one of several processes its share of every batch."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from bayeszip.fitting.batches import Batch, Loader, checked_batch, rows_of, sliced, tensors_of
from bayeszip.fitting.resident import ResidentBatches

__all__ = ["LoaderShare", "ResidentShare", "Shared", "SlicedShare", "checksum"]


def checksum(tensor: Tensor) -> Tensor:
    """A number that changes with any bit: the sum of a tensor's bits taken as integers, and its size."""
    bits = tensor.detach().contiguous().flatten()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[bits.element_size()]
    return bits.view(whole).sum(dtype=torch.int64) * 31 + bits.numel()


def _bounds(n: int, rank: int, processes: int) -> tuple[int, int]:
    """Where the share of a process lies among n examples: even to within one."""
    return rank * n // processes, (rank + 1) * n // processes


def _share_of(batch: Batch, rank: int, processes: int) -> Batch:
    n = rows_of(batch.targets)
    low, high = _bounds(n, rank, processes)
    return Batch(
        sliced(batch.inputs, n, low, high),
        sliced(batch.targets, n, low, high),
        None if batch.rows is None else batch.rows[low:high],
        (high - low) / n if n else 0.0,
    )


class ResidentShare:
    """Of batches that lie on the device: every process makes the same permutation and takes its rows alone."""

    def __init__(self, batches: ResidentBatches, rank: int, processes: int) -> None:
        self._batches, self._rank, self._processes = batches, rank, processes

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._batches
        order, skip = batches.begin_pass()
        for index in range(skip, len(batches)):
            batches.given(index + 1)
            yield self._share(order, index)
        batches.end_pass()

    def _share(self, order: Tensor | None, index: int) -> Batch:
        batches = self._batches
        if order is None or batches.augment is not None:
            # All draw for the whole batch what augments it, so that it doesn't depend on how many they are.
            return _share_of(batches.batch(order, index), self._rank, self._processes)
        first = index * batches.batch_size
        n = min(batches.batch_size, batches.n_examples - first)
        low, high = _bounds(n, self._rank, self._processes)
        return dataclasses.replace(batches.select(order[first + low : first + high]), share=(high - low) / n)

    def end_pass(self) -> None:
        """Leave a pass that somebody began."""
        self._batches.end_pass()

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.load_state_dict(state)


class LoaderShare:
    """Of a torch `DataLoader`, as accelerate splits it: a process loads only what it computes.

    Every share is of the same size: the last batch of a pass is filled up from the first.
    """

    def __init__(self, prepared: Any, processes: int) -> None:
        self._prepared, self._processes = prepared, processes
        self._epoch = self._given = self._skip = 0

    def __len__(self) -> int:
        return len(self._prepared)

    def __iter__(self) -> Iterator[Batch]:
        skip, self._skip = self._skip, 0
        self._prepared.set_epoch(self._epoch)
        for index, batch in enumerate(self._prepared):
            self._given = index + 1
            if index >= skip:
                yield dataclasses.replace(checked_batch(batch), share=1 / self._processes)
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
        loader: Loader,
        rank: int,
        processes: int,
        check_alike: Callable[[Mapping[str, Tensor], str], None],
    ) -> None:
        self._loader, self._rank, self._processes = loader, rank, processes
        self._check_alike = check_alike

    def __len__(self) -> int:
        if isinstance(self._loader, Sized):
            return len(self._loader)
        raise TypeError(f"{type(self._loader).__name__} has no length")

    def __iter__(self) -> Iterator[Batch]:
        for index, given in enumerate(self._loader):
            batch = checked_batch(given)
            if index == 0:
                self._check_alike(
                    {"the first batch": tensors_of(batch.targets)[0]},
                    "a loader other than torch's DataLoader must give every process the same batches",
                )
            yield _share_of(batch, self._rank, self._processes)


#: A loader of shares.
Shared = ResidentShare | LoaderShare | SlicedShare
