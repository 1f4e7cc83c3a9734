"""What the command line is given by name: data sets, loaders of one's own, weights."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bayeszip import data
from bayeszip.errors import DataError, ModelError
from bayeszip.fitting import ResidentBatches
from bayeszip.fitting.batches import Loader
from bayeszip.models import made_by

__all__ = ["Loaders", "load_data", "load_weights", "read_weights"]

#: Images evaluated at once.
EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Loaders:
    """Batches of the three splits; hyper-parameters are chosen on validation, test only reports."""

    train: Loader
    validation: Loader
    test: Loader


def load_data(spec: str, *, batch_size: int, seed: int, device: torch.device) -> Loaders:
    """`mnist`, `idx:FOLDER`, or `module:factory`, where `factory()` returns (train, validation[, test]) loaders.

    Raises:
        DataError: the data is missing or damaged, or the factory returned something else.
    """
    if spec == "mnist" or spec.startswith("idx:"):
        dataset = data.load(spec)
        train, validation, test = (split.to(device) for split in (dataset.train, dataset.validation, dataset.test))
        return Loaders(
            ResidentBatches(train.images, train.labels, batch_size, shuffle=True, seed=seed),
            ResidentBatches(validation.images, validation.labels, EVALUATION_BATCH),
            ResidentBatches(test.images, test.labels, EVALUATION_BATCH),
        )
    if not all(spec.partition(":")):
        raise DataError(f"unknown data {spec!r}; give mnist, idx:FOLDER or module:factory")
    return _from_factory(spec)


def _from_factory(spec: str) -> Loaders:
    made: Any = made_by(spec)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(hasattr(part, "__iter__") for part in made):
        found = f"{len(made)} of something" if isinstance(made, tuple) else type(made).__name__
        raise DataError(f"{spec} must return (train, validation) or (train, validation, test) loaders, not {found}")
    return Loaders(made[0], made[1], made[-1])


def load_weights(network: nn.Module, path: str | os.PathLike[str]) -> None:
    """Pretrained weights from a `.safetensors` file into `network`.

    Raises:
        ModelError: the file can't be read, or does not fit; names the tensors.
    """
    state = read_weights(path)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit {type(network).__name__}: {error}") from error


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file.

    Raises:
        ModelError: it is another kind of file, or can't be read.
    """
    if Path(path).suffix != ".safetensors":
        raise ModelError(f"{path}: weights are read from .safetensors files only; pickled ones can run code")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
