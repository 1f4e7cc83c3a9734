"""How the posterior is reached: phases of training."""

from bayeszip.fitting.batches import count_examples
from bayeszip.fitting.evaluation import evaluate
from bayeszip.fitting.loop import EpochStats, Fitting, Watcher, fit
from bayeszip.fitting.phases import Phase

__all__ = ["EpochStats", "Fitting", "Phase", "Watcher", "count_examples", "evaluate", "fit"]
