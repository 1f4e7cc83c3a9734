"""Labeled images in memory, and which of the published training examples validate."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["SPLIT_SEED", "Dataset", "Split", "split_rows"]

#: Seed of the validation split, the paper's number. Changing it makes every accuracy measured before incomparable.
SPLIT_SEED = 20171106494


@dataclass(frozen=True, eq=False)
class Split:
    """Images as float32, N × channels × height × width, and their labels as int64.

    Pixels of MNIST and of IDX files lie in [0, 1]; those of CIFAR-10 are normalized (`cifar10.MEAN`, `cifar10.STD`).
    Zero is a natural background in both: black there, the mean color here.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __add__(self, other: "Split") -> "Split":
        """The examples of both, these first."""
        return Split(torch.cat([self.images, other.images]), torch.cat([self.labels, other.labels]))

    def to(self, device: torch.device | str) -> "Split":
        """The same examples on another device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Three disjoint splits; `validation` is cut from the published training set, `test` is the published one."""

    train: Split
    validation: Split
    test: Split
    name: str

    @property
    def classes(self) -> int:
        """One more than the largest label of all."""
        return 1 + max(int(split.labels.max()) for split in (self.train, self.validation, self.test))


def split_rows(n: int, one_in: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of `n` published training examples train and which (one in so many) validate, each in the file's order.

    numpy promises the raw stream of a bit generator for ever, but not what `Generator.permutation` makes of it; so
    the split is the same in every version.
    """
    order = np.argsort(np.random.PCG64(SPLIT_SEED).random_raw(n), kind="stable")
    held_out = max(1, round(n / one_in))
    return np.sort(order[held_out:]), np.sort(order[:held_out])
