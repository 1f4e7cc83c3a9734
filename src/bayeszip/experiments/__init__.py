"""The paper's experiments and ours: settings in `plan`, one `runner`, `records`, `tables`, `pictures` and `pages`."""

__all__ = ["EXPERIMENTS", "Experiment", "Run"]

from bayeszip.experiments.plan import EXPERIMENTS
from bayeszip.experiments.runs import Experiment, Run
