"""What a run keeps of its weights: small histograms, and the mixture over them, at a few moments of the training."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bayeszip.errors import DataError
from bayeszip.files import read_file, write_atomically
from bayeszip.fitting import Course, EpochStats, Watcher
from bayeszip.variational import GaussianMixture

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

    Where the mixture has units they are in units, as its components and the shared values in a file are.

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
        outdated: files that speak of a run before in the same place; a run that begins removes them, and the snapshots
            of that one. One that is resumed does not.
    """

    def __init__(self, path: str | os.PathLike[str], outdated: Iterable[str | os.PathLike[str]] = ()) -> None:
        self._path = Path(path)
        self._taken = Snapshots()
        #: What is still to be removed; the snapshots last.
        self._outdated = (*map(Path, outdated), self._path)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._taken)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._taken, self._outdated = _snapshots(state), ()

    def on_phase(self, course: Course) -> None:
        # Not earlier: what is refused before its training leaves the folder as it was.
        outdated, self._outdated = self._outdated, ()
        for path in outdated:
            path.unlink(missing_ok=True)
        self._take(0, course)

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        if stats.epoch in (stats.epochs // 2, stats.epochs):
            self._take(stats.epoch, course)

    def on_finding(self, message: str) -> None:
        """Said by others; it is about the weights alone."""

    def _take(self, epoch: int, course: Course) -> None:
        if not course.weights:
            return
        phase = course.phase.name
        moments = [moment for moment in self._taken.moments if (moment.phase, moment.epoch) != (phase, epoch)]
        if epoch == 0 and moments and moments[-1].epoch == moments[-1].epochs:
            moments.pop()
        expected = sum(moments[0].counts) if moments else 0
        moments.append(_snapshot(epoch, course, expected))
        self._taken = Snapshots(self._taken.shapes or _shapes(course), tuple(moments))
        write_atomically(self._path, self._taken.to_json().encode())


def _shapes(course: Course) -> dict[str, tuple[int, ...]]:
    variances = {id(weight.log_sigma2) for weight in course.weights}
    named = course.network.named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in named if id(parameter) not in variances}


@torch.no_grad()
def _snapshot(epoch: int, course: Course, expected: int) -> Snapshot:
    """`expected`: how many weights there are, compacted ones included (0: those at hand)."""
    mixture = course.posterior().mixture
    units = mixture.units if mixture else {}
    thetas = [weight.theta.float() / units.get(weight.name, 1.0) for weight in course.weights]
    reach = max((theta.abs().max().item() for theta in thetas if theta.numel()), default=0.0)
    reach = _rounded(1.02 * reach) or 1.0
    counts, kept = np.zeros(BINS, dtype=np.int64), np.zeros(BINS, dtype=np.int64)
    for weight, theta in zip(course.weights, thetas, strict=True):
        counts += np.histogram(theta.cpu().numpy(), BINS, (-reach, reach))[0]
        kept += np.histogram(theta[course.keeps(weight)].cpu().numpy(), BINS, (-reach, reach))[0]
    counts[BINS // 2] += max(0, expected - int(counts.sum()))
    return Snapshot(
        phase=course.phase.name,
        epoch=epoch,
        epochs=course.phase.epochs,
        reach=reach,
        counts=tuple(counts.tolist()),
        kept=tuple(kept.tolist()),
        mixture=None if mixture is None else _mixture_shape(mixture),
    )


def _mixture_shape(mixture: GaussianMixture) -> MixtureShape:
    columns = (mixture.means, np.exp(-0.5 * mixture.log_precisions), np.exp(mixture.log_proportions))
    return MixtureShape(*(tuple(_rounded(value) for value in column.tolist()) for column in columns))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
