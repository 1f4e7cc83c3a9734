"""q(w), p(w), and the layers that hold them."""

from bayeszip.variational.convert import Conversion, check_materialized, to_stock, to_variational
from bayeszip.variational.layers import VariationalLayer, VariationalWeight, variational_weights
from bayeszip.variational.mixture import MixturePrior
from bayeszip.variational.objective import Regularizer, regularizer

__all__ = [
    "Conversion",
    "MixturePrior",
    "Regularizer",
    "VariationalLayer",
    "VariationalWeight",
    "check_materialized",
    "regularizer",
    "to_stock",
    "to_variational",
    "variational_weights",
]
