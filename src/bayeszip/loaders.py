"""What the command line is given by name: data sets, loaders of one's own, weights, teachers."""

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bayeszip import data
from bayeszip.errors import DataError, DataUsageError, FormatError, ModelError, ModelUsageError, RecipeError
from bayeszip.fitting import Likelihood, Metric, ResidentBatches
from bayeszip.fitting.batches import Loader
from bayeszip.fitting.likelihood import LOSSES
from bayeszip.graph import unwrapped_names
from bayeszip.loading import load
from bayeszip.models import BUILT_IN, build, made_by, named

__all__ = [
    "Loaders",
    "Reported",
    "check_batch_size",
    "load_data",
    "load_teacher",
    "load_test",
    "load_weights",
    "named_loss",
    "named_metric",
    "read_weights",
]

#: Images evaluated at once.
EVALUATION_BATCH = 1000

#: What a record calls its own figures and facts; a metric of such a name would take their place.
TAKEN = frozenset((
    "accuracy", "loss", "bytes", "ratio", "params", "nonzero", "params_kept", "validation_accuracy_before",
    "validation_accuracy_trained", "validation_accuracy_snapped", "validation_accuracy", "validation_loss_before",
    "validation_loss", "metric", "validation_metric_before", "validation_metric", "seconds", "seed", "target",
    "strength", "rate", "augment", "device", "versions", "recipe", "warnings", "history", "others", "file",
    "hold_out", "teacher", "measured", "model", "data",
))  # fmt: skip


@dataclass(frozen=True)
class Loaders:
    """What training and choosing may see. The test set is asked for by itself, with `load_test`, and only reports."""

    train: Loader
    #: None where nothing was held out.
    validation: Loader | None
    #: All that a factory made, for `load_test`; a factory that is called again may split anew.
    made: tuple[Any, ...] | None = field(default=None, repr=False)


def load_data(spec: str, *, batch_size: int, seed: int, device: torch.device, hold_out: bool = True) -> Loaders:
    """Training and validation batches of data by name (see `data.load`) or of `module:function`; no test set is opened.

    `function()` returns (train, validation[, test]) loaders; the third is not handed on.

    Args:
        hold_out: set examples aside for validation; else all are trained on, and nothing can be chosen.

    Raises:
        DataError: the data is missing or damaged, or the factory returned something else, or holds out by itself.
    """
    if not _is_built_in(spec):
        if not hold_out:
            raise DataUsageError(f"{spec} says itself what is held out: let it train on all, and drop --no-hold-out")
        made = _from_factory(spec)
        return Loaders(made[0], made[1], made)
    train, validation = data.load_training(spec)
    if not hold_out:
        train = train + validation
    train = train.to(device)
    return Loaders(
        ResidentBatches(train.images, train.labels, batch_size, shuffle=True, seed=seed),
        _in_order(validation.to(device)) if hold_out else None,
    )


def check_batch_size(spec: str, changed: Iterable[str]) -> None:
    """Refuse a batch size among the settings that are changed, FIELD=… each, where a factory gives the batches.

    Raises:
        RecipeError: it would be recorded, and change nothing.
    """
    if any(each.partition("=")[0].strip() == "batch_size" for each in changed) and not _is_built_in(spec):
        raise RecipeError(f"the batches are those that {spec} gives: choose their size there, and drop batch_size")


class Reported(NamedTuple):
    """What a file is reported on, and what that is: `test`, or `validation` where there is nothing else."""

    loader: Loader
    kind: str


def load_test(spec: str, *, device: torch.device, beside: Loaders | None = None) -> Reported:
    """The test batches of the data that `load_data` knows by `spec`; of a factory without any, those for validation.

    Args:
        beside: what `load_data` gave for the same `spec`, if it did: these are then from the same call of a factory,
            and so hold nothing that is trained on, even where it draws its splits at random.

    Raises:
        DataError: the data is missing or damaged, or the factory returned something else.
    """
    if not _is_built_in(spec):
        made = beside.made if beside is not None and beside.made is not None else _from_factory(spec)
        return Reported(made[-1], "test" if len(made) > 2 else "validation")
    return Reported(_in_order(data.load_test(spec).to(device)), "test")


def _in_order(split: data.Split) -> ResidentBatches:
    """To be judged on."""
    return ResidentBatches(split.images, split.labels, EVALUATION_BATCH)


def _is_built_in(spec: str) -> bool:
    """Whether it is a data set by name, not a factory."""
    if data.is_known(spec):
        return True
    if not all(spec.partition(":")):
        known = "mnist, cifar10, cifar10:FOLDER, idx:FOLDER or module:function"
        raise DataUsageError(f"unknown data {spec!r}; give {known}")
    return False


def _from_factory(spec: str) -> tuple[Any, ...]:
    made: Any = made_by(spec)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(hasattr(part, "__iter__") for part in made):
        found = f"{len(made)} of something" if isinstance(made, tuple) else type(made).__name__
        raise DataError(f"{spec} must return (train, validation) or (train, validation, test) loaders, not {found}")
    return made


def named_loss(spec: str) -> Likelihood:
    """A loss by name (mse, bce, …), or `module:function`.

    Raises:
        RecipeError: there is none of this name.
        ModelError: there is no such function.
    """
    return Likelihood.of(named(spec) if ":" in spec else spec)


def named_metric(spec: str) -> Metric:
    """A metric: a loss by name, or `module:function`, with `,lower` behind it if lower is better.

    Raises:
        RecipeError: it is none of these, or has the name of another figure.
        ModelError: there is no such function.
    """
    name, _, direction = spec.partition(",")
    if direction not in ("", "lower", "higher"):
        raise RecipeError(f"a metric is better when it is lower or higher, not {direction!r}: {name},lower")
    if ":" not in name and name not in LOSSES:
        raise RecipeError(f"there is no metric {name!r}; known: {', '.join(LOSSES)}, or module:function[,lower]")
    found = Metric.of(named(name) if ":" in name else name)
    if found is None:  # never: something was named
        raise TypeError(spec)
    if found.name in TAKEN:
        raise RecipeError(f"{name} is called as a record calls something else, {found.name!r}; rename the function")
    return dataclasses.replace(found, higher_is_better=direction == "higher") if direction else found


def load_weights(network: nn.Module, path: str | os.PathLike[str]) -> None:
    """Pretrained weights from a `.safetensors` file into `network`.

    Names may have in front what a wrapper puts there, and tied tensors may be there under one of their names, as
    `safetensors.torch.save_model` leaves them.

    Raises:
        ModelError: the file can't be read, or does not fit; names the tensors.
    """
    state, own = read_weights(path), network.state_dict(keep_vars=True)
    state = state if own.keys() & state.keys() else unwrapped_names(state)
    given = {id(own[name]): value for name, value in state.items() if name in own}
    tied = {name: given[id(tensor)] for name, tensor in own.items() if id(tensor) in given}
    try:
        network.load_state_dict({**tied, **state})
    except RuntimeError as error:
        # Below a headline torch lists what doesn't fit, indented.
        found = "\n".join(line.strip() for line in str(error).splitlines()[1:])
        raise ModelError(f"{path} does not fit {type(network).__name__}:\n{found}") from error


def load_teacher(spec: str) -> nn.Module:
    """A network to learn from: a `.bayz` file, `module:factory`, or MODEL=FILE with weights in a `.safetensors` file.

    Raises:
        ModelError: there is no such network, or its weights are missing or don't fit.
        FormatError: the file can't be decoded.
    """
    if spec.endswith(".bayz"):
        try:
            return load(spec)
        except FormatError as error:
            raise FormatError(f"the teacher {spec}: {error}") from error
    name, given, weights = spec.partition("=")
    network = build(name)
    if given:
        load_weights(network, weights)
    elif name in BUILT_IN:
        raise ModelUsageError(f"{name} has learnt nothing yet; say where its weights are: {name}=FILE.safetensors")
    return network


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file.

    Raises:
        ModelError: it is another kind of file, or can't be read.
    """
    if Path(path).suffix != ".safetensors":
        raise ModelUsageError(f"{path}: weights are read from .safetensors files only; pickled ones can run code")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"can't read {path}: {error}") from error
