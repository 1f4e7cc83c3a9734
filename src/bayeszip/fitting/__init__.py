"""How the posterior is reached: phases of training."""

from bayeszip.fitting.loop import EpochStats, Watcher, count_examples, evaluate, fit
from bayeszip.fitting.phases import Phase

__all__ = ["EpochStats", "Phase", "Watcher", "count_examples", "evaluate", "fit"]
