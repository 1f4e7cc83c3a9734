"""What each operator of the closed list means to the analysis: one rule for each, found by the operator's name."""

import numpy as np

from bayeszip.graph.rules.base import Rule
from bayeszip.graph.rules.elementwise import Binary, Elementwise, PReLU, Unary
from bayeszip.graph.rules.layout import (
    Concat,
    Expand,
    Flatten,
    Input,
    Pad,
    Permute,
    Reshape,
    Select,
    Slice,
    Take,
    View,
)
from bayeszip.graph.rules.norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from bayeszip.graph.rules.pooling import AveragePool, MaxPool, Resized
from bayeszip.graph.rules.recurrent import Recurrent
from bayeszip.graph.rules.reduction import ArgMax, Attention, Matmul, Reduction, Softmax
from bayeszip.graph.rules.tables import Embedding, Stored
from bayeszip.graph.rules.weighted import Convolution, Linear, TransposedConvolution

__all__ = ["RULES"]

_ACTIVATIONS = (
    "relu", "tanh", "sigmoid", "gelu", "silu", "relu6", "hardswish", "hardsigmoid", "leaky_relu", "elu", "selu", "celu",
    "mish", "softplus", "softsign", "log_sigmoid", "clamp", "pow", "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs",
    "neg", "sin", "cos", "erf", "sign", "floor", "round", "log1p", "expm1", "add_scalar", "mul_scalar", "div_scalar",
)  # fmt: skip

RULES: dict[str, Rule] = {
    "input": Input(),
    "parameter": Stored(),
    "buffer": Stored(),
    "embedding": Embedding(),
    "linear": Linear(),
    **{f"conv{rank}d": Convolution(rank) for rank in (1, 2, 3)},
    **{f"conv_transpose{rank}d": TransposedConvolution(rank) for rank in (1, 2, 3)},
    **{f"max_pool{rank}d": MaxPool(rank) for rank in (1, 2, 3)},
    **{f"avg_pool{rank}d": AveragePool(rank) for rank in (1, 2, 3)},
    **{f"adaptive_avg_pool{rank}d": Resized("output_size") for rank in (1, 2, 3)},
    **{f"adaptive_max_pool{rank}d": Resized("output_size") for rank in (1, 2)},
    "interpolate": Resized("size"),
    **{f"batch_norm{rank}d": BatchNorm() for rank in (1, 2, 3)},
    **{f"instance_norm{rank}d": InstanceNorm() for rank in (1, 2, 3)},
    "group_norm": GroupNorm(),
    "layer_norm": LayerNorm(),
    "rms_norm": LayerNorm(),
    **{name: Unary(name) for name in _ACTIVATIONS},
    "prelu": PReLU(),
    "add": Binary(np.add),
    "sub": Binary(np.subtract),
    "mul": Binary(np.multiply, zero_wins=True),
    "div": Binary(np.divide),
    "maximum": Binary(np.maximum),
    "minimum": Binary(np.minimum),
    "masked_fill": Elementwise(),
    "where": Elementwise(),
    "compare_scalar": Elementwise(),
    "compare": Elementwise(),
    "logical_not": Elementwise(),
    "cast": Elementwise(),
    "flatten": Flatten(),
    "reshape": Reshape(),
    "view": View(),
    "expand": Expand(),
    "permute": Permute(),
    "concat": Concat(),
    "slice": Slice(),
    "select": Select(),
    "take": Take(),
    "pad": Pad(),
    "mean": Reduction("mean"),
    "sum": Reduction("sum"),
    "amax": Reduction("amax"),
    "argmax": ArgMax(),
    "cumsum": Softmax(),
    "softmax": Softmax(),
    "log_softmax": Softmax(),
    "matmul": Matmul(),
    "attention": Attention(),
    "lstm": Recurrent(gates=4, source=2),
    "gru": Recurrent(gates=3, source=2),
    "rnn": Recurrent(gates=1, source=0),
}
