"""The paper's experiments and ours: settings in `plan`, one `runner`, `records`, `tables` and `pages`."""

__all__ = ["EXPERIMENTS", "Experiment", "Run"]

from bayeszip.experiments.plan import EXPERIMENTS, Experiment, Run
