"""q(w), the terms that weigh it, and the layers that hold it."""

from bayeszip.variational.convert import Conversion, check_materialized, to_stock, to_variational
from bayeszip.variational.divergence import Divergence
from bayeszip.variational.groups import GroupPrior
from bayeszip.variational.layers import VariationalLayer, VariationalWeight, variational_weights
from bayeszip.variational.mixture import GaussianMixture, MixturePrior
from bayeszip.variational.objective import Weighed, regularizer
from bayeszip.variational.rate import Rate
from bayeszip.variational.terms import Term

__all__ = [
    "Conversion",
    "Divergence",
    "GaussianMixture",
    "GroupPrior",
    "MixturePrior",
    "Rate",
    "Term",
    "VariationalLayer",
    "VariationalWeight",
    "Weighed",
    "check_materialized",
    "regularizer",
    "to_stock",
    "to_variational",
    "variational_weights",
]
