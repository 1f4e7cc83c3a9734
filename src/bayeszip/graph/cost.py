"""What running a network costs: multiply-adds and time, for one sample."""

import statistics
import time

import torch

from bayeszip.errors import BayeszipError
from bayeszip.graph.families import RULES
from bayeszip.graph.proof import random_inputs
from bayeszip.graph.soundness import shapes, states_inputs, tensor_shapes
from bayeszip.graph.to_module import to_module
from bayeszip.limits import Limits
from bayeszip.tensors import CompressedModel

__all__ = ["latency", "multiply_adds"]

#: Operators whose work is multiplying and adding.
_MULTIPLYING = ("linear", "conv", "lstm", "gru", "rnn", "matmul", "attention")

#: How often a network is run to time it, and up to how many multiply-adds it is.
_RUNS, _MOST = 7, 2**31


def multiply_adds(model: CompressedModel) -> int | None:
    """How many multiply-adds one sample takes in layers, convolutions and attention; None without a graph.

    Zeros inside a tensor count, as they do for any dense computation.
    """
    graph = model.graph
    if graph is None or not states_inputs(graph):
        return None
    found, tensors, total = shapes(model), tensor_shapes(model), 0
    for position, node in enumerate(graph.nodes):
        if node.op.startswith(_MULTIPLYING):
            read, own = [found[value] for value in node.inputs], [tensors.get(str(name)) for name in node.tensors]
            total += RULES[node.op].operations(read, found[graph.inputs + position], own)
    return total


@torch.no_grad()
def latency(model: CompressedModel) -> float | None:
    """Seconds that one sample takes on this CPU, by one thread; the median of some runs. None where it isn't known.

    That is without a graph, where a network takes too long to be timed by the way, or can't be run on random inputs.
    """
    work = multiply_adds(model)
    if work is None or work > _MOST:
        return None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        network = to_module(model, limits=Limits.none())
        inputs = random_inputs(model, torch.Generator().manual_seed(0), batch=1)
        times = []
        for _ in range(1 + _RUNS):
            began = time.perf_counter()
            network(*inputs)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])
    except (BayeszipError, RuntimeError, IndexError, ValueError):
        return None
    finally:
        torch.set_num_threads(threads)
