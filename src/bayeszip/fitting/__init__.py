"""How the posterior is reached: phases of training."""

from bayeszip.fitting.batches import Batch, count_examples
from bayeszip.fitting.course import Course, start_terms
from bayeszip.fitting.evaluation import Figures, Judge, Metric, evaluate
from bayeszip.fitting.likelihood import Likelihood
from bayeszip.fitting.loop import Fitting, fit
from bayeszip.fitting.phases import Phase
from bayeszip.fitting.resident import ResidentBatches
from bayeszip.fitting.steering import Steering
from bayeszip.fitting.watching import EpochStats, Watcher

__all__ = [
    "Batch",
    "Course",
    "EpochStats",
    "Figures",
    "Fitting",
    "Judge",
    "Likelihood",
    "Metric",
    "Phase",
    "ResidentBatches",
    "Steering",
    "Watcher",
    "count_examples",
    "evaluate",
    "fit",
    "start_terms",
]
