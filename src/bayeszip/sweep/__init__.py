"""Sweeps: many compressions of one network under varied settings, on one machine or many, and the front they reach."""

from bayeszip.sweep.front import Front, front_of, write_front
from bayeszip.sweep.space import Dimension, grid_of, parse_dimensions
from bayeszip.sweep.study import SharedStudy, check_optuna, open_study
from bayeszip.sweep.worker import Outcome, Plan, check_classes, check_success, work

__all__ = [
    "Dimension",
    "Front",
    "Outcome",
    "Plan",
    "SharedStudy",
    "check_classes",
    "check_optuna",
    "check_success",
    "front_of",
    "grid_of",
    "open_study",
    "parse_dimensions",
    "work",
    "write_front",
]
