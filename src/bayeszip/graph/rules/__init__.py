"""What each operator of the closed list means to the analysis: one rule for each, found by the operator's name."""

from bayeszip.graph.rules.base import Rule
from bayeszip.graph.rules.elementwise import Unary
from bayeszip.graph.rules.layout import Flatten, Input, Reshape
from bayeszip.graph.rules.pooling import AveragePool, MaxPool
from bayeszip.graph.rules.weighted import Convolution, Linear

__all__ = ["RULES"]

RULES: dict[str, Rule] = {
    "input": Input(),
    "linear": Linear(),
    "conv1d": Convolution(1),
    "conv2d": Convolution(2),
    "conv3d": Convolution(3),
    "max_pool1d": MaxPool(1),
    "max_pool2d": MaxPool(2),
    "avg_pool1d": AveragePool(1),
    "avg_pool2d": AveragePool(2),
    "relu": Unary("relu"),
    "tanh": Unary("tanh"),
    "sigmoid": Unary("sigmoid"),
    "flatten": Flatten(),
    "reshape": Reshape(),
}
