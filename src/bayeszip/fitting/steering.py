"""What turns τ₁ towards a target while a network is trained; asked by the loop before each epoch."""

from typing import Any

from bayeszip.fitting.course import Course
from bayeszip.fitting.watching import EpochStats

__all__ = ["Steering"]


class Steering:
    """Leaves everything as the recipe has it; who steers derives from it."""

    def strength(self) -> float:
        """Factor on the weights of steered terms (τ₁) for the epoch to come."""
        return 1.0

    def on_phase(self, course: Course) -> None:
        """Before the first step of a phase; may change weights."""

    def on_epoch(self, stats: EpochStats, course: Course) -> None:
        """After each epoch; may change weights."""

    def state_dict(self) -> dict[str, Any]:
        """What it must remember when a run is resumed; tensors and plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
