"""What a run keeps of its weights: small histograms, and the mixture over them, at a few moments of the training."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bayeszip.errors import DataError
from bayeszip.files import read_file, write_atomically
from bayeszip.fitting import EpochStats, Phase, Watcher
from bayeszip.fitting.loop import PRUNING_LOG_ALPHA
from bayeszip.variational import MixturePrior, variational_weights
from bayeszip.variational.distributions import log_alpha

__all__ = ["BINS", "SNAPSHOTS", "MixtureShape", "Snapshot", "SnapshotRecorder", "Snapshots", "read_snapshots"]

#: The file in the folder of a run.
SNAPSHOTS = "snapshots.json"

#: Odd, so that one bin has zero in its middle.
BINS = 161

#: Significant digits of a number in the file: more than a picture shows.
DIGITS = 4


@dataclass(frozen=True)
class MixtureShape:
    """GM_ψ as it is drawn: means, standard deviations and proportions of its components."""

    means: tuple[float, ...]
    stds: tuple[float, ...]
    proportions: tuple[float, ...]


@dataclass(frozen=True)
class Snapshot:
    """The weights' means after `epoch` of `epochs` of a phase (0: at its start), counted in bins.

    Args:
        reach: `BINS` even bins cover −reach to reach.
        counts: all weights; those no longer computed count as zeros.
        kept: those that would not be zero if the network were quantized now.
        mixture: None before a phase trains it.
    """

    phase: str
    epoch: int
    epochs: int
    reach: float
    counts: tuple[int, ...]
    kept: tuple[int, ...]
    mixture: MixtureShape | None = None


@dataclass(frozen=True)
class Snapshots:
    """All moments of a run, and the shapes its parameters had at the start."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    moments: tuple[Snapshot, ...] = ()

    def to_json(self) -> str:
        """A line a moment."""
        shapes = json.dumps({name: list(shape) for name, shape in self.shapes.items()}, ensure_ascii=False)
        lines = ",\n".join(f"  {json.dumps(asdict(moment), ensure_ascii=False)}" for moment in self.moments)
        return f'{{\n "shapes": {shapes},\n "moments": [\n{lines}\n ]\n}}\n'


def read_snapshots(path: str | os.PathLike[str]) -> Snapshots:
    """What a `SnapshotRecorder` wrote.

    Raises:
        DataError: the file holds something else.
    """
    try:
        return _snapshots(json.loads(read_file(path)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} doesn't hold the snapshots of a run: {type(error).__name__}: {error}") from error


def _snapshots(held: dict[str, Any]) -> Snapshots:
    shapes = {str(name): tuple(int(size) for size in shape) for name, shape in held["shapes"].items()}
    return Snapshots(shapes, tuple(_moment(moment) for moment in held["moments"]))


def _moment(held: dict[str, Any]) -> Snapshot:
    mixture, reach = held["mixture"], float(held["reach"])
    counts, kept = (tuple(int(count) for count in held[name]) for name in ("counts", "kept"))
    if len(counts) != BINS or len(kept) != BINS or min(*counts, *kept) < 0:
        raise ValueError(f"histograms have {BINS} counts, none below zero")
    if not (math.isfinite(reach) and reach > 0):
        raise ValueError(f"bins can't reach from {-reach} to {reach}")
    return Snapshot(
        phase=str(held["phase"]),
        epoch=int(held["epoch"]),
        epochs=int(held["epochs"]),
        reach=reach,
        counts=counts,
        kept=kept,
        mixture=None if mixture is None else _mixture(mixture),
    )


def _mixture(held: dict[str, Any]) -> MixtureShape:
    means, stds, proportions = (tuple(map(float, held[name])) for name in ("means", "stds", "proportions"))
    numbers = (*means, *stds, *proportions)
    if not len(means) == len(stds) == len(proportions) or not all(map(math.isfinite, numbers)) or min(stds) <= 0:
        raise ValueError("a mixture has as many means as standard deviations above 0 and proportions, all finite")
    return MixtureShape(means, stds, proportions)


class SnapshotRecorder(Watcher):
    """Writes a snapshot at the start, in the middle and at the end of every phase that trains Gaussian weights.

    The start of a phase shows the weights that the phase before it ended with, and takes the place of that end.

    Args:
        path: the file; written whole after each moment.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._taken = Snapshots()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._taken)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken = _snapshots(state)

    def on_phase(self, phase: Phase, network: nn.Module, prior: MixturePrior | None) -> None:
        self._take(phase.name, 0, phase.epochs, network, prior if phase.tau2 else None)

    def on_epoch(self, stats: EpochStats, network: nn.Module, prior: MixturePrior | None) -> None:
        if stats.epoch in (stats.epochs // 2, stats.epochs):
            # A phase that doesn't train the mixture has no part of the loss for it.
            self._take(stats.phase, stats.epoch, stats.epochs, network, prior if stats.mixture else None)

    def _take(self, phase: str, epoch: int, epochs: int, network: nn.Module, prior: MixturePrior | None) -> None:
        if next(variational_weights(network), None) is None:
            return
        moments = [moment for moment in self._taken.moments if (moment.phase, moment.epoch) != (phase, epoch)]
        if epoch == 0 and moments and moments[-1].epoch == moments[-1].epochs:
            moments.pop()
        expected = sum(moments[0].counts) if moments else 0
        moments.append(_snapshot(phase, epoch, epochs, network, prior, expected))
        self._taken = Snapshots(self._taken.shapes or _shapes(network), tuple(moments))
        write_atomically(self._path, self._taken.to_json().encode())


def _shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    variances = {id(weight.log_sigma2) for weight in variational_weights(network)}
    return {
        name: tuple(parameter.shape) for name, parameter in network.named_parameters() if id(parameter) not in variances
    }


@torch.no_grad()
def _snapshot(
    phase: str, epoch: int, epochs: int, network: nn.Module, prior: MixturePrior | None, expected: int
) -> Snapshot:
    """`expected`: how many weights there are, compacted ones included (0: those at hand)."""
    weights = tuple(variational_weights(network))
    reach = max((weight.theta.abs().max().item() for weight in weights if weight.theta.numel()), default=0.0)
    reach = _rounded(1.02 * reach) or 1.0
    counts, kept = np.zeros(BINS, dtype=np.int64), np.zeros(BINS, dtype=np.int64)
    for weight in weights:
        theta = weight.theta.float()
        if prior is None:
            alive = log_alpha(weight.theta, weight.log_sigma2) < PRUNING_LOG_ALPHA
        else:
            alive = prior.assign(theta) > 0
        counts += np.histogram(theta.cpu().numpy(), BINS, (-reach, reach))[0]
        kept += np.histogram(theta[alive].cpu().numpy(), BINS, (-reach, reach))[0]
    counts[BINS // 2] += max(0, expected - int(counts.sum()))
    mixture = None if prior is None else _mixture_shape(prior)
    return Snapshot(phase, epoch, epochs, reach, tuple(counts.tolist()), tuple(kept.tolist()), mixture)


def _mixture_shape(prior: MixturePrior) -> MixtureShape:
    means, log_precisions, log_proportions = prior.components()
    columns = (means, (-0.5 * log_precisions).exp(), log_proportions.exp())
    return MixtureShape(*(tuple(_rounded(value) for value in column.tolist()) for column in columns))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
