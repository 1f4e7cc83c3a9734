"""How settings move over a phase: functions of the share of it that is done, in [0, 1]."""

import math
from collections.abc import Callable

__all__ = ["SCHEDULES", "geometric", "ramp"]


def _constant(done: float) -> float:
    return 1.0


def _linear(done: float) -> float:
    return 1.0 - done


def _cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


#: name → factor on a learning rate; all but `constant` end at 0
SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def ramp(done: float, share: float) -> float:
    """From 0 to 1 linearly over the first `share` of a phase, then 1."""
    return 1.0 if share <= 0 else min(1.0, done / share)


def geometric(done: float, first: float, last: float) -> float:
    """From `first` to `last` in even ratios."""
    return first * (last / first) ** done
