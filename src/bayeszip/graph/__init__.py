"""What a network computes, as data: traced from a module, shrunk without changing it, and back to a module."""

from bayeszip.graph.folding import fold_norms
from bayeszip.graph.free_sizes import begin_even
from bayeszip.graph.indices import dense_state
from bayeszip.graph.into import load_into
from bayeszip.graph.liveness import coupled_units, drop_dead_units
from bayeszip.graph.lowering import UnknownOperator
from bayeszip.graph.ordering import order_units
from bayeszip.graph.plain import copied, plain_copy, unwrapped_names
from bayeszip.graph.proof import difference, prove_same
from bayeszip.graph.soundness import check_sound
from bayeszip.graph.state import FLOATING, dense_tensors, from_state, plain_tensors, to_raw, to_torch
from bayeszip.graph.to_module import to_module
from bayeszip.graph.trace import UntraceableModel, trace
from bayeszip.graph.values import drop_unused_values
from bayeszip.graph.vectors import free_vectors

__all__ = [
    "FLOATING",
    "UnknownOperator",
    "UntraceableModel",
    "begin_even",
    "check_sound",
    "copied",
    "coupled_units",
    "dense_state",
    "dense_tensors",
    "difference",
    "drop_dead_units",
    "drop_unused_values",
    "fold_norms",
    "free_vectors",
    "from_state",
    "load_into",
    "order_units",
    "plain_copy",
    "plain_tensors",
    "prove_same",
    "to_module",
    "to_raw",
    "to_torch",
    "trace",
    "unwrapped_names",
]
