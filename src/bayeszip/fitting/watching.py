"""What goes on in a training, told to whoever watches; watchers only watch."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bayeszip.fitting.course import Course
from bayeszip.fitting.phases import Phase

__all__ = ["EpochStats", "Watcher"]


@dataclass(frozen=True)
class EpochStats:
    """What an epoch came to."""

    phase: str
    epoch: int
    epochs: int
    seconds: float
    #: The parts of the loss by name, the data's first: means over the epoch's batches, in nats per example.
    parts: Mapping[str, float]
    #: On the validation data, with the weights at their means: not yet pruned and snapped as they would be in a file.
    accuracy: float | None
    #: The share of weights that would be zero if the network were quantized now.
    zeros: float
    weights_computed: int
    #: What a file would take now; filled in by whoever knows how to code one.
    bytes: int | None = None
    #: On the validation data, as `accuracy`: the caller's loss, in its own unit, and metric.
    loss: float | None = None
    metric: float | None = None
    #: Of the optimizer, in this epoch.
    steps: int | None = None


class Watcher:
    """Told what goes on. Progress displays, logs and records derive from it.

    By itself it does nothing but pass on what must not get lost: `on_warning` warns, and `on_finding` logs.
    """

    def on_phase(self, course: Course) -> None:
        """Before the first step of a phase, with the network and the terms it starts from."""

    def on_batch(self, phase: Phase, done: float) -> None:
        """`done` is the share of the phase that is over."""

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        """After each epoch, with the network as it is now."""

    def on_warning(self, message: str) -> None:
        """Something went wrong, and the training goes on all the same."""
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def on_finding(self, message: str) -> None:
        """The training is over, and something is wrong with what came out."""
        logging.getLogger("bayeszip").warning("%s", message)

    def state_dict(self) -> dict[str, Any]:
        """What it must remember when a run is resumed; tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
