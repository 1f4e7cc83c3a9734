"""Weights whose size is free, since a batch norm behind them divides it out: `before_norms`, and `begin_even`.

Adam moves each weight by about the learning rate, and the noise at the start has one width, whatever a weight's size.
After a pretraining with weight decay the layers of a deep network differ in size by a factor of fifty, so that both are
lost on some of them and wipe out others. The same function by weights of one size can be trained at one rate.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayeszip.graph.folding import CHANNELS
from bayeszip.graph.lowering import UnknownOperator
from bayeszip.graph.plain import copied
from bayeszip.graph.trace import UntraceableModel, trace
from bayeszip.tensors import Graph

__all__ = ["BeforeNorm", "before_norms", "begin_even"]


class BeforeNorm(NamedTuple):
    """A layer with a norm behind it, by the names of what is multiplied as its weight is, and of what is not."""

    weight: str
    bias: str | None
    mean: str
    variance: str
    affine: tuple[str | None, ...]
    #: What the norm adds to a variance.
    eps: float


def before_norms(graph: Graph) -> list[BeforeNorm]:
    """The layers that a batch norm with statistics reads, and nobody else does."""
    reads = [value for node in graph.nodes for value in node.inputs]
    names = [name for node in graph.nodes for name in node.tensors if name is not None]
    found = []
    for norm in graph.nodes:
        if not norm.op.startswith("batch_norm") or None in norm.tensors[2:4]:
            continue
        (source,) = norm.inputs
        node = graph.nodes[source - graph.inputs] if source >= graph.inputs else None
        if node is None or node.op not in CHANNELS or reads.count(source) + graph.outputs.count(source) > 1:
            continue
        own = (*node.tensors[:2], *norm.tensors[2:4])
        if own[0] is not None and all(name is None or names.count(name) == 1 for name in own):
            eps = float(norm.attributes["eps"])  # type: ignore[arg-type]
            found.append(BeforeNorm(str(own[0]), own[1], str(own[2]), str(own[3]), norm.tensors[:2], eps))
    return found


@torch.no_grad()
def begin_even(network: nn.Module, examples: tuple[Tensor, ...], size: float) -> None:
    """Bring weights with a batch norm behind them to the root mean square `size`; the network computes what it did.

    That is exact in `eval()`; in training a norm adds its ε to variances that are others now. One that can't be traced
    stays as it is, and so does a layer that is frozen, or its norm.

    Args:
        examples: its inputs, on the CPU.
    """
    try:
        graph = trace(copied(network).cpu(), examples)
    except (UnknownOperator, UntraceableModel):
        return
    held = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    for layer in before_norms(graph):
        own = float(held[layer.weight].double().square().mean().sqrt())
        if own == 0 or not math.isfinite(own) or frozen.intersection((layer.weight, layer.bias, *layer.affine)):
            continue
        variance, eps = held[layer.variance], layer.eps
        # v + ε is multiplied, and v can't fall below 0: weights become no smaller than that allows.
        least = math.sqrt(eps / (float(variance.min()) + eps)) if eps else 0.0
        factor = max(size / own, least)
        for name in (layer.weight, layer.bias, layer.mean):
            if name is not None:
                held[name].mul_(factor)
        variance.copy_((factor**2 * (variance.double() + eps) - eps).clamp_(min=0))
