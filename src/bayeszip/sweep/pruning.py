"""Ends trials that are clearly worse, in error and in bytes at once, than a finished one was at the same point.

Optuna prunes by one figure; a trial of two is hopeless only if both are: a finished trial, at the same share of the
same phase, had an error and a size that were smaller by a margin.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bayeszip.fitting import Course, EpochStats, Phase, Watcher

__all__ = ["Milestone", "Pruned", "PruningWatcher", "is_hopeless"]

#: Nothing is judged before this share of a phase is over: τ's are still rising, and rates are high.
JUDGED_FROM = 0.3

#: How far apart, in shares of a phase, two milestones may lie to be compared.
NEAR = 0.1

#: Errors below this are taken for this when a margin is measured: a few examples are no margin.
SMALLEST_ERROR = 0.01


class Milestone(NamedTuple):
    """Where a trial stood when a share of a phase was over."""

    phase: str
    share: float
    error: float
    bytes: int


class Pruned(Exception):
    """Raised inside a trial that is not worth going on with."""


class PruningWatcher(Watcher):
    """Keeps the milestones of a trial and ends it when it is hopeless.

    Args:
        rivals: the milestones of each finished trial.
        margin: by what share of its own error and bytes a rival must be better; 0: never prune.
        on_life: called at each batch.
    """

    def __init__(
        self, rivals: Sequence[Sequence[Milestone]], margin: float, on_life: Callable[[], None] | None = None
    ) -> None:
        self.milestones: list[Milestone] = []
        self._rivals, self._margin, self._on_life = rivals, margin, on_life

    def on_batch(self, phase: Phase, done: float) -> None:
        if self._on_life is not None:
            self._on_life()

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        if stats.bytes is None or stats.accuracy is None:
            return
        here = Milestone(stats.phase, stats.epoch / stats.epochs, 1 - stats.accuracy, stats.bytes)
        self.milestones.append(here)
        if self._margin and any(is_hopeless(here, rival, self._margin) for rival in self._rivals):
            raise Pruned

    def on_finding(self, message: str) -> None:
        """Nothing: a trial's record has its warnings, and a display, where there is one, shows them."""


def is_hopeless(here: Milestone, rival: Sequence[Milestone], margin: float) -> bool:
    """Whether a rival was better by the margin, in error and in bytes, at the same point.

    >>> rival = [Milestone("vd", 0.5, 0.02, 3000)]
    >>> is_hopeless(Milestone("vd", 0.5, 0.03, 4000), rival, 0.25)
    True
    >>> is_hopeless(Milestone("vd", 0.5, 0.03, 2000), rival, 0.25)
    False
    """
    if here.share < JUDGED_FROM:
        return False
    near = [other for other in rival if other.phase == here.phase and abs(other.share - here.share) <= NEAR]
    if not near:
        return False
    other = min(near, key=lambda milestone: abs(milestone.share - here.share))
    larger = here.bytes >= other.bytes * (1 + margin)
    return larger and here.error >= other.error + margin * max(other.error, SMALLEST_ERROR)
