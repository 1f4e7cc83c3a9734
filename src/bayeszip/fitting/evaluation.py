"""A network as it is, judged on data: its loss, its accuracy where there are classes, and the caller's own metric."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeszip.errors import DataError, ModelError, RecipeError
from bayeszip.fitting.batches import (
    Inputs,
    Loader,
    by_place,
    called_with,
    checked_batch,
    mapped,
    on_device,
    rows_of,
    running,
    tensors_of,
)
from bayeszip.fitting.likelihood import LOSSES, Likelihood
from bayeszip.fitting.outputs import class_dim, predictions, restored, shape_in_words
from bayeszip.fitting.resident import ResidentBatches
from bayeszip.modes import evaluating

__all__ = ["Figures", "Judge", "Metric", "evaluate"]


@dataclass(frozen=True)
class Figures:
    """What a network comes to on some data; None: that was not, or can't be, measured."""

    #: Share of targets that are the class of the largest output.
    accuracy: float | None = None
    #: Mean loss, in the unit of the caller's.
    loss: float | None = None
    metric: float | None = None
    #: The accuracy of who always says the most frequent class, and how many targets that is known from.
    chance: float | None = None
    targets: float | None = None
    #: How far outputs differ between examples: their deviation, in units of their size.
    spread: float | None = None

    def line(self) -> list[float]:
        """All as numbers, NaN for None; for one process to tell others."""
        return [math.nan if value is None else float(value) for value in dataclasses.astuple(self)]

    @classmethod
    def in_line(cls, line: Sequence[float]) -> "Figures":
        return cls(*(None if math.isnan(value) else value for value in line))


@dataclass(frozen=True)
class Metric:
    """A figure of the caller's own.

    Args:
        function: of outputs and targets of a batch, whose mean over examples counts; or an object with `update`,
            `compute` and `reset`, as torchmetrics has them.
        higher_is_better: which way is better.
    """

    function: Any
    higher_is_better: bool = True
    name: str = "metric"

    @classmethod
    def of(cls, given: Any) -> "Metric | None":
        """A metric from what a caller gives: a function or an object (which may say `higher_is_better`), or a name.

        Raises:
            RecipeError: it can't be called, or there is none of this name.
        """
        if given is None or isinstance(given, Metric):
            return given
        if isinstance(given, str):
            if given not in LOSSES:
                raise RecipeError(f"there is no metric {given!r}; known: {', '.join(LOSSES)}, or give a function")
            return cls(LOSSES[given], False, given)
        if not callable(given):
            raise RecipeError(f"metric must be a function of outputs and targets, not {type(given).__name__}")
        name = getattr(given, "__name__", type(given).__name__)
        return cls(given, getattr(given, "higher_is_better", None) is not False, name)

    def begin(self) -> Callable[[Any, Any], None]:
        """Start anew; what is returned takes the batches."""
        if not self._collects():
            return _Mean(self.function)
        self.function.reset()
        return self.function.update

    def end(self, taking: Any) -> float:
        """The figure over all batches that `begin`'s answer took."""
        if not self._collects():
            return float(taking.value())
        value = float(self.function.compute())
        self.function.reset()
        return value

    def _collects(self) -> bool:
        return all(callable(getattr(self.function, name, None)) for name in ("update", "compute", "reset"))


class _Mean:
    """The mean of a function over examples."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function, self._total, self._rows = function, 0.0, 0

    def __call__(self, outputs: Any, targets: Any) -> None:
        rows = rows_of(targets)
        self._total, self._rows = self._total + rows * float(self._function(outputs, targets)), self._rows + rows

    def value(self) -> float:
        return self._total / max(1, self._rows)


@dataclass(frozen=True)
class Judge:
    """How networks are judged.

    Args:
        likelihood: None: the loss is not asked for.
        names: of outputs, for a network that lost them on its way through a file.
        arguments: in which order inputs by name are given to it.
    """

    likelihood: Likelihood | None
    metric: Metric | None = None
    names: tuple[str, ...] | None = None
    arguments: tuple[str, ...] = ()

    @torch.no_grad()
    def __call__(self, network: nn.Module, loader: Loader, *, cast: bool = False) -> Figures:
        """What the network comes to, with the weights at their means.

        Args:
            cast: give it floating-point inputs in its own type. A file may give another type back than went in.

        Raises:
            DataError: there is no data, or it holds NaN.
        """
        parameter = next(network.parameters())
        sums = _Sums(self.likelihood, parameter.device)
        loss = _Mean(self.likelihood.plain) if self.likelihood else None
        metric = None if self.metric is None else self.metric.begin()
        with evaluating(network):
            for inputs, targets in on_device(_as_they_lie(loader), parameter.device):
                with running("evaluation"):
                    inputs = by_place(network, inputs, self.arguments)
                    outputs = called_with(network, _cast(inputs, parameter.dtype) if cast else inputs)
                    outputs = restored(outputs, self.names)
                    if loss is not None:
                        loss(outputs, targets)
                    sums.add(outputs, targets)
                if metric is not None:
                    with running("evaluation", "the metric"):
                        metric(outputs, targets)
        if not sums.batches:
            raise DataError("there is nothing to evaluate on: the data gave no batch")
        mean, value = loss.value() if loss else None, None if self.metric is None else self.metric.end(metric)
        if sums.is_nan or (mean is not None and math.isnan(mean)):
            _check_data(loader)
        return dataclasses.replace(sums.figures(), loss=mean, metric=value)


class _Sums:
    """Right answers, classes and the spread of outputs, batch by batch."""

    def __init__(self, likelihood: Likelihood | None, device: torch.device) -> None:
        self._kind = likelihood.kind if likelihood else "classes"
        #: The class that says of a target that it is not to be learnt.
        self._ignored = getattr(likelihood.function, "ignore_index", None) if likelihood else None
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, dtype=torch.int64, device=device)
        self._total = self.batches = 0
        self._spread = 0.0
        #: Whether outputs were NaN.
        self.is_nan = False

    def add(self, outputs: Any, targets: Inputs) -> None:
        self.batches += 1
        ours = predictions(outputs)
        if ours is None or not ours.dim():
            return
        if len(ours) > 1 and ours.is_floating_point():
            size = ours.float().square().mean().sqrt()
            self.is_nan |= math.isnan(size)
            self._spread = max(self._spread, float(ours.float().std(0).square().mean().sqrt() / size.clamp(min=1e-30)))
        found = self._answers(ours, targets)
        if found is None:
            return
        answers, classes, count = found
        # What is no class of the network's, such as −100 or 255, is not to be learnt either.
        known = (classes >= 0) & (classes < count)
        if self._ignored is not None:
            known &= classes != self._ignored
        self._right += (answers == classes)[known].sum()
        self._total += int(known.sum())
        counts = torch.bincount(classes[known].flatten())
        self._counts = F.pad(self._counts, (0, max(0, len(counts) - len(self._counts))))
        self._counts[: len(counts)] += counts

    def _answers(self, ours: Tensor, targets: Any) -> tuple[Tensor, Tensor, int] | None:
        """The class of each output, that of each target, and how many classes there are."""
        if self._kind in ("switches", "probabilities") and isinstance(targets, Tensor) and ours.shape == targets.shape:
            return (ours > (0 if self._kind == "switches" else 0.5)).long(), (targets > 0.5).long(), 2
        dim = class_dim(ours, targets) if self._kind in ("classes", "unknown") else None
        return None if dim is None else (ours.argmax(dim=dim), targets.long(), ours.shape[dim])

    def figures(self) -> Figures:
        if not self._total:
            return Figures(spread=self._spread)
        return Figures(
            accuracy=self._right.item() / self._total,
            chance=self._counts.max().item() / self._total,
            targets=self._total,
            spread=self._spread,
        )


def _check_data(loader: Loader) -> None:
    """Refuse data that hold NaN: there is no loss on them, and the class that is told from them is always the first."""
    for batch in map(checked_batch, loader):
        for name, part in zip(("inputs", "targets"), batch, strict=True):
            if any(tensor.isnan().any() for tensor in tensors_of(part)):
                raise DataError(f"evaluation: {name} of the validation or test data hold NaN; mend the data")


def evaluate(network: nn.Module, loader: Loader, *, cast: bool = False) -> float:
    """Share of examples whose largest output is the target's, with the weights at their means.

    Args:
        cast: give the network floating-point inputs in its own type. A file may give another type back than went in.

    Raises:
        DataError: targets are no classes.
        ModelError: it is no network.
    """
    if not isinstance(network, nn.Module):
        raise ModelError(f"a network is a torch.nn.Module, not a {type(network).__name__}; load() makes one of a file")
    figures = Judge(None)(network, loader, cast=cast)
    if figures.accuracy is None:
        inputs, targets = next(on_device(loader, next(network.parameters()).device))
        with torch.no_grad():
            outputs = called_with(network, _cast(inputs, next(network.parameters()).dtype) if cast else inputs)
        raise DataError(
            f"accuracy needs a class for each target, but outputs are {shape_in_words(outputs)} and targets "
            f"{shape_in_words(targets)}; for other tasks give loss= and metric= (--loss, --metric)"
        )
    return figures.accuracy


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _as_they_lie(loader: Loader) -> Loader:
    """Examples in the order they have, if there is one: sums of the same numbers are then the same, bit for bit."""
    if not isinstance(loader, ResidentBatches) or not loader.shuffle or loader.drop_last or loader.augment:
        return loader
    return ResidentBatches(loader.inputs, loader.targets, loader.batch_size)
